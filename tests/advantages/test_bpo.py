"""The claims about sibling advantages, by exact enumeration in float64, and the edges of the definition."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from statistics import mean, stdev

import pytest
import torch
from tabular import Outcomes, TabularMDP, bare_forest, enumerate_outcomes, expected_gradient

from verl_bpo.advantages.bpo import sibling_advantages
from verl_bpo.tree.forest import Forest

EXACT = {"rtol": 0, "atol": 1e-12}


def forest(parent, trajectory, leaf_return, prompt=None, usable=None, fair=None, dtype=torch.float64) -> Forest:
    n, size = len(parent), len(leaf_return)
    return bare_forest(
        parent=torch.tensor(parent, dtype=torch.int64),
        trajectory=torch.tensor(trajectory, dtype=torch.int64),
        prompt=torch.tensor(prompt or [0] * n, dtype=torch.int64),
        leaf_return=torch.tensor(leaf_return, dtype=dtype),
        usable=torch.tensor([True] * size if usable is None else usable, dtype=torch.bool),
        fair=torch.tensor([True] * n if fair is None else fair, dtype=torch.bool),
    )


# A trunk of three turns (0, 1, 2) with two forks after turn 0 (3 and 4, 5).
#   0 - 1 - 2      trajectory 0
#     \ 3          trajectory 1
#     \ 4 - 5      trajectory 2
def trunk_and_two_forks(**kwargs) -> Forest:
    return forest([-1, 0, 1, 0, 0, 4], [0, 0, 0, 1, 2, 2], **{"leaf_return": [1.0, 0.0, 0.5], **kwargs})


@pytest.fixture(scope="module")
def mdp() -> TabularMDP:
    return TabularMDP(states=4, actions=2, horizon=3, seed=0)


def exact_advantages(mdp: TabularMDP, outcomes: Outcomes, where: torch.Tensor, x: torch.Tensor) -> list[tuple]:
    """(E[x | s, a, where], Q(s, a) - V(s)) for every history, state and action that occurs at the turns ``where``."""
    pairs = []
    for s, a, d in {*zip(*(t[where].tolist() for t in (outcomes.state, outcomes.action, outcomes.depth)), strict=True)}:
        at = where & (outcomes.state == s) & (outcomes.action == a) & (outcomes.depth == d)
        pairs.append((outcomes.mean_given(x, at), float(mdp.action_value(s, a, d) - mdp.value(s, d))))
    return pairs


# --- 1. unbiased for the advantage function -----------------------------------------------------------------------


@pytest.mark.parametrize("leaf_return", ["leaf", "tree_mean"])
@pytest.mark.parametrize("baseline, factor", [("loo", 1), ("mean", 2 / 3)])
def test_sibling_advantage_is_q_minus_v_for_loo_and_shrunk_by_n_minus_1_over_n_for_mean(
    mdp, baseline, factor, leaf_return
):
    # K = 2 forks after turn 0 (n = 3 siblings) and one fork below each trunk there.
    outcomes = enumerate_outcomes(mdp, lambda depth, level, trunk: {1: 2, 2: 1}[depth] if level == 0 else 0)
    result = sibling_advantages(outcomes.forest, baseline=baseline, leaf_return=leaf_return)
    pairs = exact_advantages(mdp, outcomes, outcomes.forked & (outcomes.depth == 1), result.advantage)
    assert len(pairs) == 4
    for estimate, exact in pairs:
        assert abs(exact) > 1e-3
        assert estimate == pytest.approx(factor * exact, abs=1e-12)


def test_root_samples_of_one_prompt_are_siblings_across_trees(mdp):
    outcomes = enumerate_outcomes(mdp, lambda *_: 0, roots=3)
    result = sibling_advantages(outcomes.forest)
    assert result.valid.all()
    for estimate, exact in exact_advantages(mdp, outcomes, outcomes.depth == 0, result.advantage):
        assert estimate == pytest.approx(exact, abs=1e-12)


# --- 2. variance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
def test_sibling_baseline_removes_the_variance_that_the_prefix_explains(mdp, n):
    def variance(outcomes, depth):
        a, at = sibling_advantages(outcomes.forest).advantage, outcomes.depth == depth
        return outcomes.mean_given(a**2, at) - outcomes.mean_given(a, at) ** 2

    trajectories = enumerate_outcomes(mdp, lambda *_: 0, roots=n)
    siblings = enumerate_outcomes(mdp, lambda depth, level, trunk: n - 1 if depth == 1 and level == 0 else 0)

    explained = mdp.pi[0] @ torch.stack([mdp.action_value(0, a, 0) ** 2 for a in range(2)]) - mdp.value(0, 0) ** 2
    assert explained > 0.05
    reduction = variance(trajectories, 0) - variance(siblings, 1)
    assert reduction == pytest.approx(n / (n - 1) * float(explained), abs=1e-12)


# --- 3. policy gradient -------------------------------------------------------------------------------------------

BRANCHING = {
    "one branch point": lambda depth, level, trunk: int(depth == 1 and level == 0),
    "two branch points on the trunk": lambda depth, level, trunk: int(level == 0),
    "nested": lambda depth, level, trunk: 1,
    "by the state": lambda depth, level, trunk: int(trunk.state in (1, 3)),
}


@pytest.mark.parametrize("baseline", ["loo", "shrunk"])
@pytest.mark.parametrize("leaf_return", ["leaf", "tree_mean"])
@pytest.mark.parametrize("branching", BRANCHING)
def test_path_probability_gives_the_policy_gradient(mdp, branching, leaf_return, baseline):
    outcomes = enumerate_outcomes(mdp, BRANCHING[branching], roots=2)
    result = sibling_advantages(
        outcomes.forest, baseline=baseline, leaf_return=leaf_return, weighting="path_probability"
    )
    assert result.valid.all()
    gradient = expected_gradient(mdp, outcomes, result.weight * result.advantage)
    torch.testing.assert_close(gradient, mdp.policy_gradient(), **EXACT)


@pytest.mark.parametrize("leaf_return", ["leaf", "tree_mean"])
@pytest.mark.parametrize("branching, cosine", [("one branch point", 0.991284), ("nested", 0.982001)])
def test_uniform_weighting_counts_each_depth_by_its_number_of_turns(mdp, branching, cosine, leaf_return):
    outcomes = enumerate_outcomes(mdp, BRANCHING[branching], roots=2)
    gradient = {}
    for weighting in ("uniform", "path_probability"):
        result = sibling_advantages(outcomes.forest, leaf_return=leaf_return, weighting=weighting)
        gradient[weighting] = [
            expected_gradient(mdp, outcomes, result.weight * result.advantage * (outcomes.depth == d)) for d in range(3)
        ]
    turns = {"one branch point": (2, 4, 4), "nested": (2, 4, 8)}[branching]
    for d in range(3):
        torch.testing.assert_close(gradient["uniform"][d], turns[d] * gradient["path_probability"][d], **EXACT)
    exact = mdp.policy_gradient().flatten()
    assert torch.cosine_similarity(sum(gradient["uniform"]).flatten(), exact, 0) == pytest.approx(cosine, abs=1e-6)


def test_tree_mean_has_less_variance_than_leaf_and_the_same_mean(mdp):
    outcomes = enumerate_outcomes(mdp, BRANCHING["nested"], roots=2)
    at = outcomes.depth == 0
    a = {x: sibling_advantages(outcomes.forest, leaf_return=x).advantage for x in ("leaf", "tree_mean")}
    assert outcomes.mean_given(a["tree_mean"], at) == pytest.approx(outcomes.mean_given(a["leaf"], at), abs=1e-12)
    # Exact second moments; the means are 0.
    assert outcomes.mean_given(a["tree_mean"] ** 2, at) < 0.9 * outcomes.mean_given(a["leaf"] ** 2, at)


# --- 4. trunks that are no fair draws -----------------------------------------------------------------------------


def branch_on_action_1(depth, level, trunk):
    return 2 if depth == 1 and level == 0 and trunk.action == 1 else 0


def is_trunk(outcomes: Outcomes) -> torch.Tensor:
    return outcomes.forked & outcomes.forest.trunk


@pytest.mark.parametrize("option", ["auto", "never"])
def test_trunk_outside_the_baselines_keeps_them_unbiased_under_path_dependent_branching(mdp, option):
    outcomes = enumerate_outcomes(mdp, branch_on_action_1, fair=False)
    result = sibling_advantages(outcomes.forest, trunk_in_siblings=option)
    for where in (is_trunk(outcomes), outcomes.forked & ~outcomes.forest.trunk):
        pairs = exact_advantages(mdp, outcomes, where, result.advantage)
        assert pairs
        for estimate, exact in pairs:
            assert estimate == pytest.approx(exact, abs=1e-12)


def test_trunk_in_the_baselines_is_biased_under_path_dependent_branching(mdp):
    outcomes = enumerate_outcomes(mdp, branch_on_action_1, fair=False)
    a = sibling_advantages(outcomes.forest, trunk_in_siblings="always").advantage
    forks = outcomes.forked & ~outcomes.forest.trunk
    for s in outcomes.state[forks].unique().tolist():
        # The trunk, one of n - 1 = 2 others in a fork's baseline, always took action 1.
        bias = -float(mdp.action_value(s, 1, 1) - mdp.value(s, 1)) / 2
        assert abs(bias) > 1e-2
        for action in range(2):
            at = forks & (outcomes.state == s) & (outcomes.action == action)
            exact = float(mdp.action_value(s, action, 1) - mdp.value(s, 1))
            assert outcomes.mean_given(a, at) - exact == pytest.approx(bias, abs=1e-12)


def branch_on_success(depth, level, trunk):
    return 2 if depth == 1 and level == 0 and trunk.trajectory_return() > 0 else 0


def branch_twice_on_what_followed(depth, level, trunk):
    return 2 if depth + level <= 2 and trunk.trajectory_return() > 0 else 0


def cosines(mdp: TabularMDP, outcomes: Outcomes, result) -> list[float]:
    """Of the expected and the true gradient at each state and depth, by the logits of the actions there."""
    found = []
    for s, d in {*zip(outcomes.state.tolist(), outcomes.depth.tolist(), strict=True)}:
        at = (outcomes.state == s) & (outcomes.depth == d)
        taken = torch.nn.functional.one_hot(outcomes.action, mdp.actions).double() - mdp.pi[s]
        expected = outcomes.mean((result.weight * result.advantage * at)[:, None] * taken)
        q = torch.stack([mdp.action_value(s, a, d) for a in range(mdp.actions)])
        found.append(float(torch.cosine_similarity(expected, mdp.pi[s] * (q - mdp.value(s, d)), dim=0)))
    return found


@pytest.mark.parametrize("actions, horizon", [(2, 3), (3, 2)])
@pytest.mark.parametrize("rule", [branch_on_action_1, branch_on_success, branch_twice_on_what_followed])
@pytest.mark.parametrize("leaf_return", ["leaf", "tree_mean"])
def test_whatever_chose_a_branch_point_the_gradient_at_every_state_has_the_right_direction(
    actions, horizon, rule, leaf_return
):
    """The rewards are graded. A trunk keeps the baseline of the root samples, whatever it was forked for."""
    mdp = TabularMDP(states=3, actions=actions, horizon=horizon, seed=3)
    outcomes = enumerate_outcomes(mdp, rule, roots=2, fair=False)
    assert outcomes.forked.any()
    result = sibling_advantages(outcomes.forest, leaf_return=leaf_return)
    assert min(cosines(mdp, outcomes, result)) == pytest.approx(1, abs=1e-9)


def test_compared_with_its_forks_a_trunk_that_was_chosen_by_its_outcome_turns_the_gradient_around():
    mdp = TabularMDP(states=3, actions=2, horizon=2, seed=36)
    outcomes = enumerate_outcomes(mdp, branch_on_success, roots=2, fair=False)
    with_forks, apart = (
        cosines(mdp, outcomes, sibling_advantages(outcomes.forest, trunk_in_siblings=x)) for x in ("always", "auto")
    )
    assert min(with_forks) == pytest.approx(-1) and min(apart) == pytest.approx(1)


@pytest.mark.parametrize("option, unbiased", [("auto", True), ("always", False)])
def test_tree_mean_above_a_path_dependent_branch_point_is_unbiased_only_along_the_trunk(mdp, option, unbiased):
    outcomes = enumerate_outcomes(mdp, branch_on_action_1, roots=2, fair=False)
    result = sibling_advantages(outcomes.forest, leaf_return="tree_mean", trunk_in_siblings=option)
    gaps = [abs(x - y) for x, y in exact_advantages(mdp, outcomes, outcomes.depth == 0, result.advantage)]
    assert (max(gaps) < 1e-12) if unbiased else (max(gaps) > 1e-2)


def test_trunk_chosen_by_what_followed_is_biased_itself_but_not_its_forks(mdp):
    # As a trunk forked because it succeeded.
    outcomes = enumerate_outcomes(
        mdp,
        lambda depth, level, trunk: 2 if depth == 1 and level == 0 and trunk.trajectory_return() > 0 else 0,
        fair=False,
    )
    a = sibling_advantages(outcomes.forest).advantage
    forks = exact_advantages(mdp, outcomes, outcomes.forked & ~outcomes.forest.trunk, a)
    assert max(abs(x - y) for x, y in forks) < 1e-12
    assert max(abs(x - y) for x, y in exact_advantages(mdp, outcomes, is_trunk(outcomes), a)) > 1e-2


def test_path_dependent_branching_biases_the_policy_gradient_even_with_auto(mdp):
    # How many turns a state gets depends on the trunk's action there.
    outcomes = enumerate_outcomes(mdp, branch_on_action_1, roots=2, fair=False)
    result = sibling_advantages(outcomes.forest, weighting="path_probability")
    gradient = expected_gradient(mdp, outcomes, result.weight * result.advantage)
    exact = mdp.policy_gradient()
    assert (gradient - exact).abs().max() / exact.abs().max() == pytest.approx(0.141119, abs=1e-6)


# --- the definition, against a slow recursive reading of it -------------------------------------------------------


def random_forest(seed: int) -> Forest:
    rng = random.Random(seed)
    parent, trajectory, prompt, last, tree_of = [], [], [], [], []
    for tree in range(rng.randint(1, 4)):
        task, first, started = rng.randint(0, 1), len(parent), len(last)
        for _ in range(rng.randint(1, 14)):
            own = list(range(started, len(last)))
            kind = rng.random()
            if not own or kind < 0.15:
                at, t = -1, len(last)
            elif kind < 0.5:
                at, t = rng.randrange(first, len(parent)), len(last)
            else:
                t = rng.choice(own)
                at = last[t]
            parent.append(at)
            trajectory.append(t)
            prompt.append(7 - 4 * task)
            if t == len(last):
                last.append(-1)
                tree_of.append(tree)
            last[t] = len(parent) - 1
    return forest(
        parent,
        trajectory,
        [rng.choice([0.0, 0.1, 1.0]) for _ in last],
        prompt,
        [rng.random() < 0.75 for _ in last],
        [rng.random() < 0.7 for _ in parent],
    )


def slow(f: Forest, baseline, normalize, leaf_return, weighting, trunk_in_siblings, center, explained):
    """Recursive, one turn at a time. Returns (advantage, weight, valid). ``explained`` is rho of ``shrunk``."""
    parent, trajectory, prompt = f.parent.tolist(), f.trajectory.tolist(), f.prompt.tolist()
    returns, usable, fair = f.leaf_return.tolist(), f.usable.tolist(), f.fair.tolist()
    turns = range(len(parent))

    def lives(i):
        return usable[trajectory[i]]

    def trunk(i):
        return parent[i] >= 0 and trajectory[parent[i]] == trajectory[i]

    def siblings(i):
        if baseline == "trajectory":  # of the trajectory's first turn: first turns of all trajectories of the prompt
            return [j for j in turns if not trunk(j) and prompt[j] == prompt[i] and lives(j)]
        same = [j for j in turns if parent[j] == parent[i] and (parent[i] >= 0 or prompt[j] == prompt[i])]
        return [j for j in same if lives(j)]

    def counts(i):
        if baseline == "trajectory":
            return not (trunk_in_siblings == "never" and trunk(i))
        if trunk_in_siblings == "always":
            return True
        return fair[i] and not (trunk_in_siblings == "never" and trunk(i))

    def estimate(i):
        children = [j for j in turns if parent[j] == i and lives(j)]
        own = [j for j in children if trunk(j)]
        if leaf_return == "leaf" or baseline == "trajectory" or not own:
            return returns[trajectory[i]]
        if trunk_in_siblings != "always" and not all(fair[j] for j in children):
            return estimate(own[0])
        return mean(estimate(j) for j in children)

    def keeps(i):
        """A trunk that isn't fair and has a baseline from an earlier turn of its trajectory."""
        if baseline == "trajectory" or not (trunk(i) and lives(i)) or counts(i) or fair[i]:
            return False
        above = i
        while trunk(above):
            above = parent[above]
            if lives(above) and any(counts(j) for j in siblings(above) if j != above):
                return True
        return False

    def peers(i):
        return [j for j in siblings(i) if not keeps(j)]

    def head(i):
        return head(parent[i]) if trunk(i) and (len(siblings(i)) < 2 or keeps(i)) else i

    def shrunk(i):
        """Baseline of a segment's first turn and its variance; of what it hangs from, if nothing defines its own."""
        above = shrunk(head(parent[i])) if parent[i] >= 0 else None
        group = siblings(i)
        compared = lives(i) and len(peers(i)) > 1
        others = [estimate(j) for j in group if counts(j) and j != i] if compared else []
        if not others:
            return above
        m, s = mean(others), (1 - explained) / len(others)
        if above is None:
            return m, s
        p = explained + above[1]
        return (s * above[0] + p * m) / (p + s), p * s / (p + s)

    def advantage(i):
        if not lives(i):
            return None
        if baseline == "trajectory" and trunk(i):
            return advantage(parent[i])
        group = siblings(i)
        if len(group) < 2 or keeps(i):
            return advantage(parent[i]) if trunk(i) else None
        if len(peers(i)) < 2 or not any(counts(j) for j in group if j != i):
            return None
        values = [estimate(j) for j in peers(i)]
        if baseline == "shrunk":
            std = stdev(values) if normalize == "sibling_std" else 0
            return (estimate(i) - shrunk(i)[0]) / (std if std > 1e-12 else 1)
        if max(values) - min(values) < 1e-12:
            return 0.0
        others = [estimate(j) for j in group if counts(j) and (j != i or baseline == "mean")]
        return (estimate(i) - mean(others)) / (stdev(values) if normalize == "sibling_std" else 1)

    def weight(i):
        if baseline == "trajectory":
            return weight(parent[i]) if trunk(i) else 1 / max(len(siblings(i)), 1)
        return (weight(parent[i]) if parent[i] >= 0 else 1) / max(len(siblings(i)), 1)

    a = [advantage(i) for i in turns]
    known = [x for x in a if x is not None]
    if normalize == "batch_std" and known:
        m = mean(known)
        std = mean((x - m) ** 2 for x in known) ** 0.5
        a = [x if x is None or std < 1e-12 else x / std for x in a]
    w = [weight(i) if weighting == "path_probability" else 1 for i in turns]
    if center and known:
        m = sum(x * y for x, y in zip(a, w) if x is not None) / sum(y for x, y in zip(a, w) if x is not None)
        a = [None if x is None else x - m for x in a]
    return (
        [x or 0.0 for x in a],
        [0.0 if x is None else y for x, y in zip(a, w, strict=True)],
        [x is not None for x in a],
    )


