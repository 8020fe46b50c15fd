"""Ranks, mini-batches and micro-batches that keep a tree's rows together."""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from verl_bpo.model.packed_tree.trie import _flatten, sort_rows


@dataclass
class _Unit:
    """Neighbouring rows of one tree in DFS order, and how many unique tokens they hold."""

    rows: list[int]
    sizes: list[int]
    """Length of each row."""
    shared: list[int]
    """Tokens that each row shares with the one before it in the tree."""

    @property
    def unique(self) -> int:
        # The first row has nothing before it in its own micro-batch.
        return sum(self.sizes) - sum(self.shared[1:])

    def cut(self, at: int) -> tuple[_Unit, _Unit]:
        head = _Unit(self.rows[:at], self.sizes[:at], self.shared[:at])
        return head, _Unit(self.rows[at:], self.sizes[at:], self.shared[at:])

    def pieces(self, max_tokens: int) -> list[_Unit]:
        """Cut so that none exceeds the budget, which no row may exceed alone."""
        found, rest = [], self
        while rest.unique > max_tokens:
            running = np.cumsum(rest.sizes) - np.cumsum([0, *rest.shared[1:]])
            head, rest = rest.cut(int(np.searchsorted(running, max_tokens, side="right")))
            found.append(head)
        return [*found, rest]


@dataclass(frozen=True)
class MicroBatch:
    rows: list[int]
    """Row numbers."""
    chunks: int = 1
    """In how many chunks of tokens it is to be computed (see :mod:`chunked`), the same on every rank."""


