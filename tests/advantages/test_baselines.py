"""HGPO and Tree-GRPO against their definitions read path by path, and the edges they share."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from second_definitions import batches, forest_of, grown

from verl_bpo.advantages.hgpo import HGPO
from verl_bpo.advantages.leaves import relative
from verl_bpo.advantages.tree_grpo import TreeGRPO
from verl_bpo.config.schema import build, find_estimator
from verl_bpo.report.slow_gigpo import compared
from verl_bpo.tree.topology import ROOT


def paths_of(batch):
    """(prompt, tree's number, path) of every trajectory that wasn't lost."""
    return [(prompt, n, tree.path(t.leaf)) for n, (prompt, tree) in enumerate(batch) for t in tree.usable()]


# --- Tree-GRPO --------------------------------------------------------------------------------------------------------


def slow_tree_grpo(batch, groups, shared, norm):
    paths = paths_of(batch)
    returns = [math.fsum(batch[n][1].nodes[i].reward for i in path) for _, n, path in paths]
    score, others = [0.0] * len(paths), [0] * len(paths)
    for kind, key in (("tree", lambda p: p[1]), ("prompt", lambda p: p[0])):
        if groups in (kind, "both"):
            members = defaultdict(list)
            for i, path in enumerate(paths):
                members[key(path)].append(i)
            for group in members.values():
                for i, a in zip(group, compared([returns[i] for i in group], norm)):
                    score[i] += a
                    others[i] += len(group) - 1
    out = []
    for number, (_, tree) in enumerate(batch):
        for node, turn in enumerate(tree.nodes):
            below = [i for i, (_, n, path) in enumerate(paths) if n == number and node in path]
            valid = tree.trajectories[turn.trajectory].usable and any(others[i] for i in below)
            each = math.fsum(score[i] for i in below)
            out.append((valid, (each if shared == "each" else each / len(below)) if valid else 0.0))
    return out


@settings(max_examples=150, deadline=None)
@given(
    batches,
    st.sampled_from(["both", "tree", "prompt"]),
    st.sampled_from(["each", "once"]),
    st.sampled_from(["std", "none"]),
)
def test_tree_grpo_is_what_its_formula_says_leaf_by_leaf(batch, groups, shared, norm):
    found = TreeGRPO(groups=groups, shared=shared, norm=norm)(forest_of(*batch))
    expected = slow_tree_grpo(batch, groups, shared, norm)
    assert found.valid.tolist() == [valid for valid, _ in expected]
    assert (found.advantage * found.weight).tolist() == pytest.approx([a for _, a in expected], abs=1e-7)
    assert all(math.isfinite(x) for x in found.metrics.values())


def test_tree_grpo_by_hand():
    """Two trees of a prompt: a trunk (1) with a fork (0) after its first turn, and a lone chain (0)."""
    forked = grown((ROOT, [(1, 0.0), (2, 1.0)], "terminated"), (0, [(2, 0.0)], "terminated"))
    batch = [("p", forked), ("p", grown((ROOT, [(1, 0.0)], "truncated")))]
    inter = [2 / 3, -1 / 3, -1 / 3]
    intra = [1 / 2, -1 / 2, 0.0]
    found = TreeGRPO(norm="none")(forest_of(*batch))
    total = [a + b for a, b in zip(inter, intra)]
    # The first turn of the trunk leads to both of its tree's leaves.
    assert (found.advantage * found.weight).tolist() == pytest.approx([total[0] + total[1], *total])
    assert TreeGRPO(norm="none", shared="once")(forest_of(*batch)).advantage[0] == pytest.approx(
        (total[0] + total[1]) / 2
    )
    found = TreeGRPO(norm="none", groups="prompt")(forest_of(*batch))
    assert (found.advantage * found.weight).tolist() == pytest.approx([inter[0] + inter[1], *inter])
    found = TreeGRPO(norm="none", groups="tree")(forest_of(*batch))
    assert found.valid.tolist() == [True, True, True, False], "a tree's only leaf has none to be compared with"
    spread = (math.sqrt(1 / 3) + 1e-6, math.sqrt(1 / 2) + 1e-6)
    assert float(TreeGRPO()(forest_of(*batch)).advantage[1]) == pytest.approx(
        inter[0] / spread[0] + intra[0] / spread[1]
    )


def test_a_member_that_is_its_groups_mean_deviates_by_nothing_whatever_rounding_leaves():
    """HGPO leaves a group out for whom it says nothing, so that 5e-17 in place of 0 halved an advantage."""
    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    assert (x - x.sum() / 3)[1] != 0
    found, _ = relative(x, torch.zeros(3, dtype=torch.int64), std=False)
    assert found[1] == 0
    assert found.tolist() == pytest.approx([-0.1, 0.0, 0.1])


# --- HGPO -------------------------------------------------------------------------------------------------------------


def slow_hgpo(batch, history, alpha, gamma, norm, states):
    on_a_path = {(n, node) for _, n, path in paths_of(batch) for node in path}

    def to_go(n, node):
        tree = batch[n][1]
        after = [to_go(n, child) for child in tree.children(node) if (n, child) in on_a_path]
        return tree.nodes[node].reward + (gamma * math.fsum(after) / len(after) if after else 0.0)

    items, seen = defaultdict(list), set()
    for k in range(1, history + 2):
        members = defaultdict(list)
        for n, node in sorted(on_a_path):
            prompt, tree = batch[n]
            path = tree.path(node)
            if len(path) >= k:
                last = (tree.nodes[i] for i in path[-k:])
                key = tuple(turn.observed if states == "observation" else turn.digest for turn in last)
                members[prompt, key].append((n, node))
        for turns in members.values():
            if len(turns) > 1:
                seen.update(turns)
                a = compared([to_go(*turn) for turn in turns], "none")
                spread = math.sqrt(math.fsum(x * x for x in a) / len(a)) + 1e-6 if norm == "std" else 1.0
                for turn, x in zip(turns, a):
                    if x != 0:
                        items[turn].append(((k + 1) ** alpha, x / spread))
    out = []
    for n, (_, tree) in enumerate(batch):
        for node, turn in enumerate(tree.nodes):
            valid = tree.trajectories[turn.trajectory].usable and (n, node) in seen
            mine = items[n, node] if valid else []
            out.append((valid, math.fsum(w * x for w, x in mine) / math.fsum(w for w, _ in mine) if mine else 0.0))
    return out


@settings(max_examples=200, deadline=None)
@given(
    batches,
    st.integers(0, 3),
    st.sampled_from([0.0, 1.0, 2.0]),
    st.sampled_from([0.95, 1.0]),
    st.sampled_from(["std", "none"]),
    st.sampled_from(["observation", "digest"]),
)
def test_hgpo_is_what_its_definition_says_group_by_group(batch, history, alpha, gamma, norm, states):
    options = {"history": history, "alpha": alpha, "gamma": gamma, "norm": norm, "states": states}
    found, expected = HGPO(**options)(forest_of(*batch)), slow_hgpo(batch, **options)
    assert found.valid.tolist() == [valid for valid, _ in expected]
    # A mean that is a member's own return up to rounding: 1e-6 in the divisor makes 1e-10 of it, and its weight counts or not.
    assert found.advantage.tolist() == pytest.approx([a for _, a in expected], abs=1e-6)
    assert all(math.isfinite(x) for x in found.metrics.values())


def test_hgpo_by_hand():
    """State 8 is visited three times, twice after state 7: (8) weighs 2, (7, 8) weighs 3."""
    batch = [
        ("p", grown((ROOT, [(7, 0.0), (8, 3.0)], "terminated"))),
        ("p", grown((ROOT, [(7, 0.0), (8, 1.0)], "terminated"))),
        ("p", grown((ROOT, [(6, 0.0), (8, 2.0)], "terminated"))),
    ]
    found = HGPO(norm="none", gamma=0.5)(forest_of(*batch))
    # The third's return is the mean of its only group, the lone state 6 has no group.
    assert found.advantage.tolist() == pytest.approx([0.5, (2 * 1 + 3 * 1) / 5, -0.5, -1.0, 0.0, 0.0])
    assert found.valid.tolist() == [True, True, True, True, False, True]


@pytest.mark.parametrize("estimator", [HGPO(), TreeGRPO()])
def test_what_nothing_can_be_learnt_from_is_said_and_never_nan(estimator):
    equal = [("p", grown((ROOT, [(1, 0.1), (2, 0.2)], "truncated"))) for _ in range(3)]
    for batch in (
        [],
        [("p", grown((ROOT, [(1, 0.0)], "failed")))],
        [("p", grown((ROOT, [(1, 1.0)], "terminated")))],
        equal,
    ):
        found = estimator(forest_of(*batch))
        assert found.degenerate and not found.advantage.any()
        assert all(math.isfinite(x) for x in found.metrics.values())


@pytest.mark.parametrize("name, options", [("hgpo", {"history": 4}), ("tree_grpo", {"groups": "prompt"})])
def test_a_run_names_them_with_their_parameters(name, options):
    found = find_estimator(build({"estimator": options}, "plain"), name)
    assert found.model_dump().items() >= options.items() and type(found).__name__.lower() == name.replace("_", "")