OPTIONS = {
    "baseline": ("loo", "mean", "shrunk", "trajectory"),
    "normalize": ("none", "sibling_std", "batch_std"),
    "leaf_return": ("leaf", "tree_mean"),
    "weighting": ("uniform", "path_probability"),
    "trunk_in_siblings": ("auto", "always", "never"),
    "center": (False, True),
}


@pytest.mark.parametrize("values", list(product(*OPTIONS.values())), ids=lambda values: "-".join(map(str, values)))
def test_vectorised_equals_recursive_definition_on_random_forests(values):
    options = dict(zip(OPTIONS, values, strict=True))
    for seed in range(30):
        f = random_forest(seed)
        result = sibling_advantages(f, **options)
        explained = float(result.diagnostics.prefix_explained_share)
        advantage, weight, valid = slow(f, **options, explained=explained)
        assert result.valid.tolist() == valid
        assert result.advantage.tolist() == pytest.approx(advantage, abs=1e-9)
        assert result.weight.tolist() == pytest.approx(weight, abs=1e-12)


def test_trajectory_baseline_compares_a_tree_and_separate_rollouts_alike():
    tree = trunk_and_two_forks()
    apart = forest([-1, -1, -1], [0, 1, 2], tree.leaf_return.tolist())
    whole, plain = sibling_advantages(tree, baseline="trajectory"), sibling_advantages(apart)
    assert whole.advantage.tolist() == plain.advantage[tree.trajectory].tolist() and whole.valid.all()


