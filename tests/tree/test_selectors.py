"""Where trees branch and what they may cost."""

import random

import pytest

from verl_bpo.tree.budget import Budget
from verl_bpo.tree.selectors import (
    Candidate,
    ScoreMemory,
    branch_score,
    decision_score,
    online_selector,
    quantile,
    rank,
)


def selector(name: str, **options):
    return online_selector(name, **{"limit": 1.0, "share": 0.25, "interval": 3, **options})


def test_only_the_first_tokens_entropy_depends_on_the_state_alone():
    assert decision_score([2.0, 0.5, 0.0, 0.0], "first", 2) == 2.0
    assert decision_score([2.0, 0.5, 0.0, 0.0], "first_m", 2) == 1.25
    assert decision_score([2.0, 0.5, 0.0, 0.0], "all", 2) == 0.625
    assert decision_score([0.0, 0.5, 2.0], "open", 2) == 0.0
    assert decision_score([0.0, 0.5, 2.0], "open", 2, forced=2) == 2.0
    assert decision_score([0.0, 0.5, 2.0], "open", 2, forced=3) == 2.0  # a sample cut inside the form: its last token
    assert decision_score([0.0, 0.5, 2.0], "first", 2, forced=2) == 0.0
    assert decision_score([], "open", 2, forced=1) == decision_score([], "all", 2) == 0.0


def test_threshold_branches_at_and_above_its_limit():
    assert [selector("threshold")(s, 1, 0.5) for s in (0.99, 1.0, 1.5)] == [False, True, True]


def test_fixed_interval_counts_turns():
    assert [d for d in range(1, 10) if selector("fixed_interval")(0.0, d, 0.5)] == [3, 6, 9]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_quantile_branches_at_its_target_share_while_entropy_drifts(share):
    rng, memory, chosen = random.Random(1), ScoreMemory(window=256), []
    for step in range(100):
        scores = [rng.expovariate(1.0) * (1 - 0.7 * step / 100) for _ in range(40)]
        select = quantile(memory.limit(share), share)
        chosen += [select(score, 1, rng.random()) for score in scores]
        memory.add(scores)
    assert sum(chosen) / len(chosen) == pytest.approx(share, abs=0.06)


def test_quantile_branches_at_random_until_it_knows_enough_scores():
    memory = ScoreMemory(warm=3)
    memory.add([1.0, 2.0])
    assert memory.limit(0.5) is None
    assert [quantile(None, 0.5)(9.0, 1, chance) for chance in (0.49, 0.5)] == [True, False]
    memory.add([4.0])
    assert memory.limit(0.5) == 2.0
    assert [quantile(2.0, 0.5)(score, 1, 0.0) for score in (2.0, 2.1)] == [False, True]


def test_the_memory_forgets_whole_steps_and_none_that_the_window_needs():
    memory = ScoreMemory(window=4, warm=1)
    for step in ([9.0, 9.0, 9.0], [1.0, 1.0], [2.0, 2.0]):
        memory.add(step)
    assert list(memory.steps) == [[1.0, 1.0], [2.0, 2.0]]


def test_random_branches_at_its_share():
    assert [selector("random", share=0.3)(0.0, 1, chance) for chance in (0.0, 0.299, 0.3)] == [True, True, False]


def test_rank_prefers_high_scores_and_leaves_failed_trunks_out():
    points = [Candidate(0, 1, 0.2, True), Candidate(0, 2, 0.9, True), Candidate(1, 5, 2.0, False)]
    assert [c.node for c in rank(points, "any")] == [5, 2, 1]
    assert [c.node for c in rank(points, "success")] == [2, 1]


def test_equal_scores_are_ranked_by_trajectory_whatever_ended_first():
    one = [Candidate(0, 4, 0.5, True), Candidate(1, 1, 0.5 + 1e-7, True), Candidate(1, 3, 0.7, True)]
    other = [Candidate(0, 1, 0.5 + 1e-7, True), Candidate(1, 2, 0.5, True), Candidate(1, 4, 0.7, True)]
    for points in (one, other, one[::-1]):
        assert [(c.trajectory, round(c.score, 4)) for c in rank(points, "any")] == [(1, 0.7), (0, 0.5), (1, 0.5)]


@pytest.mark.parametrize("unit,limit,expected", [("leaves", 5, 5), ("env_steps", 35, 3), ("tokens", 170, 2)])
def test_a_budget_admits_what_fits_at_its_longest(unit, limit, expected):
    budget = Budget(unit, limit, max_turns=10, max_action_tokens=8)
    granted = 0
    while budget.affordable(0):
        budget.reserve(0)
        granted += 1
    assert granted == expected


def test_a_short_trajectory_gives_its_rest_back():
    budget = Budget("env_steps", 20, max_turns=10, max_action_tokens=8)
    budget.reserve(0), budget.reserve(0)
    assert budget.affordable(0) == 0
    budget.settle(0, env_steps=3, tokens=11)
    assert (budget.spent, budget.affordable(0), budget.affordable(5)) == (3, 0, 1)
    budget.settle(0, env_steps=7, tokens=11)
    assert (budget.spent, budget.affordable(0)) == (10, 1)


def test_a_late_fork_costs_only_the_turns_left():
    budget = Budget("env_steps", 12, max_turns=10, max_action_tokens=8)
    assert budget.affordable(7) == 4


@pytest.mark.parametrize(
    "kind, value, expected",
    [
        ("entropy", None, 2.0),
        ("value", 0.5, 0.25),
        ("value", 1.3, 0.0),
        ("value", -0.1, 0.0),
        ("entropy_value", 0.25, 0.375),
    ],
)
def test_a_state_is_open_where_its_value_is_far_from_both_ends(kind, value, expected):
    assert branch_score(kind, 2.0, value) == expected


def test_a_score_without_its_value_is_an_error():
    with pytest.raises(ValueError, match="bpo.branch.score=value needs state values"):
        branch_score("value", 2.0, None)
