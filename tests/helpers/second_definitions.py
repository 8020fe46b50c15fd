"""Trees of every shape, and what an estimator is held against: its definition a second time, slow and by other code."""

from __future__ import annotations

import ast
import math
from inspect import getsource
from types import ModuleType

import pytest
from hypothesis import strategies as st

from verl_bpo.advantages.estimator import Estimate
from verl_bpo.report.slow_bpo import SlowAdvantages
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.topology import ROOT, Node, Tree

REWARDS = (0.0, 0.0, 0.1, 0.2, 1.0, -0.5, 1000.0)


def grown(*trajectories: tuple) -> Tree:
    """(parent, [(state, reward), ...], end) of each trajectory."""
    tree = Tree(prompt_ids=[1])
    for parent, turns, end in trajectories:
        index = tree.add_trajectory(parent)
        for state, reward in turns:
            node = Node(parent, index, [1], [0.0], [0.0], reward=reward, observed=state, digest=state % 2)
            parent = tree.add_node(node)
        tree.trajectories[index].end = end
    return tree


def forest_of(*trees: tuple[str, Tree]) -> Forest:
    return Forest.of({str(i): t for i, (_, t) in enumerate(trees)}, {str(i): p for i, (p, _) in enumerate(trees)})


@st.composite
def trees(draw, rewards: tuple[float, ...] = REWARDS) -> Tree:
    """Root samples and forks anywhere, forks of forks too; some trajectories lost, some trunks no fair draws; few states, so
    that many coincide."""
    tree = Tree(prompt_ids=[1])
    for _ in range(draw(st.integers(0, 7))):
        inner = [i for i, n in enumerate(tree.nodes) if tree.trajectories[n.trajectory].leaf != i]
        start = parent = draw(st.sampled_from([ROOT, *inner]))
        index = tree.add_trajectory(parent)
        for _ in range(draw(st.integers(1, 4))):
            state = draw(st.integers(0, 3))
            reward = draw(st.sampled_from(rewards))
            node = Node(parent, index, [1], [0.0], [0.0], reward=reward, observed=state, digest=state % 2)
            parent = tree.add_node(node)
        tree.trajectories[index].end = draw(st.sampled_from(["terminated", "terminated", "truncated", "failed"]))
        if start != ROOT:
            tree.trunk_fair[start] = draw(st.booleans())
    return tree


batches = st.lists(st.tuples(st.sampled_from("ab"), trees()), max_size=4)
"""(prompt, tree) each."""


def assert_same(found: Estimate, forest: Forest, second: list[SlowAdvantages]) -> None:
    """Finite, and what the second definition says of every tree."""
    assert all(math.isfinite(x) for x in found.metrics.values())
    assert found.advantage.isfinite().all() and found.weight.isfinite().all()
    for turns, slow in zip(forest.turns.values(), second, strict=True):
        assert slow.valid == found.valid[turns].tolist()
        assert slow.weight == found.weight[turns].tolist()
        assert slow.advantage == pytest.approx(found.advantage[turns].tolist(), abs=1e-7)


def shared_code(module: ModuleType) -> set[str]:
    """Of what a second definition imports, that which estimators are made of."""
    found = [node for node in ast.walk(ast.parse(getsource(module))) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {n for node in found for n in [getattr(node, "module", None), *(a.name for a in node.names)] if n}
    return {name for name in names if "advantages" in name or name in ("torch", "numpy")}
