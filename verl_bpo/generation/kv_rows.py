"""Keys and values of the sequences that are being generated, one row each, and of prefixes seen before.

Works with any causal language model that uses transformers' attention interface (Qwen2, Qwen3, Llama and others): the
tokens of all sequences run packed in one row of ``(1, tokens)`` without any padding, and :func:`row_attention`, which
takes the place of the model's attention, gives each token the keys of its own sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from verl_bpo.model.support import (
    GENERATOR,
    UnsupportedModel,
    attention_layers,
    check_config,
    refuse_odd_attention,
)

ROW_ATTENTION = "verl_bpo_rows"
_PROBE = [3, 1, 2]
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass
class Prefill:
    """A prompt's uncached tokens: ``start:stop`` of the packed tokens; with them row ``row`` has ``length`` tokens."""

    row: int
    start: int
    stop: int
    length: int
    mask: torch.Tensor | None
    """Additive ``(stop - start, length)``; None when nothing was cached, which is plainly causal."""


@dataclass
class PackedStep:
    """Where the packed tokens of one forward pass belong: first one token for each of rows ``0..decoding - 1``, then
    prompts."""

    rows: torch.Tensor
    positions: torch.Tensor
    decoding: int
    longest: int
    """Most tokens in a decoding row, the new one included."""
    mask: torch.Tensor | None
    """Additive ``(decoding, 1, 1, longest)``."""
    prefills: list[Prefill]


