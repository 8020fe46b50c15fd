"""Each packed token attends to the tokens on its own path, and to nothing else.

A node's queries meet the keys gathered along its path. With the causal triangle aligned to the lower right corner this
is plain variable-length attention, for trees of any depth, without a mask over the tree. :mod:`attach` brings it into a
model.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_bpo.model.gather import gather
from verl_bpo.model.packed_tree.chunks import Chunk, KeyValues
from verl_bpo.model.packed_tree.trie import PackedTree
from verl_bpo.model.support import PACKED, UnsupportedModel, check_length, refuse_odd_attention

logger = logging.getLogger(__name__)

NAME = "packed_tree"
"""Our key in transformers' ``ALL_ATTENTION_FUNCTIONS``, and the keyword that carries a :class:`Call` to it."""
BACKENDS = ("sdpa", "flash_attn", "torch_varlen", "flex")
_QUERY_BLOCK = 512
"""``sdpa`` cuts long nodes into blocks of this many queries: a block doesn't touch the keys after its end."""


class Call:
    """What one forward of a model tells its attention. No dataclass: FSDP copies those on their way into every layer."""

    def __init__(self, tree: PackedTree | Chunk, backend: str = "auto", memory: KeyValues | None = None) -> None:
        """
        Args:
            tree: what is computed.
            backend: as for :func:`choose_backend`.
            memory: for a chunk, where keys and values of its past are, and where its own go.
        """
        self.tree, self.backend, self.memory = tree, backend, memory


class PackedTreeUnsupported(UnsupportedModel, NotImplementedError):
    """What was asked of a model can't be computed on packed trees. The message says why and what to do."""


def choose_backend(device: torch.device, dtype: torch.dtype, requested: str = "auto") -> str:
    """Name of the attention backend for tensors of this kind.

    ``auto``: FlashAttention on a GPU in half precision (``flash_attn``, else ``torch_varlen`` that comes with torch),
    ``sdpa`` everywhere else. ``flex`` is never chosen by itself.

    Raises:
        PackedTreeUnsupported: the requested backend can't run here.
        ValueError: an unknown name.
    """
    if requested not in ("auto", *BACKENDS):
        raise ValueError(f"packed-tree backend {requested!r} is not one of auto, {', '.join(BACKENDS)}")
    gpu = device.type == "cuda"
    half = dtype in (torch.float16, torch.bfloat16)
    missing = {
        "flash_attn": "" if _has_flash_attn() else "the package flash-attn is not installed",
        "torch_varlen": "" if _has_torch_varlen() else "torch.nn.attention.varlen is missing or too old",
    }
    if requested in missing:
        why = missing[requested] or ("" if gpu else f"it needs a GPU, not {device.type}")
        why = why or ("" if half else f"it needs float16 or bfloat16, not {dtype}")
        if why:
            raise PackedTreeUnsupported(f"packed-tree backend {requested}: {why}; use auto or sdpa")
    if requested == "flex" and not gpu and torch.is_grad_enabled():
        raise PackedTreeUnsupported("packed-tree backend flex has no backward on a CPU; use auto or sdpa")
    if requested != "auto":
        chosen = requested
    elif gpu and half:
        chosen = next((name for name, why in missing.items() if not why), "sdpa")
    else:
        chosen = "sdpa"
    _log_choice(chosen, requested, device.type, dtype)
    return chosen


@lru_cache
def _log_choice(chosen: str, requested: str, device: str, dtype: torch.dtype) -> None:
    logger.info("packed-tree attention: %s (requested %s; %s, %s)", chosen, requested, device, dtype)
    if chosen == "sdpa" and device == "cuda" and dtype in (torch.float16, torch.bfloat16):
        logger.warning("packed-tree attention falls back to one call a node: install flash-attn, or a newer torch")


@lru_cache
def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


