"""A packed tree cut into runs of tokens that are computed one after another.

A chunk is any run of the packed sequence. In DFS pre-order all that its tokens see before the chunk lies on the path of
its first token: if a token before the chunk has a descendant inside it, its subtree spans the chunk's first token too.
So a chunk needs the keys and values of one path, its *past*, and its own, whatever the tree looks like.

Letters in shapes: C tokens of a chunk, K of them with logits, B tokens of its past, M its nodes (cut at its ends), P the sum
of their paths' lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from verl_bpo.model.packed_tree.trie import PackedTree


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens ``start : stop`` of a packed tree; indices below count the past first, then the chunk's own tokens."""

    start: int
    stop: int
    token_ids: torch.Tensor
    """(C,) int64"""
    position_ids: torch.Tensor
    """(C,) int64"""
    past: torch.Tensor
    """(B,) int64: packed indices of the ancestors of the chunk's first token, root first."""
    subtree_end: torch.Tensor
    """(B + C,) int64: the chunk's token q sees key k if ``k <= B + q`` and ``q < subtree_end[k]``."""
    path_index: torch.Tensor
    """(P,) int64: for each node the keys along its path, root first."""
    cu_nodes: torch.Tensor
    """(M + 1,) int32: node m is the chunk's tokens ``cu_nodes[m] : cu_nodes[m + 1]``."""
    cu_paths: torch.Tensor
    """(M + 1,) int32: node m's path is ``path_index[cu_paths[m] : cu_paths[m + 1]]``."""
    node_lengths: tuple[int, ...]
    path_lengths: tuple[int, ...]
    wanted: torch.Tensor
    """(K,) int64, ascending: packed indices of the chunk's tokens whose logits are computed."""
    targets: torch.Tensor
    """(E,) int64: packed indices, anywhere in the tree, of the tokens that these predict."""
    sources: torch.Tensor
    """(E,) int64: which of the K predicts each."""


@dataclass
class KeyValues:
    """What attention of one chunk reads from its past and hands on; filled by :func:`attention.path_attention`."""

    past: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By layer: keys and values (1, Hkv, B, D) of the chunk's past. Empty where there is none."""
    own: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By layer: those of the chunk itself (1, Hkv, C, D), with their graph."""

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Note the chunk's own and return past and own together, (1, Hkv, B + C, D)."""
        self.own[layer] = (key, value)
        if layer not in self.past:
            return key, value
        before = self.past[layer]
        return torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)


def cut_tree(tree: PackedTree, count: int, wanted: torch.Tensor | None = None) -> list[Chunk]:
    """The tree in ``count`` chunks of nearly equal length, on the tree's device.

    Args:
        wanted: ascending packed indices of the tokens whose logits are computed. None: all.

    Raises:
        ValueError: more chunks than tokens.
    """
    tokens = tree.unique_tokens
    if not 1 <= count <= tokens:
        raise ValueError(f"{tokens} tokens can't be cut into {count} chunks")
    device = tree.token_ids.device
    depth, end, paths = (x.cpu().numpy() for x in (tree.position_ids, tree.subtree_end, tree.path_index))
    node_bounds, path_starts = tree.cu_nodes.tolist(), tree.cu_paths.tolist()
    targets, sources = (x.cpu().numpy() for x in tree.edges(wanted))
    by_source = np.argsort(sources, kind="stable")
    targets, sources = targets[by_source], sources[by_source]
    with_logits = np.arange(tokens) if wanted is None else wanted.cpu().numpy()
    bounds = [i * tokens // count for i in range(count + 1)]

    def tensor(values: np.ndarray | list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(device, dtype)

    chunks = []
    for start, stop in zip(bounds, bounds[1:]):
        first, last = np.searchsorted(node_bounds, [start, stop - 1], side="right") - 1
        edges = [start, *node_bounds[first + 1 : last + 1], stop]
        past = paths[path_starts[first] : path_starts[first] + depth[start]]
        pieces = []
        for node, upto in zip(range(first, last + 1), edges[1:]):
            path = paths[path_starts[node] : path_starts[node] + depth[upto - 1] + 1]
            outside = int(np.searchsorted(path, start))  # a prefix of the past
            pieces.append(np.concatenate([np.arange(outside), path[outside:] - start + len(past)]))
        lengths = [len(p) for p in pieces]
        mine, others = np.searchsorted(with_logits, [start, stop])
        low, high = np.searchsorted(sources, [mine, others])
        chunks.append(
            Chunk(
                start=start,
                stop=stop,
                token_ids=tree.token_ids[start:stop],
                position_ids=tree.position_ids[start:stop],
                past=tensor(past),
                subtree_end=tensor(np.concatenate([end[past], end[start:stop]]) - start),
                path_index=tensor(np.concatenate(pieces)),
                cu_nodes=tensor(np.asarray(edges) - start, torch.int32),
                cu_paths=tensor(np.concatenate([[0], np.cumsum(lengths)]), torch.int32),
                node_lengths=tuple(np.diff(edges).tolist()),
                path_lengths=tuple(lengths),
                wanted=tensor(with_logits[mine:others]),
                targets=tensor(targets[low:high]),
                sources=tensor(sources[low:high] - mine),
            )
        )
    return chunks
