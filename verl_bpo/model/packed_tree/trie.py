"""Rows -> trie -> one packed sequence.

Rows in lexicographic order are the leaves of their trie in depth-first order, so sorting them and comparing neighbours
is all it takes: a row adds the tokens after its longest common prefix with the row before it. Tokens alone decide, so
rows of several trees, shared system prompts and equal actions of different siblings need no special care.

Letters in shapes: T row tokens in total, N unique (packed) tokens, R rows, M nodes (runs without a branch inside),
P the sum of the lengths of all nodes' paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class PackedTree:
    """Unique tokens of some rows in DFS pre-order, and the way back to the rows."""

    token_ids: torch.Tensor
    """(N,) int64"""
    position_ids: torch.Tensor
    """(N,) int64: depth of each token, its position in any row that holds it."""
    parent: torch.Tensor
    """(N,) int64: packed index of the token before it on its path, -1 for a row's first token."""
    subtree_end: torch.Tensor
    """(N,) int64: packed tokens ``i : subtree_end[i]`` are token i and all that follow it in some row."""
    row_index: torch.Tensor
    """(T,) int64: packed index of every row token, rows one after another."""
    row_offsets: torch.Tensor
    """(R + 1,) int64: row r is ``row_index[row_offsets[r] : row_offsets[r + 1]]``."""
    path_index: torch.Tensor
    """(P,) int64: for each node the packed indices of its path, ancestors first, its own tokens last."""
    cu_nodes: torch.Tensor
    """(M + 1,) int32: node m is packed tokens ``cu_nodes[m] : cu_nodes[m + 1]``."""
    cu_paths: torch.Tensor
    """(M + 1,) int32: node m's path is ``path_index[cu_paths[m] : cu_paths[m + 1]]``."""
    node_lengths: tuple[int, ...]
    path_lengths: tuple[int, ...]
    node_parent: tuple[int, ...]
    """Per node, -1 for roots. A parent stands before its children."""

    @property
    def unique_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def total_tokens(self) -> int:
        return self.row_index.numel()

    def edges(self, wanted: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(E,) packed tokens that the tokens ``wanted`` (K,) predict, None standing for all N; (E,) which of these predicts
        each."""
        targets = (self.parent >= 0).nonzero()[:, 0]
        sources = self.parent[targets]
        if wanted is None:
            return targets, sources
        place = torch.full_like(self.parent, -1).index_copy(0, wanted, torch.arange(len(wanted), device=wanted.device))
        inside = place[sources] >= 0
        return targets[inside], place[sources[inside]]

    @property
    def compute_ratio(self) -> float:
        """Unique over total tokens: the ideal cost relative to the rows."""
        return self.unique_tokens / max(self.total_tokens, 1)

    def to(self, device: torch.device | str) -> PackedTree:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if isinstance(v, torch.Tensor)})

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Values of packed tokens (N, ...) on the rows' tokens (T, ...); gradients of copies add up."""
        return values.index_select(0, self.row_index)


def sort_rows(tokens: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lexicographic order of rows, and each row's common prefix with the one before it in that order.

    Args:
        tokens: (T,) non-negative integers, rows one after another.
        offsets: (R + 1,)

    Returns:
        order: (R,) row numbers; equal rows keep their order, a strict prefix stands before what it starts.
        shared: (R,) tokens that row ``order[i]`` shares with row ``order[i - 1]``; 0 for the first.
    """
    # Big-endian bytes compare like the numbers they hold, and memcmp is far faster than comparing lists.
    data = tokens.astype(">u4").tobytes()
    keys = [data[4 * a : 4 * b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), dtype=np.int64)
    for i in range(1, len(order)):
        a, b = offsets[order[i - 1]], offsets[order[i]]
        n = min(offsets[order[i - 1] + 1] - a, offsets[order[i] + 1] - b)
        differ = tokens[a : a + n] != tokens[b : b + n]
        first = int(differ.argmax()) if n else 0
        shared[i] = first if n and differ[first] else n
    return np.asarray(order, dtype=np.int64), shared


def pack_rows(rows: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor) -> PackedTree:
    """Pack rows of tokens.

    Args:
        rows: token ids of each row, or a jagged nested tensor (R, j). Rows may be equal, prefixes of one another or
            unrelated. The result lies on the CPU.

    Raises:
        ValueError: no tokens at all, or a negative token id.
    """
    tokens, offsets = _flatten(rows)
    if not len(tokens):
        raise ValueError("there are no tokens to pack")
    if tokens.min() < 0:
        raise ValueError(f"token id {tokens.min()} is negative")
    order, shared = sort_rows(tokens, offsets)
    lengths = np.diff(offsets)
    count = int((lengths[order] - shared).sum())

    row_index = np.empty(len(tokens), dtype=np.int64)
    source = np.empty(count, dtype=np.int64)  # where in `tokens` each packed token comes from
    parent = np.arange(-1, count - 1, dtype=np.int64)
    owner = np.empty(count, dtype=np.int64)  # a row that runs through each packed token
    filled, previous = 0, row_index[:0]
    for row, common in zip(order.tolist(), shared.tolist()):
        start, end = int(offsets[row]), int(offsets[row + 1])
        mine = row_index[start:end]
        mine[:common] = previous[:common]
        new = end - start - common
        if new:
            mine[common:] = np.arange(filled, filled + new)
            source[filled : filled + new] = np.arange(start + common, end)
            owner[filled : filled + new] = row
            parent[filled] = mine[common - 1] if common else -1
            filled += new
        previous = mine

    depth = source - offsets[owner]
    return _assemble(tokens[source], depth, parent, owner, row_index, offsets)


def _assemble(
    token_ids: np.ndarray,
    depth: np.ndarray,
    parent: np.ndarray,
    owner: np.ndarray,
    row_index: np.ndarray,
    offsets: np.ndarray,
) -> PackedTree:
    count = len(token_ids)
    children = np.bincount(parent[parent >= 0], minlength=count)
    opens = (parent != np.arange(-1, count - 1)) | (parent < 0) | (children[parent] > 1)
    starts = np.flatnonzero(opens)
    bounds = np.append(starts, count)
    node_of = np.cumsum(opens) - 1
    node_parent = np.where(parent[starts] < 0, -1, node_of[parent[starts]])
    paths = []
    for end in bounds[1:].tolist():
        first = offsets[owner[end - 1]]  # a node may run on from a row that is a prefix into the one it starts
        paths.append(row_index[first : first + depth[end - 1] + 1])
    path_lengths = np.array([len(p) for p in paths])

    node_end = bounds[1:].copy()
    for node in range(len(starts) - 1, -1, -1):
        if node_parent[node] >= 0:
            node_end[node_parent[node]] = max(node_end[node_parent[node]], node_end[node])

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)

    return PackedTree(
        token_ids=tensor(token_ids),
        position_ids=tensor(depth),
        parent=tensor(parent),
        subtree_end=tensor(np.repeat(node_end, np.diff(bounds))),
        row_index=tensor(row_index),
        row_offsets=tensor(offsets),
        path_index=tensor(np.concatenate(paths)),
        cu_nodes=tensor(bounds, torch.int32),
        cu_paths=tensor(np.concatenate([[0], np.cumsum(path_lengths)]), torch.int32),
        node_lengths=tuple(np.diff(bounds).tolist()),
        path_lengths=tuple(path_lengths.tolist()),
        node_parent=tuple(node_parent.tolist()),
    )


def _flatten(rows: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(rows, torch.Tensor):
        return rows.values().cpu().numpy(), rows.offsets().cpu().numpy().astype(np.int64)
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    offsets = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int64)
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64), offsets
