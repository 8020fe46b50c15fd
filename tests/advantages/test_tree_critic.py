"""The claims about the tree critic, by exact enumeration in float64, and the edges of the definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest
import torch
from enumeration import Process, expected_gradient
from tabular import Outcomes, TabularMDP, enumerate_outcomes
from test_bpo import forest, random_forest

from verl_bpo.advantages.bpo import sibling_advantages
from verl_bpo.advantages.estimator import Estimate, Values
from verl_bpo.advantages.tree_critic import TreeCritic
from verl_bpo.config.schema import build, find_estimator
from verl_bpo.options import ConfigError
from verl_bpo.tree.draws import drawn
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.topology import Node, Tree

BRANCHING = {
    "none": lambda depth, level, trunk: 0,
    "one branch point": lambda depth, level, trunk: int(depth == 1 and level == 0),
    "nested": lambda depth, level, trunk: 1,
    "by the state": lambda depth, level, trunk: int(trunk.state in (1, 3)),
}


def judged(f: Forest, v: torch.Tensor, **options) -> Estimate:
    v = v.masked_fill(~f.usable[f.trajectory], torch.nan)
    return TreeCritic(**options)(f, Values(v, v, v, v, v))


def enumerated(branching, seed=0, roots=2, fair=True) -> tuple[TabularMDP, Outcomes]:
    mdp = TabularMDP(states=4, actions=2, horizon=3, seed=seed)
    outcomes = enumerate_outcomes(mdp, branching, roots=roots, fair=fair)
    reward = mdp.reward[outcomes.state, outcomes.action]
    return mdp, replace(outcomes, forest=replace(outcomes.forest, reward=reward))


def some_v(outcomes: Outcomes, seed=5) -> torch.Tensor:
    """[N]: a number for every state and depth, far from the true values."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)[
        outcomes.state, outcomes.depth
    ]


def less_q(mdp: TabularMDP, outcomes: Outcomes, a: torch.Tensor) -> list[list[float]]:
    """E[A | s, a] - Q(s, a) of the actions in every state and depth."""
    found = []
    for s, d in {*zip(outcomes.state.tolist(), outcomes.depth.tolist())}:
        at = (outcomes.state == s) & (outcomes.depth == d)
        found.append(
            [
                outcomes.mean_given(a, at & (outcomes.action == action)) - float(mdp.action_value(s, action, d))
                for action in range(mdp.actions)
            ]
        )
    return found