# --- edges --------------------------------------------------------------------------------------------------------


def test_segment_carries_its_first_turns_advantage_and_turns_above_the_first_branch_point_are_masked():
    result = sibling_advantages(trunk_and_two_forks())
    assert result.valid.tolist() == [False, True, True, True, True, True]
    assert result.advantage.tolist() == [0, 0.75, 0.75, -0.75, 0, 0]
    assert result.weight.tolist() == [0, 1, 1, 1, 1, 1]


def test_one_usable_sibling_is_not_valid():
    result = sibling_advantages(trunk_and_two_forks(usable=[False, True, False]))
    assert not result.valid.any()


def test_forks_of_a_failed_trunk_stay_each_others_siblings():
    result = sibling_advantages(trunk_and_two_forks(usable=[False, True, True], leaf_return=[float("nan"), 0.0, 0.5]))
    assert result.valid.tolist() == [False, False, False, True, True, True]
    assert result.advantage.tolist() == [0, 0, 0, -0.5, 0.5, 0.5]


def test_lone_fork_of_a_failed_trunk_does_not_inherit_from_above():
    # Root samples 0 and 2; the second failed after its first turn, under which fork 3 lives on.
    f = forest([-1, -1, 1, 1], [0, 1, 1, 2], [1.0, 0.0, 0.5], usable=[True, False, True])
    assert not sibling_advantages(f).valid.any()


