"""Rows: how a tree travels through verl. Estimators never see rows, only turns.

``full`` context: one row per leaf, the whole conversation, where only the turns of the leaf's own trajectory carry mask
1, so that each token is trained once. ``window`` context: one row per turn, with its own bounded prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_bpo.tree.topology import Tree

BRANCH_LIMIT = "branch_limit"
"""Field of a prompt row: the limit that selector ``quantile`` has learnt so far."""


@dataclass
class Row:
    """``response_mask`` and ``logprobs`` have one entry per response token; observation tokens carry 0 in both.

    ``nodes`` are the turns that this row trains; turn i covers response tokens ``starts[i] : ends[i]``.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float]
    trajectory: int
    nodes: list[int]
    starts: list[int]
    ends: list[int]
    num_turns: int


def tree_rows(tree: Tree, windowed: bool = False) -> list[Row]:
    """Rows of all usable trajectories. A turn is trained by exactly one row, and only if its trajectory is usable."""
    rows: list[Row] = []
    for index, trajectory in enumerate(tree.trajectories):
        if not trajectory.usable:
            continue
        path = tree.path(trajectory.leaf)
        if windowed:
            rows.extend(
                _turn_row(tree, index, node, len(path)) for node in path if tree.nodes[node].trajectory == index
            )
        else:
            rows.append(_leaf_row(tree, index, path))
    return rows


def _leaf_row(tree: Tree, index: int, path: list[int]) -> Row:
    row = Row(list(tree.prompt_ids), [], [], [], index, [], [], [], len(path))
    for position, node_id in enumerate(path):
        node = tree.nodes[node_id]
        own = node.trajectory == index
        if own:
            row.nodes.append(node_id)
            row.starts.append(len(row.response_ids))
        row.response_ids += node.action_ids
        row.response_mask += [int(own)] * len(node.action_ids)
        row.logprobs += node.action_logprobs if own else [0.0] * len(node.action_ids)
        if own:
            row.ends.append(len(row.response_ids))
        if position < len(path) - 1:
            row.response_ids += node.observation_ids
            row.response_mask += [0] * len(node.observation_ids)
            row.logprobs += [0.0] * len(node.observation_ids)
    return row


def _turn_row(tree: Tree, index: int, node_id: int, turns: int) -> Row:
    node = tree.nodes[node_id]
    length = len(node.action_ids)
    return Row(
        list(node.prompt_ids), list(node.action_ids), [1] * length, list(node.action_logprobs), index, [node_id], [0],
        [length], turns,
    )  # fmt: skip


def topology(tree: Tree) -> dict[str, Any]:
    """What the estimators need of a tree, as plain lists: the fields that travel with its first row.

    ``parent``, ``trajectory``, ``exchangeable``, ``reward``: one entry per turn; ``leaf_return``, ``usable``, ``won``: one per
    trajectory. ``score`` is the entropy signal of each turn's state, ``state_value`` what the rollout engine's value
    readout said of it; None where there is none.
    """
    starts = {t.start for t in tree.trajectories}
    continues = [i not in starts for i in range(len(tree.nodes))]
    usable = [t.usable for t in tree.trajectories]
    return {
        "parent": [n.parent for n in tree.nodes],
        "trajectory": [n.trajectory for n in tree.nodes],
        "exchangeable": [
            not trunk or tree.trunk_exchangeable.get(node.parent, True) for trunk, node in zip(continues, tree.nodes)
        ],
        "reward": [n.reward for n in tree.nodes],
        "score": [n.score for n in tree.nodes],
        "state_value": [n.state_value for n in tree.nodes],
        "leaf_return": [tree.trajectory_return(t) if u else 0.0 for t, u in zip(tree.trajectories, usable)],
        "usable": usable,
        "won": [u and tree.won(t) for t, u in zip(tree.trajectories, usable)],
        "truncated": [t.end == "truncated" for t in tree.trajectories],
        "depth": [tree.depth(t.leaf) if u else 0 for t, u in zip(tree.trajectories, usable)],
    }