def plan_micro_batches(
    rows: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor,
    trees: Sequence[Hashable],
    max_tokens: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    chunked_cost: float | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most ``max_tokens`` unique tokens, trees whole as far as they fit.

    A tree that is too large is cut between neighbouring branches, which share the most; the result stays correct and
    only computes the shared part again. Or, with ``chunked_cost``, it is one micro-batch that is computed in chunks.
    Every rank of ``group`` gets the same number of micro-batches, and of chunks in each.

    Args:
        rows: token ids, as for :func:`trie.pack_rows`.
        trees: a key for each row that says which tree it belongs to.
        max_tokens: budget in unique tokens of one micro-batch, or of its chunks.
        group: ranks that must agree on the counts; None: this process alone.
        device: where a tensor for the agreement may live (the accelerator, for NCCL).
        chunked_cost: what computing a token in chunks costs, relative to computing it in one piece: a tree stays whole where
            that is cheaper than cutting it, and where one of its rows exceeds the budget. None: never.

    Raises:
        ValueError: a row alone exceeds the budget and ``chunked_cost`` is None, or a rank has fewer rows than another
            rank needs micro-batches. All ranks raise together.
    """
    tokens, offsets = _flatten(rows)
    sizes = np.diff(offsets)
    longest, count = int(sizes.max(initial=0)) if chunked_cost is None else 0, 0
    bins: list[list[_Unit]] = []
    if longest <= max_tokens:
        bins = _pack(_units(tokens, offsets, trees, max_tokens, chunked_cost), max_tokens)
        count = len(bins)
    longest, count, few = _agree([longest, count, -len(sizes)], group, device)
    if longest > max_tokens:
        raise ValueError(
            f"a row of {longest} tokens exceeds the budget of {max_tokens} tokens per micro-batch: raise "
            f"ppo_max_token_len_per_gpu, or set bpo.packed_tree.chunked=auto"
        )
    if count > -few:
        raise ValueError(f"one rank needs {count} micro-batches, another has only {-few} rows: balance rows over ranks")
    while len(bins) < count:
        _split_largest(bins)
    chunks = [1] * count
    if chunked_cost is not None:
        bins.sort(key=lambda units: -sum(u.unique for u in units))  # large ones meet large ones of other ranks
        wanted = [-(-sum(u.unique for u in units) // max_tokens) for units in bins]
        fewest = [-max(max(u.sizes) for u in units) for units in bins]  # a chunk needs a token at least
        agreed = _agree(wanted + fewest, group, device)
        chunks = [min(n, -least) for n, least in zip(agreed[:count], agreed[count:])]
    return [MicroBatch(sorted(r for unit in units for r in unit.rows), n) for units, n in zip(bins, chunks)]


def place_rows(
    rows: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor,
    trees: Sequence[Hashable],
    cells: int,
    slack: float = 1.25,
) -> list[list[int]]:
    """Row numbers of each cell, a mini-batch of one rank: trees whole as far as they fit, equal work everywhere.

    A cell takes at most ``slack`` times its equal share of the rows. A tree that finds no room is cut between neighbouring
    branches, and so is the largest cell's content where a cell would stay empty. To make the cells equally long, pad them
    to the longest.

    Args:
        rows: token ids, as for :func:`trie.pack_rows`.
        trees: a key for each row that says which tree it belongs to.
        cells: ranks times mini-batches.
    """
    tokens, offsets = _flatten(rows)
    share = max(1, len(trees) // cells)
    room = math.ceil(slack * len(trees) / cells)
    waiting = sorted(_units(tokens, offsets, trees, int(offsets[-1])), key=lambda u: -u.unique)
    placed: list[list[int]] = [[] for _ in range(cells)]
    work = [0] * cells
    while waiting:
        unit = waiting.pop(0)
        fitting = [c for c in range(cells) if len(placed[c]) + len(unit.rows) <= room]
        if fitting:
            cell = min(fitting, key=lambda c: (work[c], len(placed[c])))
        else:
            cell = min(range(cells), key=lambda c: len(placed[c]))
            unit, rest = unit.cut(min(share, room - len(placed[cell])))
            waiting.insert(0, rest)
        placed[cell] += unit.rows
        work[cell] += unit.unique
    for cell in placed:
        if not cell:
            largest = max(placed, key=len)
            half = math.ceil(len(largest) / 2)
            cell += largest[half:]
            del largest[half:]
    return placed


def _units(
    tokens: np.ndarray,
    offsets: np.ndarray,
    trees: Sequence[Hashable],
    max_tokens: int,
    chunked_cost: float | None = None,
) -> list[_Unit]:
    """Trees, cut where they exceed the budget and where that costs less than ``chunked_cost`` times the tree."""
    members: dict[Hashable, list[int]] = {}
    for row, tree in enumerate(trees):
        members.setdefault(tree, []).append(row)
    units = []
    for rows in members.values():
        parts = [tokens[offsets[r] : offsets[r + 1]] for r in rows]
        order, shared = sort_rows(np.concatenate(parts), np.concatenate([[0], np.cumsum([len(p) for p in parts])]))
        rest = _Unit([rows[i] for i in order], [len(parts[i]) for i in order], shared.tolist())
        cut = [rest] if chunked_cost is not None and max(rest.sizes) > max_tokens else rest.pieces(max_tokens)
        if chunked_cost is not None and sum(unit.unique for unit in cut) >= chunked_cost * rest.unique:
            cut = [rest]
        units += cut
    return units


def _pack(units: list[_Unit], max_tokens: int) -> list[list[_Unit]]:
    """Best fit, largest first."""
    bins: list[list[_Unit]] = []
    space: list[tuple[int, int]] = []  # (room left, bin), sorted
    for unit in sorted(units, key=lambda u: -u.unique):
        at = bisect.bisect_left(space, (unit.unique, -1))
        if unit.unique > max_tokens:  # in chunks, and nothing else beside it
            bins.append([unit])
            continue
        if at == len(space):
            bins.append([unit])
            room, index = max_tokens, len(bins) - 1
        else:
            room, index = space.pop(at)
            bins[index].append(unit)
        bisect.insort(space, (room - unit.unique, index))
    return bins


def _split_largest(bins: list[list[_Unit]]) -> None:
    """One micro-batch more: between trees if any holds several, else inside the largest tree."""
    several = [b for b in bins if len(b) > 1]
    pool = several or [b for b in bins if len(b[0].rows) > 1]
    largest = max(pool, key=lambda b: sum(u.unique for u in b))
    if several:
        halves: tuple[list[_Unit], list[_Unit]] = ([], [])
        for unit in sorted(largest, key=lambda u: -u.unique):
            min(halves, key=lambda h: sum(u.unique for u in h)).append(unit)
    else:
        head, tail = largest[0].cut(len(largest[0].rows) // 2)
        halves = ([head], [tail])
    bins.remove(largest)
    bins.extend(halves)


def _agree(values: list[int], group: dist.ProcessGroup | None, device: torch.device | str) -> list[int]:
    """Element-wise maximum over the group."""
    if group is None or not dist.is_initialized():
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()