def test_trunk_whose_forks_failed_keeps_its_older_segment():
    f = forest([-1, -1, 1, 1], [0, 1, 1, 2], [1.0, 0.0, 0.5], usable=[True, True, False])
    assert sibling_advantages(f).advantage.tolist() == [1, -1, -1, 0]


def test_fork_whose_only_sibling_is_an_unfair_trunk_is_not_valid_but_the_trunk_is():
    f = forest([-1, 0, 0], [0, 0, 1], [1.0, 0.0], fair=[True, False, True])
    result = sibling_advantages(f)
    assert result.valid.tolist() == [False, True, False]
    assert result.advantage.tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("baseline", OPTIONS["baseline"])
@pytest.mark.parametrize("normalize", OPTIONS["normalize"])
@pytest.mark.parametrize("leaf_return", OPTIONS["leaf_return"])
def test_equal_returns_give_exactly_zero_and_stay_valid(normalize, leaf_return, baseline, dtype):
    # 0.1 has no exact binary form: means over three and over two of them differ in the last bit.
    f = forest([-1, -1, -1, 0, 0, 0], [0, 1, 2, 0, 3, 4], [0.1] * 5, dtype=dtype)
    result = sibling_advantages(f, baseline=baseline, normalize=normalize, leaf_return=leaf_return)
    assert result.valid.all()
    assert result.advantage.tolist() == [0] * 6
    assert result.diagnostics.zero_advantage_share == 1
    assert result.diagnostics.prefix_explained_share == 0


