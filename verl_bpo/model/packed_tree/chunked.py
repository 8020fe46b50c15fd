"""Chunked recomputation: packed trees whose memory follows a chunk of tokens instead of the whole tree.

The tree is computed chunk by chunk, each continuing from the keys and values of its path (:mod:`chunks`). The first pass
keeps those, and no graph. The backward pass takes the chunks last to first: each is computed again, and its graph lives
until its own backward, which receives what later chunks' attention sent back into its keys and values. Costs one more
forward, like gradient checkpointing, which is off meanwhile. Works with any loss on the returned values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl_bpo.model.packed_tree.attach import attach, model_inputs
from verl_bpo.model.packed_tree.chunks import Chunk, KeyValues, cut_tree
from verl_bpo.model.packed_tree.forward import RowOutputs, row_outputs
from verl_bpo.model.packed_tree.likelihood import edge_outputs
from verl_bpo.model.packed_tree.trie import PackedTree

Sync = Callable[[bool], AbstractContextManager]
ByLayer = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Something of keys and of values, (1, Hkv, tokens, D) each, by layer."""


@dataclass
class HiddenReads:
    """Something else that is read in the model's forward at some tokens, such as a value head, one number at each."""

    positions: tuple[torch.Tensor, ...]
    """Each (K,) int64: packed indices where a number is read, in any order."""
    begin: Callable[[tuple[torch.Tensor, ...], int], Any]
    """Called before the model computes logits of some tokens, with the positions among these and their count."""
    end: Callable[[], tuple[torch.Tensor, ...]]
    """Called after, returns what was read at each of the positions."""


