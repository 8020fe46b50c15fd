"""Log-probs and entropies of logits, in blocks of tokens: whatever the vocabulary, no float32 copy of all logits is made."""

from __future__ import annotations

from typing import Any

import torch

_BLOCK = 2**24
"""Logits in a block, where the caller doesn't say how many tokens it holds: 64 MiB in float32."""


def edge_outputs(
    logits: torch.Tensor,
    sources: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of ``tokens`` (E,) after the tokens ``sources`` (E,) whose ``logits`` (N, vocabulary) predict them, and the
    entropies (N,) if asked for.

    Computed in float32 at least. The backward pass computes each block again, so that nothing but the logits and one number
    a token is kept.

    Args:
        block: tokens in a block. None: as many as 64 MiB hold.
    """
    found = _EdgeOutputs.apply(
        logits, sources, tokens, temperature, entropy, block or max(1, _BLOCK // logits.shape[-1])
    )
    return found if entropy else (found[0], None)


class _EdgeOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        sources: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        entropy: bool,
        block: int,
    ) -> tuple[torch.Tensor, ...]:
        exact = torch.promote_types(logits.dtype, torch.float32)
        normalizer = logits.new_empty(len(logits), dtype=exact)
        entropies = torch.empty_like(normalizer) if entropy else None
        for start in range(0, len(logits), block):
            at = slice(start, start + block)
            x = logits[at].to(exact) / temperature
            normalizer[at] = torch.logsumexp(x, -1)
            if entropy:
                entropies[at] = normalizer[at] - (torch.softmax(x, -1) * x).sum(-1)
        chosen = logits[sources, tokens].to(exact) / temperature - normalizer[sources]
        ctx.save_for_backward(logits, sources, tokens, normalizer, entropies)
        ctx.temperature, ctx.block = temperature, block
        return (chosen, entropies) if entropy else (chosen,)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_chosen: torch.Tensor, to_entropy: torch.Tensor | None = None) -> tuple:
        logits, sources, tokens, normalizer, entropies = ctx.saved_tensors
        order = sources.argsort()
        sources, tokens, to_chosen = sources[order], tokens[order], to_chosen[order]
        starts = torch.arange(0, len(logits) + ctx.block, ctx.block, device=sources.device)
        bounds = torch.searchsorted(sources, starts).tolist()
        to_normalizer = torch.zeros_like(normalizer).index_add_(0, sources, to_chosen)
        gradient = torch.empty_like(logits)
        for start, low, high in zip(range(0, len(logits), ctx.block), bounds, bounds[1:]):
            at = slice(start, start + ctx.block)
            log_p = logits[at].to(normalizer.dtype) / ctx.temperature - normalizer[at, None]
            weight = -to_normalizer[at, None]
            if to_entropy is not None:
                weight = weight - to_entropy[at, None] * (log_p + entropies[at, None])
            part = log_p.exp_().mul_(weight)
            edges = slice(low, high)
            part.index_put_((sources[edges] - start, tokens[edges]), to_chosen[edges], accumulate=True)
            gradient[at] = part.div_(ctx.temperature)
        return gradient, None, None, None, None, None