def all_finite(result) -> bool:
    d = result.diagnostics
    tensors = [result.advantage, result.weight, *(x.float() for x in vars(d).values())]
    return all(bool(x.isfinite().all()) for x in tensors)


@pytest.mark.parametrize("normalize", OPTIONS["normalize"])
@pytest.mark.parametrize("leaf_return", OPTIONS["leaf_return"])
@pytest.mark.parametrize(
    "f",
    [
        forest([], [], []),
        forest([-1], [0], [1.0]),
        trunk_and_two_forks(usable=[False] * 3, leaf_return=[float("nan")] * 3),
    ],
    ids=["empty", "one turn", "all failed"],
)
def test_forest_without_siblings_is_all_invalid_and_finite(f, normalize, leaf_return):
    result = sibling_advantages(f, normalize=normalize, leaf_return=leaf_return, weighting="path_probability")
    assert not result.valid.any()
    assert not result.weight.any()
    assert result.diagnostics.group_size.numel() == 0
    assert all_finite(result)


def test_result_has_the_dtype_of_the_returns_and_float32_agrees_with_float64():
    for seed in range(20):
        f = random_forest(seed)
        exact = sibling_advantages(f, normalize="sibling_std", leaf_return="tree_mean")
        single = sibling_advantages(
            replace(f, leaf_return=f.leaf_return.float()), normalize="sibling_std", leaf_return="tree_mean"
        )
        assert single.advantage.dtype == single.weight.dtype == torch.float32
        torch.testing.assert_close(single.advantage.double(), exact.advantage, rtol=0, atol=1e-5)
        assert all_finite(single)


