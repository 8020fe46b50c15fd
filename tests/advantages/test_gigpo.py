"""GiGPO against its formulas read path by path, the edges of the definition, and what its expected gradient is."""

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

from verl_bpo.advantages.gigpo import GiGPO
from verl_bpo.config.schema import build, find_estimator
from verl_bpo.options import ConfigError
from verl_bpo.report import slow_gigpo as slow_module
from verl_bpo.report.slow_gigpo import slow_gigpo
from verl_bpo.tree.topology import ROOT, Tree

OPTIONS = st.fixed_dictionaries(
    {
        "omega": st.sampled_from([0.0, 1.0, 0.3]),
        "gamma": st.sampled_from([0.0, 0.95, 1.0]),
        "norm": st.sampled_from(["std", "none"]),
        "states": st.sampled_from(["observation", "digest"]),
    }
)


@settings(max_examples=300, deadline=None)
@given(batches, OPTIONS)
def test_the_formulas_read_path_by_path_give_the_same(batch, options):
    forest = forest_of(*batch)
    assert_same(GiGPO(**options)(forest), forest, slow_gigpo(batch, **options))


def test_the_slow_definition_shares_no_code_with_the_estimator():
    assert not shared_code(slow_module)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_plain_trajectories_by_hand():
    """Three rollouts of a prompt: returns 1, 0, 0. State 7 is the initial one, state 8 is visited by two of them."""
    batch = [
        ("p", grown((ROOT, [(7, 0.0), (8, 1.0)], "terminated"))),
        ("p", grown((ROOT, [(7, 0.0), (8, 0.0), (9, 0.0)], "terminated"))),
        ("p", grown((ROOT, [(7, 0.0)], "truncated"))),
        ("q", grown((ROOT, [(7, 5.0)], "terminated"))),
    ]
    found = GiGPO(norm="none", gamma=0.5)(forest_of(*batch))
    episode = [2 / 3, 2 / 3, -1 / 3, -1 / 3, -1 / 3, -1 / 3]
    step = [0.5 - 0.5 / 3, 0.5, -0.5 / 3, -0.5, 0.0, -0.5 / 3]
    assert found.advantage[:6].tolist() == pytest.approx([e + s for e, s in zip(episode, step)])
    assert found.valid.tolist() == [True] * 6 + [False], "a prompt's only rollout has nothing to be compared with"
    assert found.advantage[6] == 0

    std = GiGPO(gamma=0.5)(forest_of(*batch))
    spread = math.sqrt(1 / 3) + 1e-6
    at_first = math.sqrt((0.5**2 * 2 / 3) / 2) + 1e-6
    at_second = math.sqrt(0.5) + 1e-6
    expected = [e / spread + s for e, s in zip(episode, [
        step[0] / at_first, 0.5 / at_second, step[2] / at_first, -0.5 / at_second, 0.0, step[5] / at_first,
    ])]  # fmt: skip
    assert std.advantage[:6].tolist() == pytest.approx(expected)


def test_a_turn_that_several_paths_share_counts_once():
    """A trunk (return 1) with two forks (0 and 0) after its first turn; one more root sample (0)."""
    tree = grown(
        (ROOT, [(7, 0.0), (8, 1.0)], "terminated"),
        (0, [(8, 0.0)], "terminated"),
        (0, [(8, 0.0)], "terminated"),
        (ROOT, [(7, 0.0)], "terminated"),
    )
    found = GiGPO(norm="none", gamma=1.0)(forest_of(("p", tree)))
    # Four rollouts, mean return 1/4. The first turn leads to returns 1, 0, 0 and stands in its state's group once, with 1/3.
    assert found.advantage.tolist() == pytest.approx(
        [(0.75 - 0.25 - 0.25) / 3 + 1 / 6, 0.75 + 2 / 3, -0.25 - 1 / 3, -0.25 - 1 / 3, -0.25 - 1 / 6]
    )
    assert found.weight.tolist() == [1.0] * 5


def test_one_alone_in_its_state_keeps_its_episodes_advantage():
    batch = [("p", grown((ROOT, [(i, float(i))], "terminated"))) for i in range(3)]
    assert GiGPO(norm="none")(forest_of(*batch)).advantage.tolist() == [-1.0, 0.0, 1.0]


def test_equal_rewards_teach_nothing_and_say_so():
    batch = [("p", grown((ROOT, [(1, 0.1), (2, 0.2)], "truncated"))) for _ in range(5)]
    found = GiGPO()(forest_of(*batch))
    assert found.degenerate and found.valid.all() and not found.advantage.any()


def test_a_lost_trajectory_is_in_no_group_and_its_forks_are():
    tree = grown(
        (ROOT, [(7, 0.0), (8, 9.0)], "failed"),
        (0, [(8, 1.0)], "terminated"),
        (ROOT, [(7, 0.0)], "terminated"),
    )
    found = GiGPO(norm="none", gamma=1.0)(forest_of(("p", tree)))
    # The lost trunk's first turn leads to the fork, so it stands in its state's group, but no row trains it.
    assert found.valid.tolist() == [False, False, True, True]
    assert found.advantage.tolist() == [0.0, 0.0, 0.5, -0.5 - 0.5]


def test_states_are_compared_within_a_prompt_alone():
    batch = [(p, grown((ROOT, [(7, r)], "terminated"))) for p, r in (("a", 1.0), ("b", 0.0), ("a", 0.0), ("b", 5.0))]
    assert GiGPO(norm="none", omega=1.0)(forest_of(*batch)).advantage.tolist() == [1.0, -5.0, -1.0, 5.0]


