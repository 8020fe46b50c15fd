"""Packed trees whose memory follows one path instead of the whole tree.

Nodes are visited depth first, each continuing from the keys and values of its path. The first visit keeps no graph. In
the backward pass every node is computed again; its graph is freed before its parent's backward, which receives what
its children's attention sent back into its keys and values. Costs one more forward, like gradient checkpointing, and
holds the activations of one root-to-leaf path. Works with any loss on the returned values.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from verl_bpo.model.packed_tree.attention import PackedTreeUnsupported, attach
from verl_bpo.model.packed_tree.forward import RowOutputs, row_outputs
from verl_bpo.model.packed_tree.trie import PackedTree

KeyValues = list[tuple[torch.Tensor, torch.Tensor]]


def frugal_outputs(model: nn.Module, tree: PackedTree, temperature: float = 1.0, entropy: bool = False) -> RowOutputs:
    """Log-probs and entropy on the rows, as :func:`forward.row_outputs` gives them.

    ``backward()`` through them adds to the parameters' ``.grad`` (``torch.autograd.grad`` doesn't see the parameters).
    For models that aren't sharded; the model's own attention function is used.

    Raises:
        PackedTreeUnsupported: gradient checkpointing or dropout is on, or the model can't compute packed trees.
    """
    attach(model)
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        raise PackedTreeUnsupported("frugal mode recomputes by itself: turn gradient checkpointing off")
    if any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in model.modules()):
        raise PackedTreeUnsupported(
            "frugal mode computes each node twice, which dropout would make differ: set it to 0"
        )
    device = next(model.parameters()).device
    walk = _Walk(model, tree.to(device), temperature, entropy)
    anchor = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
    log_probs, entropies = _Frugal.apply(anchor, walk)
    return row_outputs(log_probs, entropies if entropy else None, walk.tree)


class _Frugal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, walk: _Walk) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.walk = walk
        return walk.values()

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.walk.accumulate(grad_log_probs, grad_entropy)
        return grad_log_probs.new_zeros(()), None


@dataclass
class _Visit:
    node: int
    path: KeyValues
    """Keys and values of the whole path, per layer, with their graph."""
    leaves: KeyValues
    """The same, cut from the graph: where children start, and where their gradients gather."""
    log_probs: torch.Tensor
    targets: torch.Tensor
    """Packed indices that ``log_probs`` belong to."""
    entropy: torch.Tensor | None


class _Walk:
    def __init__(self, model: nn.Module, tree: PackedTree, temperature: float, entropy: bool):
        self.model, self.tree, self.temperature, self.entropy = model, tree, temperature, entropy
        self.bounds = tree.cu_nodes.tolist()
        self.children: list[list[int]] = [[] for _ in tree.node_lengths]
        for node, parent in enumerate(tree.node_parent):
            if parent >= 0:
                self.children[parent].append(node)
        kind = tree.token_ids.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) log-probs and (N,) entropies (zeros when not asked for), without a graph."""
        count = self.tree.unique_tokens
        found: list[_Visit] = []
        path: list[_Visit] = []
        for node in range(len(self.bounds) - 1):
            while path and path[-1].node != self.tree.node_parent[node]:
                path.pop()
            visit = self._visit(node, path[-1].leaves if path else None)
            path.append(visit)
            found.append(_Visit(node, [], [], visit.log_probs, visit.targets, visit.entropy))
        dtype = found[0].log_probs.dtype
        log_probs = torch.zeros(count, dtype=dtype, device=self.tree.token_ids.device)
        log_probs[torch.cat([v.targets for v in found])] = torch.cat([v.log_probs for v in found])
        entropy = torch.cat([v.entropy for v in found]) if self.entropy else torch.zeros_like(log_probs)
        return log_probs, entropy

    @torch.enable_grad()
    def accumulate(self, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> None:
        """Backward of :meth:`values` into the parameters' ``.grad``."""
        path: list[_Visit] = []
        with ExitStack() as stack:
            if self.autocast:
                stack.enter_context(torch.autocast(*self.autocast))
            for node in range(len(self.bounds) - 1):
                while path and path[-1].node != self.tree.node_parent[node]:
                    self._close(path.pop(), grad_log_probs, grad_entropy)
                path.append(self._visit(node, path[-1].leaves if path else None))
            while path:
                self._close(path.pop(), grad_log_probs, grad_entropy)

    def _visit(self, node: int, past: KeyValues | None) -> _Visit:
        start, end = self.bounds[node], self.bounds[node + 1]
        cache = DynamicCache(config=self.model.config)
        for layer, (key, value) in enumerate(past or ()):
            cache.update(key, value, layer)
        output = self.model(
            input_ids=self.tree.token_ids[None, start:end],
            position_ids=self.tree.position_ids[None, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        logits = output.logits[0]
        if self.temperature != 1.0:
            logits = logits / self.temperature
        normalizer = torch.logsumexp(logits, -1)
        firsts = [self.bounds[child] for child in self.children[node]]
        targets = torch.tensor([*range(start + 1, end), *firsts], dtype=torch.int64, device=logits.device)
        sources = self.tree.parent[targets] - start
        log_probs = logits[sources, self.tree.token_ids[targets]] - normalizer[sources]
        entropy = normalizer - (torch.softmax(logits, -1) * logits).sum(-1) if self.entropy else None
        path: KeyValues = []
        leaves: KeyValues = []
        if firsts:
            path = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
            wanted = torch.is_grad_enabled()
            leaves = [tuple(x.detach().requires_grad_(wanted) for x in pair) for pair in path]
        return _Visit(node, path, leaves, log_probs, targets, entropy)

    def _close(self, visit: _Visit, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> None:
        start, end = self.bounds[visit.node], self.bounds[visit.node + 1]
        outputs, grads = [visit.log_probs], [grad_log_probs[visit.targets]]
        if visit.entropy is not None:
            outputs.append(visit.entropy)
            grads.append(grad_entropy[start:end])
        for pair, cut in zip(visit.path, visit.leaves):
            for tensor, leaf in zip(pair, cut):
                # Frozen layers below the first adapter have no graph to send a gradient into.
                if leaf.grad is not None and tensor.requires_grad:
                    outputs.append(tensor)
                    grads.append(leaf.grad)
        used = [(o, g) for o, g in zip(outputs, grads) if o.requires_grad and o.numel()]
        if used:
            torch.autograd.backward([o for o, _ in used], [g for _, g in used])
