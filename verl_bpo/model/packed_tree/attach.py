"""A model's attention on packed trees, for the calls that carry one.

Attention modules call the function that their config names. :func:`attach` puts hooks on them which name ours while a
call carries a packed tree, and restore the config right after; calls without one don't notice. The hooks run again
when a checkpointed layer is recomputed, long after the model's own forward has returned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verl_bpo.model.packed_tree.attention import NAME, Call
from verl_bpo.model.packed_tree.chunks import Chunk, KeyValues
from verl_bpo.model.packed_tree.trie import PackedTree, pack_rows
from verl_bpo.model.support import PACKED, UnsupportedModel, attention_layers, check_config


def attach(model: nn.Module) -> None:
    """Put the hooks on a model's attention modules; once per model, safe to repeat. Works on the meta device too.

    Raises:
        UnsupportedModel: the model isn't computed right on packed trees, or its first layer can't run one.
    """
    if getattr(model, "_packed_tree_attached", False):
        return
    if getattr(model, "config", None) is None:
        raise UnsupportedModel(f"{type(model).__name__} is no transformers model (it has no config)")
    check_config(model.config, PACKED)
    modules = attention_layers(model, PACKED)
    hooks = []
    for module in modules:
        hooks.append(module.register_forward_pre_hook(_enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(_leave, with_kwargs=True, always_call=True))
    try:
        _try_first_layer(model, modules[0])
    except UnsupportedModel:
        for hook in hooks:
            hook.remove()
        raise
    model._packed_tree_attached = True


def model_inputs(
    tree: PackedTree | Chunk,
    backend: str = "auto",
    memory: KeyValues | None = None,
    wanted: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Keyword arguments that make an attached model compute ``tree``. Batch size 1, N tokens.

    Args:
        wanted: (K,) int64, ascending: tokens whose logits are computed. None: all.
    """
    inputs = {} if wanted is None else {"logits_to_keep": wanted}
    return inputs | {
        "input_ids": tree.token_ids[None],
        "position_ids": tree.position_ids[None],
        # A 4D mask is passed through to the layers as it is, so none is built. Ours ignores it; any other attention
        # function fails on its empty shape, rather than computing something wrong.
        "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=tree.token_ids.device),
        NAME: Call(tree, backend, memory),
    }


def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if kwargs.get(NAME) is not None:
        module._packed_tree_restores = module.config._attn_implementation
        module.config._attn_implementation = NAME


def _leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    if kwargs.get(NAME) is not None and hasattr(module, "_packed_tree_restores"):
        module.config._attn_implementation = module._packed_tree_restores
        del module._packed_tree_restores


class _Through(Exception):
    """The first attention module returned."""


@torch.no_grad()
def _try_first_layer(model: nn.Module, attention: nn.Module) -> None:
    """Three tokens up to the end of the first attention module: a model that hides the tree from its attention, or does
    more with the mask than handing it on, stops here and not in the first update."""
    devices = {x.device for x in (*model.parameters(), *model.buffers())}
    if len(devices) != 1:
        return  # a rank that waits for another one's weights: that one tries

    def stop(*args: Any) -> None:
        raise _Through

    handle = attention.register_forward_hook(stop)
    try:
        model(**model_inputs(pack_rows([[0, 1], [0, 2]]).to(*devices)), use_cache=False)
    except _Through:
        pass
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{PACKED.name}: {type(attention).__name__} does more than attend to the keys of a token's own path ({error}): "
            f"{PACKED.instead}"
        ) from error
    finally:
        handle.remove()