def test_batch_std_leaves_a_batch_without_spread_undivided():
    # Two trees, in each an unfair trunk against one fork: 0.3 - 0.1 and 0.2 - 0 differ by rounding alone.
    f = forest(
        [-1, 0, 0, -1, 3, 3], [0, 0, 1, 2, 2, 3], [0.3, 0.1, 0.2, 0.0], [0] * 3 + [1] * 3, None, [True, False, True] * 2
    )
    assert sibling_advantages(f, normalize="batch_std").advantage.tolist() == pytest.approx([0, 0.2, 0, 0, 0.2, 0])


# --- diagnostics --------------------------------------------------------------------------------------------------


def test_diagnostics_describe_the_sibling_groups():
    d = sibling_advantages(trunk_and_two_forks()).diagnostics
    assert d.group_size.tolist() == [3]
    assert d.group_variance.tolist() == pytest.approx([0.25])
    assert d.zero_advantage_share == 0
    assert d.advantage_mean == pytest.approx((0.75 + 0.75 - 0.75) / 5)
    assert d.advantage_std == pytest.approx((3 * 0.75**2 / 5 - 0.15**2) ** 0.5)


def forks_only(returns: torch.Tensor, prompt: torch.Tensor) -> Forest:
    """One group of n forks per row of ``returns`` [G, n]: each hangs below an own root that failed after one turn."""
    groups, n = returns.shape
    roots = torch.arange(groups)
    return bare_forest(
        parent=torch.cat([torch.full((groups,), -1), roots.repeat_interleave(n)]),
        trajectory=torch.arange(groups + groups * n),
        prompt=torch.cat([prompt, prompt.repeat_interleave(n)]),
        leaf_return=torch.cat([torch.zeros(groups, dtype=returns.dtype), returns.flatten()]),
        usable=torch.arange(groups + groups * n) >= groups,
        fair=torch.ones(groups + groups * n, dtype=torch.bool),
    )


