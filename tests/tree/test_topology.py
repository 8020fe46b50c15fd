"""A tree's paths, branch points and rows."""

import pytest

from verl_bpo.tree.rows import topology, tree_rows
from verl_bpo.tree.topology import ROOT, Node, Tree


def turn(
    tree: Tree, parent: int, trajectory: int, tokens: list[int], observation: list[int], reward: float = 0.0
) -> int:
    logprobs = [-0.1 * t for t in tokens]
    return tree.add_node(Node(parent, trajectory, tokens, logprobs, [1.0] * len(tokens), observation, reward=reward))


def small_tree() -> Tree:
    """A backbone of three turns, two forks after its first turn, one of them lost."""
    tree = Tree(prompt_ids=[1, 2])
    backbone = tree.add_trajectory()
    a = turn(tree, ROOT, backbone, [10, 11], [20])
    b = turn(tree, a, backbone, [12], [21, 22])
    turn(tree, b, backbone, [13], [], reward=1.0)
    fork = tree.add_trajectory(a)
    turn(tree, a, fork, [14, 15], [])
    lost = tree.add_trajectory(a)
    turn(tree, a, lost, [16], [23])
    tree.trajectories[backbone].end = "terminated"
    tree.trajectories[fork].end = "truncated"
    tree.trajectories[lost].end = "failed"
    return tree


def test_each_token_is_trained_by_exactly_one_row():
    rows = tree_rows(small_tree())
    assert [r.response_ids for r in rows] == [[10, 11, 20, 12, 21, 22, 13], [10, 11, 20, 14, 15]]
    assert [r.response_mask for r in rows] == [[1, 1, 0, 1, 0, 0, 1], [0, 0, 0, 1, 1]]
    trained = [t for r in rows for t, m in zip(r.response_ids, r.response_mask) if m]
    assert sorted(trained) == [10, 11, 12, 13, 14, 15]


def test_spans_cover_the_trained_tokens():
    for row in tree_rows(small_tree()):
        covered = {i for start, end in zip(row.starts, row.ends) for i in range(start, end)}
        assert covered == {i for i, m in enumerate(row.response_mask) if m}
        assert len(row.logprobs) == len(row.response_ids)


def test_rows_of_the_window_context_hold_one_turn_each():
    tree = small_tree()
    for i, node in enumerate(tree.nodes):
        node.prompt_ids = [100 + i]
    rows = tree_rows(tree, windowed=True)
    assert [(r.prompt_ids, r.response_ids, r.nodes) for r in rows] == [
        ([100], [10, 11], [0]),
        ([101], [12], [1]),
        ([102], [13], [2]),
        ([103], [14, 15], [3]),
    ]


def test_both_contexts_train_the_same_turns():
    tree = small_tree()
    for node in tree.nodes:
        node.prompt_ids = [1]
    full = sorted(n for r in tree_rows(tree) for n in r.nodes)
    assert full == sorted(n for r in tree_rows(tree, windowed=True) for n in r.nodes)


def test_a_lost_branch_is_no_sibling():
    tree = small_tree()
    assert tree.branch_points() == [0]
    tree.trajectories[1].end = "failed"
    assert tree.branch_points() == []


def test_the_trunk_is_unfair_only_at_a_point_chosen_by_its_action():
    tree = small_tree()
    assert topology(tree)["exchangeable"] == [True] * 5
    tree.trunk_exchangeable[0] = False
    assert topology(tree)["exchangeable"] == [True, False, True, True, True]


def test_a_turn_must_continue_its_trajectory():
    tree = small_tree()
    with pytest.raises(ValueError, match="continues after 2"):
        turn(tree, 1, 0, [1], [])


def test_a_tree_survives_json():
    import json

    tree = small_tree()
    tree.nodes[0].actions = ("look", "wait")
    tree.trunk_exchangeable[0] = False
    assert Tree.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree
