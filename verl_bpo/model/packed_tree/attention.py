"""Each packed token attends to the tokens on its own path, and to nothing else.

A node's queries meet the keys gathered along its path. With the causal triangle aligned to the lower right corner this
is plain variable-length attention, for trees of any depth, without a mask over the tree.

Attention modules call the function that their config names. :func:`attach` puts hooks on them which name ours while a
call carries a packed tree, and restore the config right after; calls without one don't notice. The hooks run again
when a checkpointed layer is recomputed, long after the model's own forward has returned.
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

from verl_bpo.model.packed_tree.chunks import Chunk, KeyValues
from verl_bpo.model.packed_tree.trie import PackedTree

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


class PackedTreeUnsupported(NotImplementedError):
    """The model, or what was asked of it, can't be computed on packed trees. The message says why and what to do."""


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


def attach(model: nn.Module) -> None:
    """Put the hooks on a model's attention modules; once per model, safe to repeat.

    Raises:
        PackedTreeUnsupported: not every layer is ordinary causal self-attention called through transformers'
            attention interface.
    """
    if getattr(model, "_packed_tree_attached", False):
        return
    config = getattr(model, "config", None)
    if config is None:
        raise PackedTreeUnsupported(f"{type(model).__name__} is no transformers model (it has no config)")
    check_layers(config)
    text = _text_config(config)
    modules = [m for m in model.modules() if hasattr(m, "num_key_value_groups") and hasattr(m, "config")]
    if len(modules) != text.num_hidden_layers:
        raise PackedTreeUnsupported(
            f"{text.model_type} has {text.num_hidden_layers} layers but {len(modules)} modules of causal "
            f"self-attention in transformers' form: turn packed trees off for this model"
        )
    for module in modules:
        module.register_forward_pre_hook(_enter, with_kwargs=True)
        module.register_forward_hook(_leave, with_kwargs=True, always_call=True)
    model._packed_tree_attached = True


def check_layers(config: Any, longest: int = 0) -> None:
    """Whether a transformers config names layers that can be computed on packed trees.

    Args:
        longest: tokens of the longest row that will be seen, where that is known.

    Raises:
        PackedTreeUnsupported: linear attention, state spaces, or a sliding window shorter than ``longest``.
    """
    text = _text_config(config)
    layers = getattr(text, "layer_types", None)
    others = set(layers or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise PackedTreeUnsupported(
            f"packed trees need plain attention layers, {text.model_type} has {', '.join(sorted(others))}: "
            f"turn packed trees off for this model"
        )
    window = getattr(text, "sliding_window", None)
    if window is not None and longest > window and (not layers or "sliding_attention" in layers):
        raise PackedTreeUnsupported(
            f"rows of up to {longest} tokens exceed {text.model_type}'s sliding window of {window}: shorten the rows or "
            f"turn packed trees off for this model"
        )


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if kwargs.get(NAME) is not None:
        module._packed_tree_restores = module.config._attn_implementation
        module.config._attn_implementation = NAME


def _leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    if kwargs.get(NAME) is not None and hasattr(module, "_packed_tree_restores"):
        module.config._attn_implementation = module._packed_tree_restores
        del module._packed_tree_restores


def path_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_tree: Call | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query (1, Hq, N, D), key and value (1, Hkv, N, D) -> (1, N, Hq, D).

    N are the tokens of a tree, or those of a chunk.
    """
    if packed_tree is None:
        raise PackedTreeUnsupported(f"{type(module).__name__} doesn't pass the packed tree on to its attention")
    tree = packed_tree.tree
    if sliding_window is not None and max(tree.path_lengths) > sliding_window:
        raise PackedTreeUnsupported(
            f"a path of {max(tree.path_lengths)} tokens exceeds the model's sliding window of {sliding_window}: "
            f"shorten the rows or turn packed trees off"
        )
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise PackedTreeUnsupported(f"{type(module).__name__} uses {name}, which packed trees don't support")
    if dropout:
        raise PackedTreeUnsupported(f"attention dropout {dropout} is not supported: set attention_dropout=0")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if packed_tree.memory is not None:
        key, value = packed_tree.memory.extend(module.layer_idx, key, value)
    backend = choose_backend(query.device, query.dtype, packed_tree.backend)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if backend == "flex":
        return _flex(query, key, value, tree, scale).transpose(1, 2), None
    # One gather for all nodes: its backward is one index_add, not a tree-sized buffer for each node.
    index = tree.path_index.flip(0) if backend == "sdpa" else tree.path_index
    paths = key.index_select(2, index), value.index_select(2, index)
    with _gather_again(index, (key, value), paths):
        if backend == "sdpa":
            return _sdpa(query, *paths, tree, scale).transpose(1, 2), None
        flat = [x[0].transpose(0, 1) for x in (query, *paths)]
        return VARLEN[backend](*flat, tree, scale)[None], None


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
    """``key`` and ``value``: gathered from the last node to the first, and along each path from its end to the root."""
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
            outputs.append(
                F.scaled_dot_product_attention(block, k_block, v_block, attn_mask=mask, scale=scale, enable_gqa=True)
            )
    return torch.cat(outputs, 2)


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
