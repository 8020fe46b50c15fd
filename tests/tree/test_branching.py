"""Where trees branch and what they may cost."""

import random

import pytest

from verl_bpo.tree.branching import Candidate, Quantile, decision_score, online_selector, rank
from verl_bpo.tree.budget import Budget


def selector(name: str, **options):
    return online_selector(name, **{"limit": 1.0, "share": 0.25, "interval": 3, "rng": random.Random(0), **options})


def test_only_the_first_tokens_entropy_depends_on_the_state_alone():
    assert decision_score([2.0, 0.5, 0.0, 0.0], "first", 2) == 2.0
    assert decision_score([2.0, 0.5, 0.0, 0.0], "first_m", 2) == 1.25
    assert decision_score([2.0, 0.5, 0.0, 0.0], "all", 2) == 0.625
    assert decision_score([], "all", 2) == 0.0


def test_threshold_branches_at_and_above_its_limit():
    assert [selector("threshold")(s, 1) for s in (0.99, 1.0, 1.5)] == [False, True, True]


def test_fixed_interval_counts_turns():
    assert [d for d in range(1, 10) if selector("fixed_interval")(0.0, d)] == [3, 6, 9]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_quantile_branches_at_its_target_share_while_entropy_drifts(share):
    rng, drifting = random.Random(1), Quantile(share, random.Random(2), window=256)
    chosen = [drifting(rng.expovariate(1.0) * (1 - 0.7 * i / 4000), 1) for i in range(4000)]
    assert sum(chosen[64:]) / len(chosen[64:]) == pytest.approx(share, abs=0.06)


def test_quantile_decides_before_it_learns_the_score():
    scores = Quantile(0.5, random.Random(0), warm=2)
    scores(1.0, 1), scores(2.0, 1)
    assert scores(10.0, 1) is True  # above the median of 1 and 2
    assert scores(1.6, 1) is False  # below that of 1, 2 and 10


def test_random_branches_at_its_share():
    random_selector = selector("random", share=0.3)
    assert sum(random_selector(0.0, 1) for _ in range(5000)) / 5000 == pytest.approx(0.3, abs=0.03)


def test_rank_prefers_high_scores_and_leaves_failed_trunks_out():
    points = [Candidate(0, 1, 0.2, True), Candidate(0, 2, 0.9, True), Candidate(1, 5, 2.0, False)]
    assert [c.node for c in rank(points, "any")] == [5, 2, 1]
    assert [c.node for c in rank(points, "success")] == [2, 1]


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
