"""Picking the same thing many times, with a gradient that is exact whatever the precision."""

from __future__ import annotations

from typing import Any

import torch

_BLOCK = 8192
"""Gradients are turned to float32 so many entries at a time."""


def gather(source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """``source.index_select(dim, index)`` whose backward adds up in float32 at least.

    What a trunk's forks share they all send a gradient into: in half precision a sum of hundreds stops growing.
    """
    return _Gather.apply(source, dim, index)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.length = dim, source.shape[dim]
        return source.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index,) = ctx.saved_tensors
        exact, shape = torch.promote_types(grad.dtype, torch.float32), list(grad.shape)
        shape[ctx.dim] = ctx.length
        total = grad.new_zeros(shape, dtype=exact)
        for part, at in zip(grad.split(_BLOCK, ctx.dim), index.split(_BLOCK)):
            total.index_add_(ctx.dim, at, part.to(exact))
        return total.to(grad.dtype), None, None
