"""The state graph against its definition read place by place, its edges, and what its expected gradient is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from enumeration import Process, expected_gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from second_definitions import assert_same, batches, forest_of, grown, shared_code
from tabular import TabularMDP, enumerate_outcomes
from tabular import expected_gradient as tabular_gradient

from verl_bpo.advantages.bpo import sibling_advantages
from verl_bpo.advantages.state_graph import StateGraph
from verl_bpo.config.schema import build, find_estimator
from verl_bpo.options import ConfigError
from verl_bpo.report import slow_state_graph as slow_module
from verl_bpo.report.slow_state_graph import slow_state_graph
from verl_bpo.tree.topology import ROOT, Tree

OPTIONS = st.fixed_dictionaries(
    {
        "states": st.sampled_from(["observation", "digest"]),
        "prior": st.sampled_from([0.0, 1.0, 0.3]),
        "pooled": st.booleans(),
    }
)


@settings(max_examples=100, deadline=None)
@given(batches, OPTIONS)
def test_the_definition_read_place_by_place_gives_the_same(batch, options):
    forest = forest_of(*batch)
    assert_same(StateGraph(**options)(forest), forest, slow_state_graph(batch, **options))


def test_the_slow_definition_shares_no_code_with_the_estimator():
    assert not shared_code(slow_module)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_two_trajectories_that_meet_are_one_from_there_on():
    """Both leave the initial state 7 differently and meet in state 5 as their third turn; one wins from there."""
    batch = [
        ("p", grown((ROOT, [(7, 0.0), (1, 0.0), (5, 1.0)], "terminated"))),
        ("p", grown((ROOT, [(7, 0.0), (3, 0.0), (5, 0.0)], "terminated"))),
        ("p", grown((ROOT, [(7, 0.0)], "terminated"))),
    ]
    found = StateGraph(states="observation")(forest_of(*batch))
    # State 5 is worth 1/2 to both of the two that come there, however their own went on.
    first = [0.5 - 0.25, 0.5 - 0.25, 0.0 - 0.5]
    before = 0.25
    assert found.advantage.tolist() == pytest.approx(
        [first[0], 0.5 - before, 1 - (0 + before) / 2, first[1], 0.5 - before, 0 - (1 + before) / 2, first[2]]
    )
    assert found.metrics["state_graph/met_again"] == pytest.approx(0.5)


def test_the_same_state_at_another_time_is_another_place():
    batch = [
        ("p", grown((ROOT, [(7, 0.0), (5, 1.0)], "terminated"))),
        ("p", grown((ROOT, [(7, 0.0), (7, 0.0), (5, 0.0)], "terminated"))),
    ]
    found = StateGraph(states="observation")(forest_of(*batch))
    assert found.metrics["state_graph/met_again"] == 0
    assert found.advantage.tolist() == [1.0, 1.0, -1.0, -1.0, -1.0]


@settings(max_examples=100, deadline=None)
@given(batches)
def test_where_states_never_meet_it_is_bpo_with_tree_means(batch):
    """Siblings are in one state, others are not: with ``prior=0`` both give one number wherever both give one."""
    forest = forest_of(*batch)
    forest = replace(forest, digest=torch.where(forest.parent == ROOT, 0, forest.parent + 1))
    graph = StateGraph(prior=0.0)(forest)
    bpo = sibling_advantages(forest, leaf_return="tree_mean")
    both = graph.valid & bpo.valid & forest.fair
    heads = bpo.comparison.head == torch.arange(len(both))
    torch.testing.assert_close(graph.advantage[both & heads], bpo.advantage[both & heads], rtol=1e-9, atol=1e-9)


def test_equal_rewards_teach_nothing_and_say_so():
    batch = [("p", grown((ROOT, [(1, 0.1), (2, 0.2)], "truncated"))) for _ in range(5)]
    found = StateGraph()(forest_of(*batch))
    assert found.degenerate and found.valid.all() and not found.advantage.any()


def test_a_prompts_only_rollout_is_masked():
    found = StateGraph()(forest_of(("p", grown((ROOT, [(1, 0.0), (2, 1.0)], "terminated")))))
    assert not found.valid.any() and found.degenerate


def test_an_empty_batch_and_one_whose_trees_are_all_lost_have_no_advantage():
    for batch in ([], [("p", Tree(prompt_ids=[]))], [("p", grown((ROOT, [(1, 0.0)], "failed")))]):
        found = StateGraph()(forest_of(*batch))
        assert found.degenerate and not found.valid.any()
        assert all(math.isfinite(x) for x in found.metrics.values())


def test_a_run_that_does_not_ask_for_digests_is_refused_before_it_starts():
    with pytest.raises(ConfigError, match="set \\+bpo.estimator.states=digest"):
        find_estimator(build({}, "plain"), "state_graph")
    assert find_estimator(build({"estimator": {"states": "digest"}}, "plain"), "state_graph") == StateGraph()
    assert find_estimator(build({"estimator": {"states": "observation"}}, "plain"), "state_graph")


# --- what the expected gradient is ------------------------------------------------------------------------------------


def tabular(seed: int, rollouts: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected gradient and the true one, over all logits of a process whose trajectories meet again."""
    mdp = TabularMDP(states=4, actions=2, horizon=3, seed=seed)
    outcomes = enumerate_outcomes(mdp, lambda *_: 0, roots=rollouts)
    reward = mdp.reward[outcomes.state, outcomes.action]
    found = StateGraph(states="observation", **options)(
        replace(outcomes.forest, reward=reward, observed=outcomes.state)
    )
    return tabular_gradient(mdp, outcomes, found.advantage * found.weight), rollouts * mdp.policy_gradient()


