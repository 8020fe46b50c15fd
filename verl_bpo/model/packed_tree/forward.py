"""A model on a packed tree, and its log-probs and entropies on the rows that the tree was packed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl_bpo.model.packed_tree.attention import NAME, Call, attach
from verl_bpo.model.packed_tree.chunks import Chunk, KeyValues
from verl_bpo.model.packed_tree.trie import PackedTree


@dataclass
class RowOutputs:
    """Values on row tokens, rows one after another as in :attr:`PackedTree.row_index`."""

    log_probs: torch.Tensor
    """(T,) nats: at a token, the log-prob of the *next* token of its row; 0 at a row's last token."""
    entropy: torch.Tensor | None = None
    """(T,) nats: entropy of the distribution that the next token is drawn from. None if not asked for."""
    reads: tuple[torch.Tensor, ...] = ()
    """What :class:`frugal.HiddenReads` asked for."""


def model_inputs(tree: PackedTree | Chunk, backend: str = "auto", memory: KeyValues | None = None) -> dict[str, Any]:
    """Keyword arguments that make an attached model compute ``tree``. Batch size 1, N tokens."""
    return {
        "input_ids": tree.token_ids[None],
        "position_ids": tree.position_ids[None],
        # A 4D mask is passed through to the layers as it is, so none is built. Ours ignores it; any other attention
        # function fails on its empty shape, rather than computing something wrong.
        "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=tree.token_ids.device),
        NAME: Call(tree, backend, memory),
    }


def packed_forward(model: nn.Module, tree: PackedTree, backend: str = "auto", **kwargs: Any) -> Any:
    """The model's output on the unique tokens: ``logits`` (1, N, vocabulary), ``hidden_states`` if asked for.

    Gradient checkpointing, LoRA adapters and autocast work as for any other input. Other calls of the model are not
    affected.

    Raises:
        PackedTreeUnsupported: this model can't compute packed trees; see :func:`attention.attach`.
    """
    attach(model)
    return model(**model_inputs(tree.to(next(model.parameters()).device), backend), use_cache=False, **kwargs)


def tree_outputs(
    logits: torch.Tensor, tree: PackedTree, temperature: float = 1.0, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Per unique token: its log-prob given its path, and the entropy of what follows it.

    A branch point predicts several tokens: its distribution is normalised once and read at each of them.

    Args:
        logits: (N, vocabulary)

    Returns:
        log_probs: (N,), 0 for tokens without a parent.
        entropy: (N,) or None.
    """
    edges = (tree.parent >= 0).nonzero()[:, 0]
    chosen, entropies = edge_outputs(logits, tree.parent[edges], tree.token_ids[edges], temperature, entropy)
    return chosen.new_zeros(tree.unique_tokens).index_put((edges,), chosen), entropies


def edge_outputs(
    logits: torch.Tensor, sources: torch.Tensor, tokens: torch.Tensor, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of ``tokens`` (E,) after the tokens ``sources`` (E,) whose ``logits`` (N, vocabulary) predict them, and the
    entropies (N,) if asked for."""
    if temperature != 1.0:
        logits = logits / temperature
    # Backward runs in reverse: chosen before normalised, so that no second gradient of the logits is there at the peak.
    chosen = logits[sources, tokens]
    normalizer = torch.logsumexp(logits, -1)
    chosen = chosen - normalizer[sources]
    if not entropy:
        return chosen, None
    return chosen, normalizer - (torch.softmax(logits, -1) * logits).sum(-1)


def row_outputs(log_probs: torch.Tensor, entropy: torch.Tensor | None, tree: PackedTree) -> RowOutputs:
    """What :func:`tree_outputs` returns, on the rows."""
    own = tree.to_rows(log_probs)
    ends = tree.row_offsets[1:][tree.row_offsets.diff() > 0] - 1
    last = torch.zeros_like(own, dtype=torch.bool).index_fill(0, ends, True)
    return RowOutputs(own.roll(-1).masked_fill(last, 0), None if entropy is None else tree.to_rows(entropy))
