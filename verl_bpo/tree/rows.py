"""Rows: how a tree travels through verl. Estimators never see rows, only turns.

``full`` context: one row per leaf, the whole conversation, where only the turns of the leaf's own trajectory carry mask
1, so that each token is trained once. ``window`` context: one row per turn, with its own bounded prompt.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verl_bpo.tree.plain import read
from verl_bpo.tree.topology import Tree

BRANCH_LESSON = "branch_lesson"
"""Field of a prompt row: what the selector has learnt so far."""


LOST = -1
"""Trajectory of the row that stands for a tree all of whose trajectories were lost."""


@dataclass(frozen=True)
class RowSpans:
    """Which turns a row trains: turn ``nodes[i]`` on response tokens ``starts[i] : ends[i]``. Travels with the row."""

    trajectory: int
    """Of its tree; :data:`LOST` where the row has none."""
    nodes: list[int]
    starts: list[int]
    ends: list[int]
    length: int
    """Response tokens, observations among them."""

    @classmethod
    def none(cls, length: int) -> RowSpans:
        """Of a row that trains nothing."""
        return cls(LOST, [], [], [], length)

    def shifted(self, offset: int) -> RowSpans:
        """With the turns' numbers in the forest, where this tree's begin at ``offset``."""
        return replace(self, nodes=[node + offset for node in self.nodes])

    def numbered(self) -> RowSpans:
        """With turns numbered within the row, from 0."""
        return replace(self, nodes=list(range(len(self.nodes))))

    def spread(self, values: Tensor) -> Tensor:
        """[length]: per-turn ``values`` [N] on the row's tokens, 0 elsewhere."""
        out = torch.zeros(self.length, dtype=values.dtype)
        if self.nodes:
            begin = torch.tensor(self.starts)
            lengths = torch.tensor(self.ends) - begin
            first = torch.repeat_interleave(begin - (lengths.cumsum(0) - lengths), lengths)
            own = values[torch.tensor(self.nodes)]
            out[first + torch.arange(int(lengths.sum()))] = torch.repeat_interleave(own, lengths)
        return out

    def mask(self) -> Tensor:
        """int64 [length]: 1 on the tokens that the row trains."""
        return self.numbered().spread(torch.ones(len(self.nodes), dtype=torch.int64))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> RowSpans:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: a field is missing or unknown, or the spans don't follow one another within ``length``.
        """
        row = read(cls, data, "a row's spans")
        edges = [0, *(edge for span in zip(row.starts, row.ends) for edge in span), row.length]
        if not len(row.nodes) == len(row.starts) == len(row.ends) or edges != sorted(edges):
            raise ValueError(
                f"a row's spans {row.starts} to {row.ends} don't follow one another in {row.length} tokens"
            )
        return row


@dataclass
class Row:
    """``logprobs`` has one entry per response token; 0 at tokens that the row doesn't train."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    spans: RowSpans
    num_turns: int

    @property
    def response_mask(self) -> list[int]:
        """One entry per response token: 1 where the row trains it."""
        return self.spans.mask().tolist()


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
    response, logprobs, nodes, starts, ends = [], [], [], [], []
    for node_id in path:
        node = tree.nodes[node_id]
        own = node.trajectory == index
        start, end = len(response), len(response) + len(node.action_ids)
        response += node.action_ids
        logprobs += node.action_logprobs if own else [0.0] * len(node.action_ids)
        if own:
            nodes.append(node_id)
            starts.append(start)
            ends.append(end)
        if node_id != path[-1]:
            response += node.observation_ids
            logprobs += [0.0] * len(node.observation_ids)
    spans = RowSpans(index, nodes, starts, ends, len(response))
    return Row(list(tree.prompt_ids), response, logprobs, spans, len(path))


def _turn_row(tree: Tree, index: int, node_id: int, turns: int) -> Row:
    node = tree.nodes[node_id]
    length = len(node.action_ids)
    spans = RowSpans(index, [node_id], [0], [length], length)
    return Row(list(node.prompt_ids), list(node.action_ids), list(node.action_logprobs), spans, turns)
