"""Random numbers that belong to places."""

from itertools import product

from verl_bpo.tree.draws import drawn


def test_draws_of_neighbouring_places_are_independent():
    """A checksum's aren't: whether two depths of one tree are both below a quarter then follows a fixed pattern."""
    trees = 4000
    below = [
        [drawn(7, f"3/{tree}/0/0/{depth}/branch") / 2**32 < 0.25 for depth in range(1, 5)] for tree in range(trees)
    ]
    for first, second in product(range(4), repeat=2):
        both = sum(row[first] and row[second] for row in below) / trees
        assert abs(both - (0.25 if first == second else 0.0625)) < 0.03


def test_a_draw_is_always_the_same_one_for_a_seed_and_a_place():
    assert drawn(1, "a/0") == drawn(1, "a/0")
    assert len({drawn(seed, place) for seed in (1, 2) for place in ("a/0", "a/1", "b/0")}) == 6