class KVRows(Cache):
    """``kv``: ``(layers, 2, rows, tokens, heads, width)``, grown by doubling; rows in use are the first ones."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find out the model's cache layout, and that it computes packed tokens as it does plain ones.

        Raises:
            UnsupportedModel: the model's layers do not all cache keys and values of the same shapes, or its attention does
                not go through transformers' attention interface as it should.
        """
        super().__init__(layers=[])
        check_config(model.config, GENERATOR)
        attention_layers(model, GENERATOR)
        probe = DynamicCache(config=model.config)
        with torch.no_grad():
            plain = model(input_ids=torch.tensor([_PROBE]), past_key_values=probe, use_cache=True).logits[0, -1]
        known = all(isinstance(layer, DynamicLayer) and layer.keys is not None for layer in probe.layers)
        shapes = {(layer.keys.shape, layer.values.shape) for layer in probe.layers} if known else set()
        if len(shapes) != 1:
            raise self._unsupported(model, "does not cache keys and values of the same shapes in all its layers")
        model.set_attn_implementation(ROW_ATTENTION)
        if model.config._attn_implementation != ROW_ATTENTION:
            raise self._unsupported(model, "does not use transformers' attention interface")
        (_, heads, _, key_width), (_, _, _, self.value_width) = shapes.pop()
        # One width for both: values of latent attention are narrower than their keys.
        width = max(key_width, self.value_width)
        self.key_width = key_width
        self.kv = torch.zeros((len(probe.layers), 2, 0, 0, heads, width), dtype=model.dtype)
        self.step: PackedStep | None = None
        self._check(model, plain)

    @torch.inference_mode()
    def _check(self, model: PreTrainedModel, plain: torch.Tensor) -> None:
        """Two prompts and one decode step, packed, against the plain forward pass of one of them."""
        self.reserve(2, len(_PROBE), used=0)
        try:
            self.forward(model, _PROBE[:1] + _PROBE[:-1], self.plan([], [(0, 1), (0, len(_PROBE) - 1)]))
            packed = self.forward(model, _PROBE[1:2] + _PROBE[-1:], self.plan([1, len(_PROBE) - 1], []))[1]
        except Exception as error:
            raise self._unsupported(model, f"cannot run packed sequences ({error})") from error
        self.release()
        difference = (packed - plain).abs().max().item()
        if not difference <= _TOLERANCE.get(model.dtype, 0.1) * max(1.0, plain.abs().max().item()):
            raise self._unsupported(
                model,
                f"computes other logits for packed sequences (off by {difference:.2g}): its attention does more than scaled "
                "dot products with positions from position_ids",
            )

    @staticmethod
    def _unsupported(model: PreTrainedModel, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{GENERATOR.name}: {type(model).__name__} {what}: {GENERATOR.instead}")

    def reserve(self, rows: int, tokens: int, used: int) -> None:
        """Make room for ``rows`` rows of ``tokens`` tokens; keep the first ``used`` rows' content."""
        layers, two, old_rows, old_tokens, heads, dim = self.kv.shape
        if rows <= old_rows and tokens <= old_tokens:
            return
        new_rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows)
        new_tokens = old_tokens if tokens <= old_tokens else max(tokens, 2 * old_tokens, 256)
        # Zeros, not empty: a masked key has weight 0, and 0 times a NaN found in fresh memory is NaN.
        grown = torch.zeros((layers, two, new_rows, new_tokens, heads, dim), dtype=self.kv.dtype)
        grown[:, :, :used, :old_tokens] = self.kv[:, :, :used]
        self.kv = grown

    def move(self, source: int, target: int, tokens: int) -> None:
        self.kv[:, :, target, :tokens] = self.kv[:, :, source, :tokens]

    def release(self) -> None:
        """Give the memory back. Only while no row is in use."""
        self.kv = self.kv.new_zeros((*self.kv.shape[:2], 0, 0, *self.kv.shape[4:]))

    def plan(self, lengths: list[int], prompts: list[tuple[int, int]]) -> PackedStep:
        """Lay out one forward pass.

        Args:
            lengths: cached tokens of each decoding row, which are rows ``0..len(lengths) - 1``.
            prompts: of each following row, its cached tokens and its tokens altogether.
        """
        decoding = len(lengths)
        rows, positions = [np.arange(decoding)], [np.asarray(lengths, dtype=np.int64)]
        prefills, start = [], decoding
        for row, (cached, length) in enumerate(prompts, start=decoding):
            count = length - cached
            rows.append(np.full(count, row))
            positions.append(np.arange(cached, length))
            mask = None
            if cached:
                mask = torch.full((count, length), float("-inf"), dtype=self.kv.dtype).triu(cached + 1)
            prefills.append(Prefill(row, start, start + count, length, mask))
            start += count
        longest, mask = 0, None
        if decoding:
            longest = max(lengths) + 1
            hidden = torch.arange(longest) > torch.tensor(lengths)[:, None]
            mask = torch.zeros((decoding, longest), dtype=self.kv.dtype).masked_fill_(hidden, float("-inf"))
            mask = mask[:, None, None]
        return PackedStep(
            torch.from_numpy(np.concatenate(rows)),
            torch.from_numpy(np.concatenate(positions)),
            decoding,
            longest,
            mask,
            prefills,
        )

    def forward(self, model: PreTrainedModel, token_ids: list[int], step: PackedStep) -> torch.Tensor:
        """Run the packed tokens; returns the logits after the last token of each row, ``(rows, vocabulary)``."""
        self.step = step
        last = list(range(step.decoding)) + [p.stop - 1 for p in step.prefills]
        out = model(
            input_ids=torch.tensor(token_ids)[None],
            position_ids=step.positions[None],
            attention_mask=_NO_MASK,
            past_key_values=self,
            use_cache=True,
            logits_to_keep=torch.tensor(last),
            packed_step=step,
        )
        return out.logits[0]

    # --- what transformers calls -----------------------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Store the packed tokens' ``(1, heads, tokens, head dim)``; returns all rows of the layer."""
        keys, values = self.kv[layer_idx]
        keys, values = keys[..., : self.key_width], values[..., : self.value_width]
        keys[self.step.rows, self.step.positions] = key_states[0].transpose(0, 1)
        values[self.step.rows, self.step.positions] = value_states[0].transpose(0, 1)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed_step: PackedStep | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of packed tokens over :class:`KVRows`; plain scaled dot product attention for any other call.

    transformers' own function repeats keys and values for grouped queries whenever there is a mask, which copies the
    whole cache in every layer and step; here the queries that share a key head are folded together instead.

    Args:
        query: ``(1, query heads, tokens, head dim)``.
        key, value: all rows of the layer, ``(rows, tokens, heads, width of a key or a value)``.

    Returns:
        ``(1, tokens, query heads, width of a value)`` and None.

    Raises:
        UnsupportedModel: the layer asks for more than a softmax of scaled dot products.
    """
    if packed_step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    refuse_odd_attention(module, kwargs)
    parts = []
    if count := packed_step.decoding:
        heads, kv_heads, dim = query.shape[1], key.shape[2], query.shape[3]
        out = scaled_dot_product_attention(
            query[0, :, :count].transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, dim),
            key[:count, : packed_step.longest].transpose(1, 2),
            value[:count, : packed_step.longest].transpose(1, 2),
            attn_mask=packed_step.mask.expand(-1, -1, heads // kv_heads, -1),
            scale=scaling,
        )
        parts.append(out.reshape(1, count, heads, value.shape[3]))
    for p in packed_step.prefills:
        out = scaled_dot_product_attention(
            query[:, :, p.start : p.stop],
            key[p.row : p.row + 1, : p.length].transpose(1, 2),
            value[p.row : p.row + 1, : p.length].transpose(1, 2),
            attn_mask=p.mask,
            is_causal=p.mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        parts.append(out.transpose(1, 2))
    return torch.cat(parts, dim=1), None  # contiguous: some models view it


AttentionInterface.register(ROW_ATTENTION, row_attention)
AttentionMaskInterface.register(ROW_ATTENTION, sdpa_mask)
# transformers passes a four-dimensional mask on as it is, so no mask is built that row_attention would not read.
_NO_MASK = torch.zeros((1, 1, 1, 1))


class PrefixCache:
    """Keys and values of token blocks that were computed before, found by the tokens up to the block's end.

    Holds at most ``tokens`` tokens, least recently used blocks make room. Memory is taken when it is first written.
    """

    def __init__(self, rows: KVRows, tokens: int, block: int) -> None:
        layers, two, _, _, heads, dim = rows.kv.shape
        self.block = block
        self.capacity = tokens // block
        self.pool = torch.empty((self.capacity, layers, two, block, heads, dim), dtype=rows.kv.dtype)
        self.clear()

    def clear(self) -> None:
        # Oldest first. A block is never older than the blocks that follow it, so what is found is always whole.
        self.index: OrderedDict[bytes, int] = OrderedDict()
        self.free = list(range(self.capacity))

    def keys(self, token_ids: list[int], known: list[bytes]) -> list[bytes]:
        """Names of the full blocks of a sequence; ``known`` are those of its first blocks."""
        keys = list(known)
        tokens = np.asarray(token_ids, dtype=np.int64)
        for start in range(len(keys) * self.block, len(token_ids) - self.block + 1, self.block):
            parent = keys[-1] if keys else b""
            keys.append(blake2b(parent + tokens[start : start + self.block].tobytes(), digest_size=16).digest())
        return keys

    def count(self, keys: list[bytes]) -> int:
        """How many leading blocks are held."""
        return next((i for i, key in enumerate(keys) if key not in self.index), len(keys))

    def load(self, rows: KVRows, row: int, keys: list[bytes]) -> None:
        """Copy held blocks to the beginning of a row."""
        if not keys:
            return
        blocks = self.pool[[self.index[key] for key in keys]]
        rows.kv[:, :, row, : len(keys) * self.block] = blocks.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)

    def store(self, rows: KVRows, row: int, keys: list[bytes]) -> None:
        """Keep the first ``len(keys)`` blocks of a row (fewer if the cache is smaller than that)."""
        keys = keys[: self.capacity]
        held = self.count(keys)
        self._touch(keys[:held])
        missing = keys[held:]
        if not missing:
            return
        while len(self.free) < len(missing):
            self.free.append(self.index.popitem(last=False)[1])
        ids = [self.free.pop() for _ in missing]
        new = rows.kv[:, :, row, held * self.block : len(keys) * self.block]
        self.pool[ids] = new.unflatten(2, (len(missing), self.block)).permute(2, 0, 1, 3, 4, 5)
        self.index.update(zip(missing, ids))
        self._touch(keys)

    def _touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            self.index.move_to_end(key)