@pytest.mark.parametrize("options", [{"prior": 0.0}, {"pooled": False}, {"prior": 0.0, "pooled": False}])
@pytest.mark.parametrize("rollouts", [2, 3])
def test_it_is_the_true_gradient_without_a_prior_and_without_pooling(rollouts, options):
    """Of each logit, to the last digit, where N-1 of N rollouts count for GiGPO."""
    for seed in range(4):
        found, true = tabular(seed, rollouts, **options)
        torch.testing.assert_close(found, true, rtol=0, atol=1e-10)


def test_with_both_it_is_shorter_at_some_states_and_turns_no_direction():
    """What lies above a turn's baseline knows, by the pool, a little of the turn itself."""
    for seed, rollouts, cosine in ((0, 2, 0.9966), (1, 2, 0.9994), (0, 3, 0.9994), (3, 3, 1.0)):
        found, true = tabular(seed, rollouts)
        assert (found * true > -1e-12).all()
        assert (found.abs() <= true.abs() + 1e-12).all()
        assert float(torch.cosine_similarity(found.flatten(), true.flatten(), 0)) == pytest.approx(cosine, abs=2e-3)


@pytest.mark.parametrize("rollouts, shortest", [(2, 0.766), (3, 0.884)])
def test_the_shortest_of_the_gradients_at_a_state_are_as_the_documentation_says(rollouts, shortest):
    shares = []
    for seed in range(4):
        found, true = tabular(seed, rollouts)
        shares += (found / true)[true.abs() > 1e-12].tolist()
        assert float(torch.cosine_similarity(found.flatten(), true.flatten(), 0)) > 0.9966
    assert min(shares) == pytest.approx(shortest, abs=1e-3) and max(shares) <= 1 + 1e-9


@pytest.mark.parametrize("preset", ["guided", "critic"])
@pytest.mark.parametrize("graded", [False, True])
def test_on_trees_every_state_learns_in_the_right_direction(preset, graded):
    keys = {"budget": {"limit": 4}, "env": {"max_turns": 3, "max_action_tokens": 1}}
    branch = {
        "guided": {"root_samples": 2, "top_k": 1, "entropy_tokens": "first"},
        "critic": {"root_samples": 2, "top_k": 2},
    }
    for seed in range(3):
        process = Process.drawn(seed, 2, graded)
        process.v = {s: process.value(s) for s in process.p_a}
        config = build(keys | {"branch": branch[preset]}, preset)
        found, true = expected_gradient(process, config, StateGraph(states="observation"))
        for state in true:
            assert found[state] * true[state] > -1e-12, (seed, state, found, true)