@pytest.mark.parametrize(
    "returns, prompt, share",
    [
        ([[1, 1], [0, 0]], [0, 0], 1),  # the prefix decides
        ([[1, 0], [1, 0]], [0, 0], 0),  # the prefix decides nothing
        ([[1, 1], [0, 0]], [0, 1], 0),  # two prompts: the prompt decides, which a trajectory-level baseline knows too
        ([[3, 1], [1, 0]], [0, 0], 0.5 / (0.5 + 1.25)),  # within 2.5 / 2, between (2.25 - 1.25) / 2
    ],
)
def test_prefix_explained_share_of_hand_computed_groups(returns, prompt, share):
    f = forks_only(torch.tensor(returns, dtype=torch.float64), torch.tensor(prompt))
    assert sibling_advantages(f).diagnostics.prefix_explained_share == pytest.approx(share)


def test_prefix_explained_share_is_as_exact_as_the_returns():
    """Between and within by hand .005 and .015, from group sizes of which a quotient is no whole number."""
    f = forest([-1, -1, -1, 1, 1], [0, 1, 2, 3, 4], [0.0, 0.0, 0.0, 0.0, 0.3])
    assert abs(float(sibling_advantages(f).diagnostics.prefix_explained_share) - 0.25) < 1e-14


def test_prefix_explained_share_does_not_count_the_noise_of_small_groups_or_the_spread_of_prompts():
    g = torch.Generator().manual_seed(0)
    prompt = torch.arange(1000).repeat_interleave(3)
    prefix = torch.randn(3000, 1, generator=g, dtype=torch.float64)
    returns = prefix + torch.randn(3000, 4, generator=g, dtype=torch.float64) + 10.0 * (prompt % 7)[:, None]
    share = sibling_advantages(forks_only(returns, prompt)).diagnostics.prefix_explained_share
    assert share == pytest.approx(0.5, abs=0.03)


