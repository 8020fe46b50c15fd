"""A tree's paths, branch points and rows."""

import json

import pytest
import torch

from verl_bpo.tree.forest import Forest
from verl_bpo.tree.rows import RowSpans, tree_rows
from verl_bpo.tree.topology import ROOT, Failure, Node, Tree


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
        covered = {i for start, end in zip(row.spans.starts, row.spans.ends) for i in range(start, end)}
        assert covered == {i for i, m in enumerate(row.response_mask) if m}
        assert len(row.logprobs) == len(row.response_ids)


def test_rows_of_the_window_context_hold_one_turn_each():
    tree = small_tree()
    for i, node in enumerate(tree.nodes):
        node.prompt_ids = [100 + i]
    rows = tree_rows(tree, windowed=True)
    assert [(r.prompt_ids, r.response_ids, r.spans.nodes) for r in rows] == [
        ([100], [10, 11], [0]),
        ([101], [12], [1]),
        ([102], [13], [2]),
        ([103], [14, 15], [3]),
    ]


def test_both_contexts_train_the_same_turns():
    tree = small_tree()
    for node in tree.nodes:
        node.prompt_ids = [1]
    full = sorted(n for r in tree_rows(tree) for n in r.spans.nodes)
    assert full == sorted(n for r in tree_rows(tree, windowed=True) for n in r.spans.nodes)


def test_a_lost_branch_is_no_sibling():
    tree = small_tree()
    assert tree.branch_points() == [0]
    tree.trajectories[1].end = "failed"
    assert tree.branch_points() == []


def test_the_trunk_is_unfair_only_at_a_point_chosen_by_its_action():
    tree = small_tree()
    assert tree.fair() == [True] * 5
    tree.trunk_fair[0] = False
    assert tree.fair() == [True, False, True, True, True]


def test_a_turn_must_continue_its_trajectory():
    tree = small_tree()
    with pytest.raises(ValueError, match="continues after 2"):
        turn(tree, 1, 0, [1], [])


def test_a_tree_and_its_skeleton_survive_json():
    tree = small_tree()
    tree.nodes[0].actions = ("look", "wait")
    tree.trunk_fair[0] = False
    tree.failures, tree.lessons, tree.fatal = [Failure("SandboxCrashed", "gone", 2)], [0.5], "no such task"
    for form in (tree, tree.skeleton()):
        assert Tree.from_dict(json.loads(json.dumps(form.to_dict()))) == form


def test_a_skeleton_makes_the_same_forest_without_tokens_and_texts():
    tree = small_tree()
    tree.trajectories[0].info = {"won": False, "goal": "a long text"}
    tree.trunk_fair[0] = False
    bare = tree.skeleton()
    assert not any(isinstance(x, list | str | tuple) and x for node in bare.nodes for x in vars(node).values())
    whole, made = (Forest.of({"p": t}, {"p": "p"}) for t in (tree, bare))
    for name in (
        "parent",
        "trajectory",
        "fair",
        "reward",
        "leaf_return",
        "usable",
        "truncated",
        "won",
        "depth",
    ):
        assert torch.equal(getattr(whole, name), getattr(made, name)), name
    assert tree.nodes[0].action_ids == [10, 11]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("nodes"), "a tree lacks nodes"),
        (lambda t: t.update(leaves=3), "a tree has fields that this version doesn't know: leaves"),
        (lambda t: t["nodes"][1].pop("parent"), "turn 1 of a tree lacks parent"),
        (lambda t: t["nodes"].append(3), "turn 5 of a tree is int, not a mapping"),
        (lambda t: t["nodes"][1].update(parent=4), "turn 1 of a tree has trajectory 0 and parent 4"),
        (lambda t: t["nodes"][1].update(trajectory=9), "turn 1 of a tree has trajectory 9"),
        (lambda t: t["nodes"][2].update(parent=0), "node's parent is 0, but"),
        (lambda t: t["trajectories"][0].update(leaf=1), "don't start and end where"),
    ],
)
def test_what_is_no_tree_is_refused_in_one_line(change, message):
    data = small_tree().to_dict()
    change(data)
    with pytest.raises(ValueError, match=message) as error:
        Tree.from_dict(data)
    assert "\n" not in str(error.value)


def test_a_rows_spans_survive_json_and_are_checked():
    for row in tree_rows(small_tree()):
        assert RowSpans.from_dict(json.loads(json.dumps(row.spans.to_dict()))) == row.spans
        with pytest.raises(ValueError, match="don't follow one another in 1 tokens"):
            RowSpans.from_dict({**row.spans.to_dict(), "length": 1})
    with pytest.raises(ValueError, match="a row's spans lacks length"):
        RowSpans.from_dict({"trajectory": 0, "nodes": [], "starts": [], "ends": []})