# --- what is exact ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("children", ["all", "fair"])
@pytest.mark.parametrize("w", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("branching", BRANCHING)
def test_advantage_expects_q_less_something_that_no_action_changes_whatever_v_says(branching, w, children):
    mdp, outcomes = enumerated(BRANCHING[branching])
    v = some_v(outcomes)
    estimate = judged(outcomes.forest, v, weight_of_v=w, gate="none", children=children)
    assert estimate.valid.all()
    for first, second in less_q(mdp, outcomes, estimate.advantage):
        assert first == pytest.approx(second, abs=1e-12)


def test_with_all_weight_on_v_the_advantage_expects_q_less_v():
    mdp, outcomes = enumerated(BRANCHING["nested"])
    v = some_v(outcomes)
    a = judged(outcomes.forest, v, weight_of_v=1.0, gate="none").advantage
    for gaps in less_q(mdp, outcomes, a + v):
        assert gaps == pytest.approx([0, 0], abs=1e-12)


def branch_on_what_followed(depth, level, trunk):
    return int(level == 0 and trunk.trajectory_return() > 0)


@pytest.mark.parametrize("w", [0.0, 0.3, 1.0])
def test_with_fair_children_alone_it_is_exact_whatever_chose_the_branch_points(w):
    mdp, outcomes = enumerated(branch_on_what_followed, fair=False)
    v = some_v(outcomes)
    found = {}
    for children in ("fair", "all"):
        a = judged(outcomes.forest, v, weight_of_v=w, gate="none", children=children).advantage
        found[children] = max(abs(first - second) for first, second in less_q(mdp, outcomes, a))
    assert found["fair"] < 1e-12 < 1e-2 < found["all"]


def companion(seed: int, tasks: int = 3) -> Forest:
    """Other prompts of the batch: ``tasks`` of three plain trajectories of two turns, won or not."""
    g = torch.Generator().manual_seed(seed)
    turns = torch.arange(6 * tasks)
    won = torch.rand(3 * tasks, generator=g) < 0.5
    reward = torch.zeros(6 * tasks, dtype=torch.float64)
    reward[1::2] = won.double()
    return replace(
        forest(
            torch.where(turns % 2 == 0, -1, turns - 1).tolist(),
            (turns // 2).tolist(),
            won.double().tolist(),
            (turns // 6 + 100).tolist(),
        ),
        reward=reward,
        won=won,
    )


def joined(a: Forest, b: Forest) -> Forest:
    both = {name: (x, getattr(b, name)) for name, x in vars(a).items()}
    columns = {name: torch.cat(xs) for name, xs in both.items() if all(isinstance(x, torch.Tensor) for x in xs)}
    n, size = len(a.parent), len(a.leaf_return)
    columns["parent"][n:] += n * (b.parent >= 0)
    columns["trajectory"][n:] += size
    return Forest(**columns)


def one_outcome(f: Forest, o: int) -> tuple[Forest, torch.Tensor]:
    """The turns of prompt ``o`` as a forest, and which they are."""
    at = (f.prompt == o).nonzero().squeeze(1)
    own = f.trajectory[at].unique()
    turns = {
        "parent": torch.where(f.parent[at] < 0, -1, f.parent[at] - at[0]),
        "trajectory": torch.searchsorted(own, f.trajectory[at]),
        **{name: getattr(f, name)[at] for name in ("prompt", "fair", "reward", "score", "state_value")},
    }
    leaves = {name: getattr(f, name)[own] for name in ("leaf_return", "usable", "truncated", "won", "depth")}
    return Forest(**turns, **leaves), at


@pytest.mark.parametrize("branching", ["none", "one branch point"])
def test_the_measured_weight_biases_nothing(branching):
    """It is measured on the batch's other prompts, here fixed ones: for each of them the expectation is exact."""
    mdp, outcomes = enumerated(BRANCHING[branching])
    v, others = some_v(outcomes), companion(1)
    a, weights = torch.zeros_like(v), []
    for o in range(len(outcomes.probability)):
        own, at = one_outcome(outcomes.forest, o)
        estimate = judged(joined(own, others), torch.cat([v[at], 0.3 + 0.1 * others.reward]), gate="none")
        a[at] = estimate.advantage[: len(at)]
        weights.append(estimate.metrics["tree_critic/weight_of_v"])
    assert 0.01 < mean(weights) < 0.99
    for first, second in less_q(mdp, outcomes, a):
        assert first == pytest.approx(second, abs=1e-12)


# --- branch points ranked by V(1-V) over what was visited, through the real rollout -----------------------------------


def with_v(seed: int, graded: bool, horizon: int = 3) -> Process:
    """V off by up to 0.2."""
    process = Process.drawn(seed, horizon, graded)
    for state in process.p_a:
        process.v[state] = min(max(process.value(state) + 0.4 * (drawn(seed + 99, state) / 2**32 - 0.5), 0.01), 0.99)
    return process


def ranked(**branch) -> object:
    keys = {"branch": {"root_samples": 1, "top_k": 1, **branch}, "budget": {"limit": 2, "fill": "none"}}
    return build({**keys, "env": {"max_turns": 3, "max_action_tokens": 1}}, "critic", values=True)


def shares(process: Process, **options) -> dict[str, float]:
    """Expected over true gradient in every state."""
    expected, true = expected_gradient(process, ranked(), lambda f: judged(f, f.state_value, gate="none", **options))
    return {s: expected[s] / true[s] for s in true if abs(true[s]) > 1e-9}


@pytest.mark.parametrize("graded", [False, True])
def test_ranking_leaves_the_gradients_direction_at_every_state_as_it_is(graded):
    for seed in (1, 2, 3):
        found = shares(with_v(seed, graded))
        assert found and min(found.values()) > 0


def test_what_ranking_leaves_is_a_bias_above_the_branch_point_and_none_with_fair_children():
    """In the initial state, which is visited once. Below it, states are visited more often: the ratio counts how often."""
    exact = [shares(with_v(seed, True), children="fair")[""] for seed in range(4)]
    biased = [shares(with_v(seed, True))[""] for seed in range(4)]
    assert exact == pytest.approx([1.0] * 4, abs=1e-12)
    assert biased == pytest.approx([0.929017, 0.550227, 1.0, 0.652589], abs=1e-6)


# --- the gate -----------------------------------------------------------------------------------------------------------


def lonely_failures(returns=((0, 0, 0), (0, 1, 0))) -> Forest:
    """Plain one-turn trajectories, a prompt for every tuple."""
    flat = [float(r) for group in returns for r in group]
    n = len(flat)
    prompt = [i for i, group in enumerate(returns) for _ in group]
    f = forest([-1] * n, list(range(n)), flat, prompt)
    return replace(f, reward=torch.tensor(flat, dtype=torch.float64), won=torch.tensor(flat) > 0)


def test_a_prompt_without_a_win_trains_as_far_as_v_expected_one_and_is_right_elsewhere():
    # Thirty prompts half of which always win; the last one doesn't.
    returns = [(1, 1, 1), (0, 0, 0)] * 15
    f = lonely_failures(returns)
    right = f.leaf_return * 0.8 + 0.1
    last = f.prompt == len(returns) - 1
    expected = {0.1: 0.0, 0.5: 1 - (1 - 0.4) ** 3, 0.9: 1 - (1 - 0.8) ** 3}  # V is off by 0.1 everywhere
    for v, weight in expected.items():
        estimate = judged(f, right.masked_fill(last, v))
        assert estimate.weight[last].tolist() == pytest.approx([weight] * 3)
        assert (estimate.weight[f.leaf_return[f.trajectory] > 0] == 1).all()
        assert torch.equal(estimate.valid, estimate.weight > 0)
    assert not judged(f, 1 - right).weight[last].any()


def test_the_prompt_gate_leaves_out_prompts_without_a_win_and_the_dead_zone_small_advantages():
    f = lonely_failures(((0, 0, 0), (0, 1, 0), (0, 0, 1)))
    v = torch.tensor([0.4, 0.4, 0.4, 0.5, 0.5, 0.5, 0.1, 0.1, 0.1], dtype=torch.float64)
    assert judged(f, v, gate="prompt").valid.tolist() == [False] * 3 + [True] * 6
    zone = judged(f, v, weight_of_v=1.0, gate="dead_zone")
    product = []
    for start in (0, 3, 6):
        r, own = f.leaf_return[start : start + 3], v[start]
        loo = (r.sum() - r) / 2
        product.append(((r - own) * (loo - own)).sum())
    for i in range(3):
        z = max(float(sum(product) - product[i]) / 6, 1e-18) ** 0.5
        for turn in range(3 * i, 3 * i + 3):
            assert bool(zone.valid[turn]) == (abs(float(f.leaf_return[turn] - v[turn])) > z)


@pytest.mark.parametrize("gate", ["prompt", "trust", "dead_zone"])
def test_no_gate_turns_the_gradient_around_where_returns_are_0_or_1(gate):
    """Given the other prompts, a gate makes of E[A | s, a] a function that still grows with Q(s, a)."""
    others = companion(3)

    def judge(f: Forest) -> Estimate:
        v = torch.cat([f.state_value, 0.5 + 0.2 * (others.reward - 0.5)])
        return judged(joined(f, others), v, gate=gate)

    trained = 0
    for seed in (1, 2, 3, 4):
        process = with_v(seed, False, horizon=2)
        expected, true = expected_gradient(process, ranked(root_samples=2, top_k=1), judge)
        for state in true:
            assert expected[state] * true[state] >= -1e-12
            trained += abs(expected[state]) > 1e-9 and abs(true[state]) > 1e-9
    assert trained > 3


# --- what w is good for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows", ["all", "nothing", "the opposite"])
def test_the_baseline_is_as_near_the_true_value_as_the_better_of_v_and_siblings(knows):
    g = torch.Generator().manual_seed(0)
    p = torch.rand(64, generator=g, dtype=torch.float64).repeat_interleave(6)
    f = lonely_failures((torch.rand(len(p), generator=g, dtype=torch.float64) < p).long().view(64, 6).tolist())
    v = {"all": p, "nothing": torch.full_like(p, 0.5), "the opposite": 1 - p}[knows]

    def error(w):
        return float(((f.leaf_return - judged(f, v, weight_of_v=w, gate="none").advantage - p) ** 2).mean())

    assert error(None) < 1.02 * min(error(0.0), error(1.0)) + 1e-12


# --- edges ----------------------------------------------------------------------------------------------------------------


def test_equal_returns_give_exactly_nothing_whatever_v_says():
    f = lonely_failures([(1, 1, 1)] * 3)
    v = torch.linspace(0, 1, 9, dtype=torch.float64)
    estimate = judged(f, v)
    assert estimate.degenerate and not estimate.advantage.any()


def test_one_trajectory_is_compared_with_v():
    f = replace(forest([-1, 0], [0, 0], [1.0]), reward=torch.tensor([0.0, 1.0], dtype=torch.float64))
    estimate = judged(f, torch.tensor([0.25, 0.5], dtype=torch.float64), gate="none")
    assert estimate.advantage.tolist() == [0.75, 0.5] and estimate.valid.all()


def test_an_empty_batch_is_no_fault():
    estimate = judged(replace(forest([], [], []), reward=torch.zeros(0, dtype=torch.float64)), torch.zeros(0).double())
    assert estimate.degenerate and estimate.advantage.numel() == 0


def random_turns(seed: int) -> tuple[Forest, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    f = random_forest(seed)
    reward = torch.rand(len(f.parent), generator=g, dtype=torch.float64)
    return replace(f, reward=reward, won=f.leaf_return > 0.5), torch.rand(len(f.parent), generator=g).double()


def slow(f: Forest, v: list[float], weight_of_v, children, gate, normalise):
    """One turn at a time. Returns (advantage, weight)."""
    parent, trajectory, prompt = f.parent.tolist(), f.trajectory.tolist(), f.prompt.tolist()
    returns, usable, won, reward = f.leaf_return.tolist(), f.usable.tolist(), f.won.tolist(), f.reward.tolist()
    turns = range(len(parent))
    live = [i for i in turns if usable[trajectory[i]]]
    segments = sibling_advantages(f, leaf_return="tree_mean").comparison  # its own slow version is in test_bpo.py

    def mean_return(i, fair):
        below = [j for j in live if parent[j] == i]
        own = [j for j in below if trajectory[j] == trajectory[i]]
        if not own:
            return returns[trajectory[i]]
        return mean(mean_return(j, fair) for j in (below if all(fair[j] for j in below) else own))

    def earned(i):
        return 0.0 if parent[i] < 0 else earned(parent[i]) + reward[parent[i]]

    def root(i):
        return i if parent[i] < 0 else root(parent[i])

    g = {i: mean_return(i, [True] * len(parent) if children == "all" else f.fair.tolist()) - earned(i) for i in live}
    others, here = {}, {}
    for i in live:
        baseline = float(segments.baseline[i])
        here[i] = baseline == baseline and int(segments.head[i]) == i
        roots = [j for j in live if parent[j] < 0 and prompt[j] == prompt[i] and j != root(i)]
        if baseline != baseline and roots:
            baseline = mean(mean_return(j, f.fair.tolist()) for j in roots)
        if baseline == baseline:
            others[i] = baseline - earned(i)

    def elsewhere(i, kind):
        return [j for j in others if prompt[j] != prompt[i] and here[j] == kind]

    def product(j):
        return (g[j] - v[j]) * (others[j] - v[j])

    def weight_of(i):
        if i not in others:
            return 1.0
        if weight_of_v is not None:
            return weight_of_v
        square = sum((others[j] - v[j]) ** 2 for j in elsewhere(i, here[i]))
        return min(max(1 - sum(map(product, elsewhere(i, here[i]))) / square, 0.0), 1.0) if square else 0.0

    def squared_error(i):
        if measured := elsewhere(i, True):
            return max(mean(map(product, measured)), 0.0)
        rest = [j for j in live if prompt[j] != prompt[i]]
        return mean((g[j] - v[j]) ** 2 for j in rest) if rest else float("inf")

    a, weight = [0.0] * len(parent), [0.0] * len(parent)
    for i in live:
        w = weight_of(i)
        a[i] = g[i] - w * v[i] - (1 - w) * others.get(i, 0.0)
        zone = w * squared_error(i) if w else 0.0
        hopeless = not any(won[trajectory[j]] for j in live if prompt[j] == prompt[i])
        if gate == "dead_zone":
            weight[i] = float(abs(a[i]) > max(zone**0.5, 1e-9))
        elif gate == "none" or not hopeless:
            weight[i] = 1.0
        elif gate == "trust":
            roots = [j for j in live if parent[j] < 0 and prompt[j] == prompt[i]]
            least = [min(max(v[j] - squared_error(j) ** 0.5, 0.0), 1.0) for j in roots]
            weight[i] = 1 - (1 - mean(least)) ** len(roots) if roots else 0.0
        a[i] = a[i] if weight[i] else 0.0
    size = sum(w * x * x for w, x in zip(weight, a)) / max(sum(weight), 1)
    return [x / size**0.5 if normalise and size else x for x in a], weight


@pytest.mark.parametrize("gate", ["none", "prompt", "dead_zone", "trust"])
@pytest.mark.parametrize("children", ["all", "fair"])
@pytest.mark.parametrize("w", [None, 0.4])
def test_random_forests_with_lost_branches_give_what_the_slow_version_gives(w, children, gate):
    for seed in range(40):
        f, v = random_turns(seed)
        options = {"weight_of_v": w, "children": children, "gate": gate, "normalise": bool(seed % 2)}
        estimate = judged(f, v, **options)
        a, weight = slow(f, v.tolist(), **options)
        close = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(estimate.weight, torch.tensor(weight, dtype=torch.float64), **close)
        torch.testing.assert_close(estimate.advantage, torch.tensor(a, dtype=torch.float64), **close)
        assert torch.equal(estimate.valid, estimate.weight > 0)
        assert all(x == x for x in estimate.metrics.values())


# --- how a run names it ---------------------------------------------------------------------------------------------------


def test_the_preset_forks_once_at_open_states_and_only_estimators_that_compare_siblings_refuse_it():
    config = build({"estimator": {"gate": "prompt"}}, "critic", values=True)
    branch = config.branch
    assert (branch.forks, branch.selector.score, branch.selector.trunk) == (1, "value", "any")
    assert find_estimator(config, "tree_critic") == TreeCritic(gate="prompt")
    assert find_estimator(config, "sapo") is not None
    with pytest.raises(ConfigError, match="without a sibling to compare with"):
        find_estimator(config, "bpo")
    with pytest.raises(ConfigError, match="unknown key bpo.estimator.gat; known here: children, gate"):
        find_estimator(build({"estimator": {"gat": "prompt"}}, "critic"), "tree_critic")


def test_turns_are_judged_by_what_was_still_to_come():
    """Rewards that were earned before a turn are no part of its return."""
    tree = Tree(prompt_ids=[1])
    trajectory, parent = tree.add_trajectory(), -1
    for reward in (1.0, 0.5, 0.25):
        parent = tree.add_node(Node(parent, trajectory, [5], [-1.0], [0.5], reward=reward))
    tree.trajectories[trajectory].end = "terminated"
    estimate = judged(Forest.of({"p_0": tree}, {"p_0": "p"}), torch.zeros(3, dtype=torch.float64), gate="none")
    assert estimate.advantage.tolist() == [1.75, 0.75, 0.25]
    assert all(x > y for x, y in pairwise(estimate.advantage.tolist()))
