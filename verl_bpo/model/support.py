"""Whether a causal language model is one that packed trees, the generator and the value readout compute right.

Asked twice: of a model's config before anything starts, and of the model where it is loaded. What isn't computed right is
refused by name, with what to do. ``benchmarks/model_families.py`` goes over all families that transformers can build.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn


class UnsupportedModel(ValueError):
    """Something of ours would compute this model wrongly, or not at all. The message says why and what to do."""


@dataclass(frozen=True)
class Use:
    """What a model is wanted for."""

    name: str
    instead: str
    """What to do where it can't be had."""


PACKED = Use("packed trees", "set bpo.packed_tree.enable=False, or use another model")
GENERATOR = Use(
    "the generator of rollout.name=hf",
    "use actor_rollout_ref.rollout.name=vllm on a machine that has it, or another model",
)
READOUT = Use("the value readout of SAPO", "use a decoder-only language model")

STATIC_ROPE = ("default", "linear", "yarn", "llama3", "proportional", "mrope")
"""Rotary embeddings whose frequencies depend on nothing but the config."""
LAYER_KINDS = ("layer_types", "layers_block_type", "block_types", "attention_layers", "attn_layers")
"""Keys under which configs list what their layers are."""
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
ODD_KEYWORDS = ("softcap", "s_aux", "position_bias")
"""Keywords of transformers' attention interface with which attention is no plain softmax of scaled dot products."""


def check_config(config: Any, use: Use, longest: int | None = None) -> None:
    """Whether a transformers config describes a model that can be had for ``use``.

    Args:
        longest: tokens of the longest sequence that will be seen, where that is known.

    Raises:
        UnsupportedModel: it can't.
    """
    text = text_config(config)
    reason = _encoder(config, text)
    if use is not READOUT:
        reason = reason or _layers(text) or _rope_type(text) or _attention(text, use)
        if reason is None and longest is not None:
            check_length(text, longest, use)
    if reason:
        raise UnsupportedModel(f"{use.name}: {reason}: {use.instead}")


def check_length(config: Any, tokens: int, use: Use) -> None:
    """Whether a sequence of so many tokens is computed right.

    Raises:
        UnsupportedModel: it is longer than the model's sliding window, or than what its rotary embedding was made for where
            that changes with the length of a call: the tokens of others in the call would change a sequence's own.
    """
    text = text_config(config)
    most, what = min(_limits(text), default=(tokens, ""))
    if tokens > most:
        raise UnsupportedModel(
            f"{use.name}: rows of up to {tokens} tokens exceed {text.model_type}'s {what}: shorten the rows, or {use.instead}"
        )


def longest_sequence(config: Any) -> int | None:
    """Tokens up to which :func:`check_length` has nothing to say; None: any."""
    return min((most for most, _ in _limits(text_config(config))), default=None)


def text_config(config: Any) -> Any:
    """The language model's part of a config."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_layers(model: nn.Module, use: Use) -> list[nn.Module]:
    """The attention module of every layer, in order.

    Raises:
        UnsupportedModel: not every layer is causal self-attention called through transformers' attention interface.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{use.name}: {type(model).__name__} counts positions by itself, from the start of a call: {use.instead}"
        )
    text = text_config(model.config)
    found = [m for m in model.modules() if _through_the_interface(type(m)) and getattr(m, "is_causal", True)]
    layers = getattr(text, "num_hidden_layers", None)
    if len(found) != layers or len({getattr(m, "layer_idx", None) for m in found}) != layers:
        raise UnsupportedModel(
            f"{use.name}: {text.model_type} has {layers} layers but {len(found)} modules of causal self-attention in "
            f"transformers' form: {use.instead}"
        )
    for module in found:
        sinks = [name for name in ("sinks", "s_aux") if getattr(module, name, None) is not None]
        if sinks:
            raise UnsupportedModel(
                f"{use.name}: {type(module).__name__} has attention sinks ({sinks[0]}), which aren't computed: {use.instead}"
            )
    return found


def _through_the_interface(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def refuse_odd_attention(module: nn.Module, keywords: dict[str, Any]) -> None:
    """For an attention function that is plain softmax of scaled dot products: refuse calls that ask for more.

    Raises:
        UnsupportedModel: one of :data:`ODD_KEYWORDS` is there.
    """
    for name in ODD_KEYWORDS:
        if keywords.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} uses {name}, which isn't computed: use another model")


# --- reasons --------------------------------------------------------------------------------------------------------


def _encoder(config: Any, text: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return f"{config.model_type} is an encoder and a decoder"
    if hasattr(text, "is_decoder") and hasattr(text, "type_vocab_size") and not text.is_decoder:
        return f"{text.model_type} sees the tokens after a token too (is_decoder=False)"
    return None


def _layers(text: Any) -> str | None:
    kinds = {str(kind) for key in LAYER_KINDS for kind in getattr(text, key, None) or ()}
    others = kinds - {"full_attention", "sliding_attention"}
    if others:
        return f"only plain attention layers are computed, {text.model_type} has {', '.join(sorted(others))}"
    return None


def _limits(text: Any) -> list[tuple[int, str]]:
    """Most tokens of a sequence, and what sets them."""
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    found = [(window, f"sliding window of {window}")] if window and (not kinds or "sliding_attention" in kinds) else []
    for rope in _rope(text):
        if _rope_kind(rope) not in STATIC_ROPE:
            lengths = [x.get("original_max_position_embeddings") for x in (rope, vars(text))]
            most = min(n for n in (*lengths, text.max_position_embeddings) if n)
            found.append((most, f"{most} tokens of unscaled positions (rope_type={_rope_kind(rope)})"))
    return found


def _rope(text: Any) -> list[dict]:
    """Parameters of rotary embeddings: one for all layers, or one for each of their kinds."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def _rope_kind(rope: dict) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _rope_type(text: Any) -> str | None:
    for rope in _rope(text):
        if _rope_kind(rope) not in (*STATIC_ROPE, "dynamic", "longrope"):
            return f"{text.model_type}'s rotary embedding of rope_type={_rope_kind(rope)} isn't known"
    return None


def _attention(text: Any, use: Use) -> str | None:
    name = text.model_type
    if getattr(text, "attn_logit_softcapping", None):
        return f"{name} caps its attention's logits (attn_logit_softcapping), which isn't computed"
    if getattr(text, "output_router_logits", False):
        return f"{name} has output_router_logits=True, and its router's loss isn't computed (set it to False)"
    if use is GENERATOR and getattr(text, "num_kv_shared_layers", 0):
        return f"layers of {name} use the keys and values of others (num_kv_shared_layers={text.num_kv_shared_layers})"
    if use is PACKED:
        for key in ATTENTION_DROPOUT:
            if getattr(text, key, 0):
                return f"{name} has {key}={getattr(text, key)}, which isn't computed (set it to 0)"
        for key in ("layerdrop", "decoder_layerdrop"):
            if getattr(text, key, 0):
                return f"{name} skips layers at random ({key}={getattr(text, key)}; set it to 0)"
    return None