def test_an_empty_batch_and_one_whose_trees_are_all_lost_have_no_advantage():
    for batch in ([], [("p", Tree(prompt_ids=[]))], [("p", grown((ROOT, [(1, 0.0)], "failed")))]):
        found = GiGPO()(forest_of(*batch))
        assert found.degenerate and not found.valid.any()
        assert all(math.isfinite(x) for x in found.metrics.values())


def test_trees_that_say_nothing_of_states_are_refused():
    tree = grown((ROOT, [(1, 0.0)], "terminated"))
    tree.nodes[0].observed = None
    with pytest.raises(ConfigError, match="states=observation"):
        GiGPO()(forest_of(("p", tree)))
    assert GiGPO(states="digest")(forest_of(("p", tree)))


def test_a_run_names_it_with_its_parameters():
    config = build({"estimator": {"omega": 0.5, "states": "digest"}}, "plain")
    assert find_estimator(config, "gigpo") == GiGPO(omega=0.5, states="digest") and config.asks_for_digests
    assert not build({}, "plain").asks_for_digests
    with pytest.raises(ConfigError, match="bpo.estimator.gamma=1.5 must be at most 1"):
        find_estimator(build({"estimator": {"gamma": 1.5}}, "plain"), "gigpo")


# --- what the expected gradient is ------------------------------------------------------------------------------------

NAMED = {"norm": "none", "gamma": 1.0}
"""Without what biases: neither the deviation nor a discount."""


def tabular(seed: int, rollouts: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected gradient and the true one, over all logits of a process that comes to one state after one turn or two."""
    mdp = TabularMDP(states=4, actions=2, horizon=3, seed=seed)
    outcomes = enumerate_outcomes(mdp, lambda *_: 0, roots=rollouts)
    reward = mdp.reward[outcomes.state, outcomes.action]
    found = GiGPO(**options)(replace(outcomes.forest, reward=reward, observed=outcomes.state))
    return tabular_gradient(mdp, outcomes, found.advantage * found.weight), rollouts * mdp.policy_gradient()


@pytest.mark.parametrize("rollouts", [2, 3])
def test_the_episode_part_without_deviation_is_the_true_gradient_times_n_minus_1_over_n(rollouts):
    found, true = tabular(0, rollouts, omega=0.0, **NAMED)
    torch.testing.assert_close(found, true * (rollouts - 1) / rollouts, rtol=0, atol=1e-12)


def plain(rollouts: int):
    keys = {"branch": {"root_samples": rollouts}, "budget": {"limit": rollouts}}
    return build({**keys, "env": {"max_turns": 3, "max_action_tokens": 1}}, "plain")


@pytest.mark.parametrize("graded", [False, True])
def test_the_step_part_is_right_in_direction_and_lacks_the_share_of_its_own_return(graded):
    """Where a state tells its history: of m that come to it m - 1 count, so that seldom visited states learn less."""
    process = Process.drawn(2, 2, graded)
    both, true = expected_gradient(process, plain(3), GiGPO(**NAMED))
    episode, _ = expected_gradient(process, plain(3), GiGPO(omega=0.0, **NAMED))
    for state, reached in (("", 1.0), ("a", process.p_a[""]), ("b", 1 - process.p_a[""])):
        counted = sum((m - 1) * math.comb(3, m) * reached**m * (1 - reached) ** (3 - m) for m in (2, 3))
        assert both[state] - episode[state] == pytest.approx(counted * true[state], abs=1e-12)


@pytest.mark.parametrize(
    "options, cosines",
    [
        (NAMED, [0.9997, 0.9982, 0.9996, 0.9968]),
        ({"norm": "none"}, [0.9999, 0.9983, 0.9995, 0.9968]),
        ({}, [0.9988, 0.9906, 0.9997, 0.9903]),
    ],
)
def test_where_a_state_is_visited_at_several_depths_it_is_biased_by_a_few_per_cent(options, cosines):
    for seed, cosine in enumerate(cosines):
        found, true = tabular(seed, 3, **options)
        assert float(torch.cosine_similarity(found.flatten(), true.flatten(), 0)) == pytest.approx(cosine, abs=1e-4)
        assert (found * true > -1e-12).all(), "it turns no direction around here"


def test_the_deviation_can_turn_the_gradient_around_at_a_state():
    """In the initial state, three plain rollouts, graded returns; without it that can't happen (above)."""
    process = Process.drawn(1, 2, True)
    found, true = expected_gradient(process, plain(3), GiGPO(gamma=1.0))
    assert found[""] * true[""] < 0
    found, true = expected_gradient(process, plain(3), GiGPO(**NAMED))
    assert found[""] == pytest.approx(4 * true[""])


def test_on_trees_the_initial_state_may_learn_nothing_or_the_wrong_thing():
    """A backbone's first action is compared with its own forks alone; which of them are forked hangs on outcomes."""
    tiny = {"budget": {"limit": 4}, "env": {"max_turns": 3, "max_action_tokens": 1}}
    found, true = expected_gradient(Process.drawn(1, 2, False), build(tiny, "paper"), GiGPO())
    assert abs(found[""]) < 1e-12 < 1e-2 < abs(true[""])
    guided = build(tiny | {"branch": {"root_samples": 2, "top_k": 1, "entropy_tokens": "first"}}, "guided")
    found, true = expected_gradient(Process.drawn(2, 2, False), guided, GiGPO(**NAMED))
    assert found[""] * true[""] < 0