def chunked_outputs(
    model: nn.Module,
    tree: PackedTree,
    temperature: float = 1.0,
    entropy: bool = False,
    chunks: int | None = None,
    backend: str = "auto",
    reads: HiddenReads | None = None,
    sync: Sync = lambda last: nullcontext(),
    wanted: torch.Tensor | None = None,
    block: int | None = None,
) -> RowOutputs:
    """Log-probs and entropy on the rows, as :func:`forward.row_outputs` gives them.

    ``backward()`` through them adds to the parameters' ``.grad`` (``torch.autograd.grad`` doesn't see the parameters).
    A sharded model works if all its ranks ask for the same number of chunks.

    Args:
        chunks: how many runs of tokens the tree is cut into. None: of 1024 tokens.
        reads: what else is to be read; arrives in ``RowOutputs.reads``.
        sync: ``sync(last)`` surrounds each chunk's backward, where gradients of ranks may have to wait for the last.
        wanted: (K,) int64, ascending: packed tokens whose logits are computed, those of ``reads`` among them. None: all.
        block: tokens whose logits are turned to float32 at a time; see :func:`likelihood.edge_outputs`.

    Raises:
        UnsupportedModel: the model can't compute packed trees.
    """
    attach(model)
    device = tree.token_ids.device if tree.token_ids.is_cuda else next(model.parameters()).device
    chunks = chunks or -(-tree.unique_tokens // 1024)
    walk = _Walk(model, tree.to(device), temperature, entropy, chunks, backend, reads, sync, wanted, block)
    anchor = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
    log_probs, entropies, *values = _Chunked.apply(anchor, walk)
    out = row_outputs(log_probs, entropies if entropy else None, walk.tree)
    out.reads = tuple(values)
    return out


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, walk: _Walk) -> tuple[torch.Tensor, ...]:
        ctx.walk = walk
        return walk.values(keep=anchor.requires_grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.walk.accumulate(grads)
        return grads[0].new_zeros(()), None


class _Walk:
    def __init__(
        self,
        model: nn.Module,
        tree: PackedTree,
        temperature: float,
        entropy: bool,
        chunks: int,
        backend: str,
        reads: HiddenReads | None,
        sync: Sync,
        wanted: torch.Tensor | None,
        block: int | None,
    ) -> None:
        self.model, self.tree, self.temperature, self.entropy = model, tree, temperature, entropy
        self.backend, self.reads, self.sync, self.block = backend, reads, sync, block
        self.chunks = cut_tree(tree, chunks, wanted)
        kind = tree.token_ids.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        self.memory: ByLayer = {}
        """Keys and values of the whole tree, filled by the first pass."""
        self.randomness: dict[int, list[torch.Tensor]] = {}
        """By chunk's start, the states of the random generators before its first pass: dropout, whether a module's or a
        function's, must draw the same masks in the second."""

    def values(self, keep: bool) -> tuple[torch.Tensor, ...]:
        """(N,) log-probs, (N,) entropies (zeros when not asked for) and what is read, without a graph."""
        found = []
        with _no_checkpointing(self.model):
            for chunk in self.chunks:
                if keep:
                    self.randomness[chunk.start] = _random_states(self.tree.token_ids.device)
                outputs, own = self._compute(chunk, self._past(chunk))
                self._remember(chunk, own)
                found.append(outputs)
        if not keep:
            self.memory = {}
        log_probs = found[0][0].new_zeros(self.tree.unique_tokens)
        log_probs[torch.cat([c.targets for c in self.chunks])] = torch.cat([f[0] for f in found])
        entropy = torch.zeros_like(log_probs)
        if self.entropy:
            entropy[torch.cat([c.wanted for c in self.chunks])] = torch.cat([f[1] for f in found])
        values = []
        for i, positions in enumerate(self.reads.positions if self.reads else ()):
            read = torch.cat([f[1 + self.entropy + i] for f in found])
            order = torch.cat([self._read_at(chunk, positions) for chunk in self.chunks])
            values.append(torch.empty_like(read).index_copy(0, order, read))
        return log_probs, entropy, *values

    @torch.enable_grad()
    def accumulate(self, grads: tuple[torch.Tensor, ...]) -> None:
        """Backward of :meth:`values` into the parameters' ``.grad``.

        Args:
            grads: of the outputs of :meth:`values`.
        """
        if not self.memory:
            raise RuntimeError("chunked packed trees can be backpropagated once: compute the outputs again")
        later: ByLayer = {}
        later_at = self.tree.token_ids.new_zeros(0)
        with ExitStack() as stack:
            stack.enter_context(_no_checkpointing(self.model))
            if self.autocast:
                stack.enter_context(torch.autocast(*self.autocast))
            for chunk in reversed(self.chunks):
                with _random_states_set(self.randomness[chunk.start], self.tree.token_ids.device):
                    later, later_at = self._backward(chunk, grads, later, later_at), chunk.past
        self.memory = {}

    def _backward(
        self, chunk: Chunk, grads: tuple[torch.Tensor, ...], later: ByLayer, later_at: torch.Tensor
    ) -> ByLayer:
        """Backward of one chunk; returns the gradients of its past's keys and values, later chunks' among them.

        Args:
            grads: of the outputs of :meth:`values`.
            later: gradients of keys and values at ``later_at``, the past of the chunk after this one; float32 at least,
                since as many chunks as there are may add to one.
        """
        past = self._past(chunk, leaves=True)
        outputs, own = self._compute(chunk, past)
        upstream = self._upstream(chunk, grads)
        # Both pasts begin with the ancestors they share; the rest of the later one lies in this chunk.
        outside = int((later_at < chunk.start).sum())
        mine = later_at[outside:] - chunk.start
        for layer, pair in later.items():
            for tensor, grad in zip(own[layer], pair):
                outputs.append(tensor)
                upstream.append(torch.zeros_like(tensor).index_copy_(2, mine, grad[:, :, outside:].to(tensor.dtype)))
        # Frozen layers below the first adapter have no graph to send a gradient into.
        used = [(o, g) for o, g in zip(outputs, upstream) if o.requires_grad]
        del own, outputs, upstream
        with self.sync(chunk is self.chunks[0]):
            torch.autograd.backward([o for o, _ in used], [g for _, g in used])
        earlier = {}
        for layer, pair in past.items():
            exact = torch.promote_types(pair[0].dtype, torch.float32)
            earlier[layer] = tuple((torch.zeros_like(x) if x.grad is None else x.grad).to(exact) for x in pair)
            for grad, old in zip(earlier[layer], later.get(layer, ())):
                grad[:, :, :outside] += old[:, :, :outside]
        return earlier

    def _past(self, chunk: Chunk, leaves: bool = False) -> ByLayer:
        if not len(chunk.past):
            return {}
        at = lambda x: x.index_select(2, chunk.past).requires_grad_(leaves)  # noqa: E731
        return {layer: (at(key), at(value)) for layer, (key, value) in self.memory.items()}

    def _compute(self, chunk: Chunk, past: ByLayer) -> tuple[list[torch.Tensor], ByLayer]:
        """Outputs of one chunk, and its keys and values by layer."""
        memory = KeyValues(past)
        if self.reads:
            inside = [torch.searchsorted(chunk.wanted, p[self._read_at(chunk, p)]) for p in self.reads.positions]
            self.reads.begin(tuple(inside), len(chunk.wanted))
        wanted = None if len(chunk.wanted) == len(chunk.token_ids) else chunk.wanted - chunk.start
        logits = self.model(**model_inputs(chunk, self.backend, memory, wanted), use_cache=False).logits[0]
        tokens = self.tree.token_ids[chunk.targets]
        log_probs, entropy = edge_outputs(logits, chunk.sources, tokens, self.temperature, self.entropy, self.block)
        outputs = [log_probs, entropy] if self.entropy else [log_probs]
        return outputs + list(self.reads.end() if self.reads else ()), memory.own

    def _upstream(self, chunk: Chunk, grads: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        log_probs, entropy, *values = grads
        found = [log_probs[chunk.targets]]
        if self.entropy:
            found.append(entropy[chunk.wanted])
        if self.reads:
            found += [g[self._read_at(chunk, p)] for g, p in zip(values, self.reads.positions)]
        return found

    def _remember(self, chunk: Chunk, own: ByLayer) -> None:
        for layer, pair in own.items():
            if layer not in self.memory:
                tokens = self.tree.unique_tokens
                self.memory[layer] = tuple(x.new_empty(1, x.shape[1], tokens, x.shape[3]) for x in pair)
            for whole, part in zip(self.memory[layer], pair):
                whole[:, :, chunk.start : chunk.stop] = part

    @staticmethod
    def _read_at(chunk: Chunk, positions: torch.Tensor) -> torch.Tensor:
        return ((positions >= chunk.start) & (positions < chunk.stop)).nonzero()[:, 0]


def _random_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def _random_states_set(states: list[torch.Tensor], device: torch.device) -> Iterator[None]:
    """What :func:`_random_states` found, and afterwards what was there before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], device)
        yield


@contextmanager
def _no_checkpointing(model: nn.Module) -> Iterator[None]:
    """A chunk is what gradient checkpointing would recompute; inside it a third forward would be wasted."""
    on = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in on:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in on:
            module.gradient_checkpointing = True