def bushes(effect: float, trees: int = 500, groups: int = 3, n: int = 3) -> tuple[Forest, torch.Tensor, torch.Tensor]:
    """Trees of two root samples, the first with ``groups`` turns below each of which n - 1 forks join the trunk. V changes
    from one of them to the next by ``effect`` times a standard normal number, and a return differs from it by another one.
    Returns the forest, the forks [trees, groups, n - 1] and V of the branch points [trees, groups]."""
    g = torch.Generator().manual_seed(1)
    parent, trajectory, prompt, forks, leaves = [], [], [], [], 0
    value = effect * torch.randn(trees, groups, generator=g, dtype=torch.float64).cumsum(1)
    returns = []
    for tree in range(trees):
        trunk, leaves = leaves, leaves + 2
        start = len(parent)
        parent += [-1, -1]
        trajectory += [trunk, trunk + 1]
        returns += [0.0, float(torch.randn((), generator=g))]
        last = start
        for b in range(groups):
            parent.append(last)
            trajectory.append(trunk)
            for _ in range(n - 1):
                forks.append(len(parent))
                parent.append(last)
                trajectory.append(leaves)
                leaves += 1
                returns.append(float(value[tree, b] + torch.randn((), generator=g)))
            last = start + 2 + b * n
        returns[trunk] = float(value[tree, -1] + torch.randn((), generator=g))
        prompt += [tree] * (len(parent) - start)
    return forest(parent, trajectory, returns, prompt), torch.tensor(forks).view(trees, groups, n - 1), value


@pytest.mark.parametrize("effect", [0.0, 0.5, 3.0])
def test_shrunk_baseline_is_nearer_to_the_state_value_than_the_siblings_mean(effect):
    f, forks, value = bushes(effect)
    error = {}
    for baseline in ("loo", "shrunk", "trajectory"):
        result = sibling_advantages(f, baseline=baseline)
        b = f.leaf_return[f.trajectory[forks]] - result.advantage[forks]
        error[baseline] = float(((b - value[..., None]) ** 2).mean())
    assert error["shrunk"] < error["loo"] * {0.0: 0.8, 0.5: 0.9, 3.0: 1.0}[effect]
    assert effect < 1 or error["shrunk"] < 0.5 * error["trajectory"]


def test_shrunk_baseline_counts_all_returns_alike_where_the_prefix_explains_nothing():
    # Three root samples, two forks after the first one's first turn; both groups have the same returns.
    f = forest([-1, -1, -1, 0, 0, 0], [0, 1, 2, 0, 3, 4], [1.0, 0.0, 0.0, 0.0, 0.0])
    result = sibling_advantages(f, baseline="shrunk")
    assert result.diagnostics.prefix_explained_share == 0
    assert result.advantage.tolist() == pytest.approx([1, -0.5, -0.5, 1, -0.25, -0.25])


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parent": torch.tensor([-1, 0, 1, 0, 0, 5])}, "earlier turn"),
        ({"trajectory": torch.tensor([0, 0, 0, 1, 2, 3])}, r"0\.\.2"),
        ({"trajectory": torch.tensor([0, 0, 0, 1, 1, 1])}, "one chain"),
        ({"usable": torch.tensor([True])}, "usable is"),
        ({"prompt": torch.zeros(6)}, "prompt is"),
        ({"leaf_return": torch.tensor([1, 0, 0])}, "float32 or float64"),
        ({"leaf_return": torch.tensor([1.0, float("nan"), 0.0])}, "not finite"),
    ],
)
def test_malformed_forest_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(trunk_and_two_forks(), **change)


@pytest.mark.parametrize("key", [key for key in OPTIONS if key != "center"])
def test_unknown_option_is_refused_by_name(key):
    with pytest.raises(ValueError, match=f"{key}='x'"):
        sibling_advantages(trunk_and_two_forks(), **{key: "x"})
