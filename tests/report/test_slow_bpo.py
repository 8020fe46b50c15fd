"""The slow definition of BPO's advantages against the estimator that runs train with."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from second_definitions import shared_code

from verl_bpo.advantages.bpo import sibling_advantages
from verl_bpo.report import slow_bpo
from verl_bpo.report.slow_bpo import slow_advantages
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.topology import ROOT, Node, Tree

OPTIONS = st.fixed_dictionaries(
    {
        "baseline": st.sampled_from(["loo", "mean", "shrunk", "trajectory"]),
        "normalize": st.sampled_from(["none", "sibling_std", "batch_std"]),
        "center": st.booleans(),
        "leaf_return": st.sampled_from(["leaf", "tree_mean"]),
        "weighting": st.sampled_from(["uniform", "path_probability"]),
        "trunk_in_siblings": st.sampled_from(["auto", "always", "never"]),
    }
)
REWARDS = st.sampled_from([0.0, 0.0, 0.1, 0.2, 0.3, 1.0, -0.5])


@st.composite
def trees(draw) -> Tree:
    """Root samples and forks anywhere, forks of forks too; some trajectories lost, some trunks no fair draws."""
    tree = Tree(prompt_ids=[1])
    for _ in range(draw(st.integers(0, 7))):
        inner = [i for i, n in enumerate(tree.nodes) if tree.trajectories[n.trajectory].leaf != i]
        parent = draw(st.sampled_from([ROOT, *inner]))
        index = tree.add_trajectory(parent)
        for _ in range(draw(st.integers(1, 4))):
            parent = tree.add_node(Node(parent, index, [1], [0.0], [0.0], reward=draw(REWARDS)))
        tree.trajectories[index].end = draw(st.sampled_from(["terminated", "terminated", "truncated", "failed"]))
        if parent != ROOT:
            tree.trunk_fair[tree.trajectories[index].parent] = draw(st.booleans())
    return tree


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), trees()), max_size=4), OPTIONS)
def test_the_slow_definition_and_the_estimator_agree(batch, options):
    named = {str(i): tree for i, (_, tree) in enumerate(batch)}
    forest = Forest.of(named, {str(i): prompt for i, (prompt, _) in enumerate(batch)})
    fast = sibling_advantages(forest, **options)
    for turns, slow in zip(forest.turns.values(), slow_advantages(batch, **options), strict=True):
        assert slow.valid == fast.valid[turns].tolist()
        assert slow.advantage == pytest.approx(fast.advantage[turns].tolist(), abs=1e-9)
        assert slow.weight == pytest.approx(fast.weight[turns].tolist(), abs=1e-12)


def test_a_group_computed_by_hand():
    """A trunk (return 1) and two forks (0 and .5) below its first turn; one more root sample (return 0)."""
    tree = Tree(prompt_ids=[1])
    for parent, rewards in ((ROOT, [0.0, 1.0]), (0, [0.0]), (0, [0.5]), (ROOT, [0.0])):
        index = tree.add_trajectory(parent)
        for reward in rewards:
            parent = tree.add_node(Node(parent, index, [1], [0.0], [0.0], reward=reward))
        tree.trajectories[index].end = "terminated"
    (found,) = slow_advantages([("p", tree)])
    assert found.advantage == [1.0, 0.75, -0.75, 0.0, -1.0] and all(found.valid)
    (found,) = slow_advantages([("p", tree)], leaf_return="tree_mean", weighting="path_probability")
    assert found.advantage == [0.5, 0.75, -0.75, 0.0, -0.5]
    assert found.weight == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6, 1 / 2])
    tree.trunk_fair[0] = False
    (found,) = slow_advantages([("p", tree)])
    assert found.advantage == [1.0, 1.0, -0.5, 0.5, -1.0]


def test_the_slow_definition_shares_no_code_with_the_estimator():
    assert not shared_code(slow_bpo)
