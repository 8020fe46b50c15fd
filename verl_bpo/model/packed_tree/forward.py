"""A model on a packed tree, and its log-probs and entropies on the rows that the tree was packed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl_bpo.model.packed_tree.attach import attach, model_inputs
from verl_bpo.model.packed_tree.likelihood import edge_outputs
from verl_bpo.model.packed_tree.trie import PackedTree


@dataclass
class RowOutputs:
    """Values on row tokens, rows one after another as in :attr:`PackedTree.row_index`."""

    log_probs: torch.Tensor
    """(T,) nats: at a token, the log-prob of the *next* token of its row; 0 at a row's last token, and where no logits were
    wanted."""
    entropy: torch.Tensor | None = None
    """(T,) nats: entropy of the distribution that the next token is drawn from, 0 where no logits were wanted. None if not
    asked for."""
    reads: tuple[torch.Tensor, ...] = ()
    """What :class:`chunked.HiddenReads` asked for."""


def packed_forward(
    model: nn.Module, tree: PackedTree, backend: str = "auto", wanted: torch.Tensor | None = None, **kwargs: Any
) -> Any:
    """The model's output on the unique tokens: ``logits`` (1, N, vocabulary), or only those of the tokens ``wanted`` (K,), and
    ``hidden_states`` if asked for.

    Gradient checkpointing, LoRA adapters and autocast work as for any other input. Other calls of the model are not
    affected.

    Raises:
        UnsupportedModel: this model can't compute packed trees; see :func:`attach.attach`.
    """
    attach(model)
    inputs = model_inputs(tree.to(next(model.parameters()).device), backend, wanted=wanted)
    return model(**inputs, use_cache=False, **kwargs)


def wanted_logits(tree: PackedTree, learned: torch.Tensor) -> torch.Tensor:
    """(K,) int64, ascending: the packed tokens that predict a learned token of some row. An agent's rows are mostly what the
    world says, whose tokens need no logits.

    Args:
        learned: (T,) bool, on row tokens; a row's first token has nothing that predicts it.
    """
    before = learned.roll(-1).index_fill(0, _row_ends(tree), False)
    return torch.unique(tree.row_index[before])  # sorted


def tree_outputs(
    logits: torch.Tensor,
    tree: PackedTree,
    temperature: float = 1.0,
    entropy: bool = False,
    wanted: torch.Tensor | None = None,
    block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Per unique token: its log-prob given its path, and the entropy of what follows it.

    A branch point predicts several tokens: its distribution is normalised once and read at each of them.

    Args:
        logits: (N, vocabulary), or (K, vocabulary) of the tokens ``wanted`` (K,).
        block: tokens whose logits are turned to float32 at a time; see :func:`likelihood.edge_outputs`.

    Returns:
        log_probs: (N,), 0 for tokens without a parent, or whose parent isn't wanted.
        entropy: (N,), 0 at tokens that aren't wanted, or None.
    """
    targets, sources = tree.edges(wanted)
    chosen, entropies = edge_outputs(logits, sources, tree.token_ids[targets], temperature, entropy, block)
    log_probs = chosen.new_zeros(tree.unique_tokens).index_put((targets,), chosen)
    if entropies is not None and wanted is not None:
        entropies = entropies.new_zeros(tree.unique_tokens).index_put((wanted,), entropies)
    return log_probs, entropies


def row_outputs(log_probs: torch.Tensor, entropy: torch.Tensor | None, tree: PackedTree) -> RowOutputs:
    """What :func:`tree_outputs` returns, on the rows."""
    own = tree.to_rows(log_probs)
    next_tokens = own.roll(-1).index_fill(0, _row_ends(tree), 0)
    return RowOutputs(next_tokens, None if entropy is None else tree.to_rows(entropy))


def _row_ends(tree: PackedTree) -> torch.Tensor:
    """Row tokens that are their row's last."""
    return tree.row_offsets[1:][tree.row_offsets.diff() > 0] - 1
