"""Where trees branch and what they may cost."""

import random

import pytest

from verl_bpo.options import ConfigError, read
from verl_bpo.tree.branching import Branching
from verl_bpo.tree.budget import Budget
from verl_bpo.tree.selectors import SELECTORS, DecisionPoint, Quantile, ScoreMemory, TopK, selector_class


def at(score: float = 0.0, depth: int = 1, chance: float = 0.5, **more) -> DecisionPoint:
    return DecisionPoint(depth=depth, entropy=score, value=more.pop("value", None), chance=chance, **more)


def selector(name: str, **options):
    return SELECTORS[name](**options)


def test_only_the_first_tokens_entropy_depends_on_the_state_alone():
    def signal(entropy, tokens, forced=0):
        return Branching(entropy_tokens=tokens, entropy_m=2).entropy(entropy, forced)

    assert signal([2.0, 0.5, 0.0, 0.0], "first") == 2.0
    assert signal([2.0, 0.5, 0.0, 0.0], "first_m") == 1.25
    assert signal([2.0, 0.5, 0.0, 0.0], "all") == 0.625
    assert signal([0.0, 0.5, 2.0], "open") == 0.0
    assert signal([0.0, 0.5, 2.0], "open", forced=2) == 2.0
    assert signal([0.0, 0.5, 2.0], "open", forced=3) == 2.0  # a sample cut inside the form: its last token
    assert signal([0.0, 0.5, 2.0], "first", forced=2) == 0.0
    assert signal([], "open", forced=1) == signal([], "all") == 0.0


def test_threshold_branches_at_and_above_its_limit():
    assert [selector("threshold").chooses(at(s)) for s in (0.99, 1.0, 1.5)] == [False, True, True]


def test_fixed_interval_counts_turns():
    assert [d for d in range(1, 10) if selector("fixed_interval").chooses(at(depth=d))] == [3, 6, 9]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_quantile_branches_at_its_target_share_while_entropy_drifts(share):
    rng, memory, chosen = random.Random(1), ScoreMemory(window=256), []
    for step in range(100):
        scores = [rng.expovariate(1.0) * (1 - 0.7 * step / 100) for _ in range(40)]
        quantile = Quantile(share=share)
        select = quantile.knowing(quantile.taught(memory))
        chosen += [select.chooses(at(score, chance=rng.random())) for score in scores]
        memory.add(scores)
    assert sum(chosen) / len(chosen) == pytest.approx(share, abs=0.06)


def test_quantile_branches_at_random_until_it_knows_enough_scores():
    memory = ScoreMemory(warm=3)
    memory.add([1.0, 2.0])
    half = Quantile(share=0.5)
    assert half.taught(memory) is None
    assert [half.knowing(None).chooses(at(9.0, chance=chance)) for chance in (0.49, 0.5)] == [True, False]
    memory.add([4.0])
    assert half.taught(memory) == 2.0
    assert [half.knowing(2.0).chooses(at(score, chance=0.0)) for score in (2.0, 2.1)] == [False, True]


def test_the_memory_forgets_whole_steps_and_none_that_the_window_needs():
    memory = ScoreMemory(window=4, warm=1)
    for step in ([9.0, 9.0, 9.0], [1.0, 1.0], [2.0, 2.0]):
        memory.add(step)
    assert list(memory.steps) == [[1.0, 1.0], [2.0, 2.0]]


def test_random_branches_at_its_share():
    assert [selector("random", share=0.3).chooses(at(chance=chance)) for chance in (0.0, 0.299, 0.3)] == [
        True,
        True,
        False,
    ]


def visited(trajectory, node, score, success=True):
    return at(score, trajectory=trajectory, node=node, success=success)


def test_rank_prefers_high_scores_and_leaves_failed_trunks_out():
    points = [visited(0, 1, 0.2), visited(0, 2, 0.9), visited(1, 5, 2.0, success=False)]
    assert [p.node for p in TopK().ranked(points)] == [5, 2, 1]
    assert [p.node for p in TopK(trunk="success").ranked(points)] == [2, 1]


def test_equal_scores_are_ranked_by_trajectory_whatever_ended_first():
    one = [visited(0, 4, 0.5), visited(1, 1, 0.5 + 1e-7), visited(1, 3, 0.7)]
    other = [visited(0, 1, 0.5 + 1e-7), visited(1, 2, 0.5), visited(1, 4, 0.7)]
    for points in (one, other, one[::-1]):
        ranked = [(p.trajectory, round(p.entropy, 4)) for p in TopK().ranked(points)]
        assert ranked == [(1, 0.7), (0, 0.5), (1, 0.5)]


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
    assert TopK(score=kind).score_of(at(2.0, value=value)) == expected


def test_a_score_without_its_value_is_an_error():
    with pytest.raises(ValueError, match="bpo.branch.score=value needs state values"):
        TopK(score="value").score_of(at(2.0))


OWN = """
from verl_bpo.tree.selectors import Choosing


class Late(Choosing):
    after: int = 3

    def chooses(self, point):
        return point.depth >= self.after

    def state_only(self, entropy_of_state):
        return True
"""


def test_a_selector_of_ones_own_is_one_file_and_its_fields_are_keys(tmp_path):
    file = tmp_path / "late.py"
    file.write_text(OWN)
    branching = read(Branching, {"selector": f"{file}:Late", "after": 2, "forks": 3}, "bpo.branch")
    assert [branching.selector.chooses(at(depth=d)) for d in (1, 2)] == [False, True]
    assert branching.state_only
    again = read(Branching, branching.model_dump(), "bpo.branch")
    assert again == branching and again.forks == 3
    with pytest.raises(ConfigError, match="bpo.branch.after='x' must be int"):
        read(Branching, {"selector": f"{file}:Late", "after": "x"}, "bpo.branch")


@pytest.mark.parametrize(
    "name, message",
    [
        ("best", "bpo.branch.selector='best' is not one of most_uncertain, threshold, .* nor file.py:Class"),
        ("nowhere.py:Late", "no file nowhere.py"),
        ("verl_bpo.tree.budget:Budget", "Budget is no selector: derive it from verl_bpo.tree.selectors.Selector"),
    ],
)
def test_a_selector_that_is_not_there_is_named(name, message):
    with pytest.raises(ConfigError, match=message):
        selector_class(name)


def test_a_parameter_of_another_selector_is_refused_by_name():
    with pytest.raises(ConfigError, match="interval is for selector fixed_interval, and bpo.branch.selector=threshold"):
        read(Branching, {"selector": "threshold", "interval": 2}, "bpo.branch")


@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_comes_back_from_its_resolved_config(name):
    branching = read(Branching, {"selector": name}, "bpo.branch")
    assert read(Branching, branching.model_dump(), "bpo.branch") == branching