@lru_cache
def _has_torch_varlen() -> bool:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    # Before these arguments it could neither scale scores nor share keys among grouped queries.
    return {"window_size", "scale", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def path_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_tree: Call | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query (1, Hq, N, D), key and value (1, Hkv, N, D) -> (1, N, Hq, D).

    N are the tokens of a tree, or those of a chunk.
    """
    if packed_tree is None:
        raise PackedTreeUnsupported(f"{type(module).__name__} doesn't pass the packed tree on to its attention")
    tree = packed_tree.tree
    check_length(module.config, max(tree.path_lengths), PACKED)
    refuse_odd_attention(module, kwargs)
    if dropout:
        raise PackedTreeUnsupported(f"attention dropout {dropout} is not supported: set attention_dropout=0")
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if packed_tree.memory is not None:
        key, value = packed_tree.memory.extend(module.layer_idx, key, value)
    backend = choose_backend(query.device, query.dtype, packed_tree.backend)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if backend == "flex":
        return _flex(query, key, value, tree, scale).transpose(1, 2).contiguous(), None
    # One gather for all nodes: its backward is one index_add, not a tree-sized buffer for each node.
    index = tree.path_index.flip(0) if backend == "sdpa" else tree.path_index
    width = value.shape[3]
    if backend != "sdpa":
        value = F.pad(value, (0, key.shape[3] - width))  # latent attention: these kernels know one width
    paths = gather(key, 2, index), gather(value, 2, index)
    with _gather_again(index, (key, value), paths):
        if backend == "sdpa":
            return _sdpa(query, *paths, tree, scale), None
        flat = [x[0].transpose(0, 1) for x in (query, *paths)]
        return VARLEN[backend](*flat, tree, scale)[None, ..., :width].contiguous(), None


@contextmanager
def _gather_again(index: torch.Tensor, sources: tuple, gathered: tuple) -> Iterator[None]:
    """What attention keeps of ``gathered`` for its backward is dropped and gathered from ``sources`` once more there.

    Keys along all paths are several times the keys of the tree; kept, they would be what a tree costs more memory than its
    share of the rows. ``gathered[i]`` is ``sources[i].index_select(2, index)``; views of it may be cut along dimension 2
    and may have their first dimension taken off and the next two swapped, as variable-length kernels want it.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if not torch.is_grad_enabled() or top is None or top(True) is not None:
        # Hooks replace outer ones: gradient checkpointing, which keeps nothing of a layer anyway, must stay in charge.
        yield
        return
    of = {new.untyped_storage().data_ptr(): old.detach() for old, new in zip(sources, gathered)}

    def pack(tensor: torch.Tensor) -> Any:
        source = of.get(tensor.untyped_storage().data_ptr())
        if source is None:
            return tensor
        (_, heads, _, width), length = source.shape, len(index)
        start = tensor.storage_offset() // width
        layout = tuple(tensor.stride())
        if tensor.dim() == 4 and layout[1:] == (length * width, width, 1):
            if (*tensor.shape[:2], tensor.shape[3]) == (1, heads, width):
                return source, start, tensor.shape[2], False
        elif tensor.dim() == 3 and layout == (width, length * width, 1) and tensor.shape[1:] == (heads, width):
            return source, start, tensor.shape[0], True
        return tensor  # some other view of it, as torch's plain attention makes

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        source, start, length, flat = packed
        again = source.index_select(2, index[start : start + length])
        return again[0].transpose(0, 1) if flat else again

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: PackedTree | Chunk, scale: float
) -> torch.Tensor:
    """(1, N, Hq, D). ``key`` and ``value``: gathered from the last node to the first, and along each path from its end to
    the root."""
    nodes = zip(
        query.split(tree.node_lengths, 2),
        reversed(key.split(tree.path_lengths[::-1], 2)),
        reversed(value.split(tree.path_lengths[::-1], 2)),
    )
    outputs = []
    for q, k, v in nodes:
        later = q.shape[2]  # keys of the node that stand after the block, and so before it in reverse
        for block in q.split(_QUERY_BLOCK, 2):
            later -= block.shape[2]
            k_block, v_block = k[:, :, later:], v[:, :, later:]
            mask = _reverse_causal(block.shape[2], k_block.shape[2], query.device, query.dtype)
            out = F.scaled_dot_product_attention(block, k_block, v_block, attn_mask=mask, scale=scale, enable_gqa=True)
            outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, 1)  # contiguous: some models view it


def _reverse_causal(queries: int, keys: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """(queries, keys): the last ``queries`` tokens of a path see themselves and all before; keys from the last to the first.

    In this order query i sees key j if ``i + j >= queries - 1``: each line is the one above moved by one, so that one line
    in memory serves as all of them. Forwards, the mask would be as large as it looks, and SDPA keeps it for the backward.
    A float mask, since a boolean one is turned into a float copy.
    """
    line = torch.zeros(queries + keys - 1, device=device, dtype=dtype)
    line[: queries - 1] = float("-inf")
    return line.as_strided((queries, keys), (1, 1))


def _flash_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: PackedTree | Chunk, scale: float
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    lengths = (max(tree.node_lengths), max(tree.path_lengths))
    return flash_attn_varlen_func(q, k, v, tree.cu_nodes, tree.cu_paths, *lengths, softmax_scale=scale, causal=True)


def _torch_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: PackedTree | Chunk, scale: float
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    lengths = (max(tree.node_lengths), max(tree.path_lengths))
    return varlen_attn(
        q, k, v, tree.cu_nodes, tree.cu_paths, *lengths, scale=scale, window_size=(-1, 0), enable_gqa=True
    )


VARLEN: dict[str, Callable[..., torch.Tensor]] = {"flash_attn": _flash_attn, "torch_varlen": _torch_varlen}
"""Kernels for q (N, Hq, D), k and v (P, Hkv, D) -> (N, Hq, D). Both align the causal triangle to the lower right."""


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: PackedTree | Chunk, scale: float
) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    kernel = _compiled(flex_attention) if query.is_cuda else flex_attention
    return kernel(query, key, value, block_mask=_block_mask(tree), scale=scale, enable_gqa=True)


@lru_cache(maxsize=4)
def _block_mask(tree: PackedTree | Chunk) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    end, count = tree.subtree_end, len(tree.token_ids)
    past = len(end) - count

    def on_path(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (k <= past + q) & (q < end[k])

    # Compiled, so that the dense N x N mask is never held.
    build = _compiled(create_block_mask) if end.is_cuda else create_block_mask
    return build(on_path, None, None, count, past + count, device=end.device)


@lru_cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)


ALL_ATTENTION_FUNCTIONS.register(NAME, path_attention)
