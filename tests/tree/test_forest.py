"""From rows to turns and back."""

import pytest
import torch

from verl_bpo.advantages.bpo import BPO
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.metrics import tree_metrics
from verl_bpo.tree.rows import RowSpans, tree_rows
from verl_bpo.tree.topology import ROOT, Failure, Node, Tree


def tree(returns: list[float], fork_returns: list[float]) -> Tree:
    """Root samples of two turns each, and one-turn forks after the first one's first turn."""
    out = Tree(prompt_ids=[1])
    for value in returns:
        index = out.add_trajectory()
        first = out.add_node(Node(ROOT, index, [5, 6], [-1.0, -1.0], [1.0, 0.5], [7], score=1.0))
        out.add_node(Node(first, index, [8], [-1.0], [1.0], reward=value, score=0.5))
        out.trajectories[index].end = "terminated"
    for value in fork_returns:
        index = out.add_trajectory(0)
        out.add_node(Node(0, index, [9, 9, 9], [-1.0] * 3, [1.0] * 3, reward=value, score=0.5))
        out.trajectories[index].end = "terminated"
    return out


def test_trees_of_one_prompt_share_their_root_group():
    batch = Forest.of(
        {"p_0": tree([1.0], []), "p_1": tree([0.0], []), "q_0": tree([1.0], [])},
        {"p_0": "p", "p_1": "p", "q_0": "q"},
    )
    result = BPO()(batch)
    assert result.advantage.tolist() == [1.0, 1.0, -1.0, -1.0, 0.0, 0.0]
    assert result.valid.tolist() == [True] * 4 + [False] * 2


def test_ids_are_shifted_past_earlier_trees():
    first, second = tree([1.0], [0.0, 1.0]), tree([0.0], [1.0])
    batch = Forest.of({"a_0": first, "b_0": second}, {"a_0": "a", "b_0": "b"})
    assert batch.parent.tolist() == [-1, 0, 0, 0, -1, 4, 4]
    assert batch.trajectory.tolist() == [0, 0, 1, 2, 3, 3, 4]
    assert batch.turns == {"a_0": slice(0, 4), "b_0": slice(4, 7)}


def test_a_turns_value_lands_on_its_own_action_tokens():
    t = tree([1.0], [0.0])
    values = torch.tensor([0.1, 0.2, 0.3])
    tokens = [row.spans.spread(values) for row in tree_rows(t)]
    assert tokens[0].tolist() == pytest.approx([0.1, 0.1, 0.0, 0.2])
    assert tokens[1].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.3, 0.3, 0.3])


def test_spread_of_a_row_without_turns_is_zero():
    assert RowSpans.none(3).spread(torch.tensor([1.0])).tolist() == [0.0, 0.0, 0.0]


def test_metrics_are_finite_when_every_branch_was_lost():
    t = Tree(prompt_ids=[])
    t.trajectories[t.add_trajectory()].end = "failed"
    t.failures = [Failure("SandboxCrashed", "gone", 0)]
    batch = Forest.of({"a_0": t}, {"a_0": "a"})
    metrics = tree_metrics(batch) | BPO()(batch).metrics
    assert all(torch.isfinite(torch.tensor(v)) for v in metrics.values())
    assert [str(failure) for failure in batch.failures] == ["SandboxCrashed: gone"]


def test_entropy_at_branch_points_is_told_from_the_rest():
    t = tree([1.0], [0.0])
    t.nodes[1].score = t.nodes[2].score = 2.0
    metrics = tree_metrics(Forest.of({"a_0": t}, {"a_0": "a"}))
    assert (metrics["tree/entropy_at_branch"], metrics["tree/entropy_elsewhere"]) == (2.0, 1.0)
    assert (metrics["tree/leaves"], metrics["tree/success"], metrics["tree/depth"]) == (2.0, 0.5, 2.0)


def test_success_is_what_the_environment_calls_so_whatever_the_reward():
    t = tree([0.4], [1.0, 0.0])
    for trajectory, won in zip(t.trajectories, (False, True, False)):
        trajectory.info["won"] = won
    metrics = tree_metrics(Forest.of({"a_0": t}, {"a_0": "a"}))
    assert metrics["tree/success"] == pytest.approx(1 / 3)
    assert metrics["tree/return"] == pytest.approx(1.4 / 3)
