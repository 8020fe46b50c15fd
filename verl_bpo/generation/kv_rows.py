"""Keys and values of the sequences that are being generated, one row each, and of prefixes seen before.

Works with any causal language model that uses transformers' attention interface (Qwen2, Qwen3, Llama and others): the
tokens of all sequences run packed in one row of ``(1, tokens)`` without any padding, and :func:`row_attention`, which
takes the place of the model's attention, gives each token the keys of its own sequence.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
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


class Shelf:
    """Rows of one capacity, together in one tensor a layer, so that one call attends for all of them.

    ``layers``: per layer ``(2, slots, capacity, heads, width)``; the slots in use are the first ``len(rows)``.
    """

    def __init__(self, layers: int, capacity: int, heads: int, width: int, dtype: torch.dtype) -> None:
        self.capacity = capacity
        self.layers = [torch.zeros((2, 0, capacity, heads, width), dtype=dtype) for _ in range(layers)]
        self.rows: list[int] = []
        """The row in each slot."""

    @property
    def slots(self) -> int:
        return self.layers[0].shape[1]

    def resize(self, slots: int) -> None:
        used = len(self.rows)
        for index, old in enumerate(self.layers):  # one at a time: only one layer is held twice
            # Zeros, not empty: a masked key has weight 0, and 0 times a NaN found in fresh memory is NaN.
            new = old.new_zeros((2, slots, *old.shape[2:]))
            new[:, :used] = old[:, :used]
            self.layers[index] = new

    def make_room(self, count: int) -> None:
        needed = len(self.rows) + count
        if needed > self.slots:
            self.resize(needed + needed // _SPARE)

    def trim(self) -> None:
        """Give memory back when over a fifth of it is not in use."""
        if 4 * self.slots > 5 * len(self.rows):
            self.resize(len(self.rows) + len(self.rows) // _SPARE)


_SPARE = 8
"""A shelf that is full grows by one more slot for every so many in use."""
_STEP = 16


def capacity_for(tokens: int) -> int:
    """Tokens of the smallest shelf that holds so many: at most a fifth more, or 16."""
    capacity = _STEP
    while capacity < tokens:
        capacity += max(_STEP, capacity // 5 // _STEP * _STEP)
    return capacity


@dataclass
class Prefill:
    """A prompt's uncached tokens: ``start:stop`` of the packed tokens; with them its row has ``length`` tokens."""

    shelf: Shelf
    slot: int
    start: int
    stop: int
    length: int
    mask: torch.Tensor | None
    """Additive ``(stop - start, length)``; None when nothing was cached, which is plainly causal."""


@dataclass
class Decode:
    """One token for each of the rows on a shelf's first slots."""

    shelf: Shelf
    tokens: torch.Tensor
    """Of each slot, the index of its packed token."""
    positions: torch.Tensor
    longest: int
    """Most tokens in one of these rows, the new one included."""
    mask: torch.Tensor
    """Additive ``(slots, 1, 1, longest)``."""


@dataclass
class PackedStep:
    """Where the packed tokens of one forward pass belong: first one token for each decoding row, then prompts."""

    positions: torch.Tensor
    decoding: int
    """Number of decoding rows."""
    decodes: list[Decode]
    prefills: list[Prefill]


class KVRows(Cache):
    """Rows of keys and values, numbered from 0, on shelves by their length.

    A row that outgrows its shelf moves to the next, a fifth longer. So memory follows the sum of the lengths, and a decoding
    row attends over little more than its own tokens, whatever the length of the longest.
    """

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
        self.key_width = key_width
        self.cell = (len(probe.layers), heads, max(key_width, self.value_width))
        """Layers, heads and width."""
        self.dtype = model.dtype
        self.shelves: dict[int, Shelf] = {}
        """By capacity."""
        self.places: list[tuple[Shelf, int]] = []
        """Of each row, its shelf and its slot there."""
        self.step: PackedStep | None = None
        self.layer = 0
        """The layer that was written last: the one whose attention runs."""
        self._check(model, plain)

    @torch.inference_mode()
    def _check(self, model: PreTrainedModel, plain: torch.Tensor) -> None:
        """Two prompts and one decode step, packed, against the plain forward pass of one of them."""
        self.reserve([len(_PROBE)] * 2)
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

    @property
    def memory(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for shelf in self.shelves.values() for layer in shelf.layers)

    def reserve(self, tokens: list[int]) -> None:
        """Make room for so many tokens in each row; rows beyond those there are become new ones."""
        moving = []
        for row, count in enumerate(tokens):
            if row >= len(self.places) or count > self.places[row][0].capacity:
                moving.append((row, capacity_for(count)))
        for capacity, count in Counter(capacity for _, capacity in moving).items():
            if capacity not in self.shelves:
                layers, heads, width = self.cell
                self.shelves[capacity] = Shelf(layers, capacity, heads, width, self.dtype)
            self.shelves[capacity].make_room(count)
        for row, capacity in moving:
            shelf = self.shelves[capacity]
            place = shelf, len(shelf.rows)
            shelf.rows.append(row)
            if row == len(self.places):
                self.places.append(place)
                continue
            old, slot = self.places[row]
            for source, target in zip(old.layers, shelf.layers):
                target[:, place[1], : old.capacity] = source[:, slot]
            self._vacate(old, slot)
            self.places[row] = place
        self._trim()

    def drop(self, row: int) -> None:
        """Free a row; the last one takes its number."""
        self._vacate(*self.places[row])
        last = self.places.pop()
        if row < len(self.places):
            self.places[row] = last
            last[0].rows[last[1]] = row
        self._trim()

    def _vacate(self, shelf: Shelf, slot: int) -> None:
        """Free a slot; what is in the shelf's last one moves into it."""
        last, row = len(shelf.rows) - 1, shelf.rows.pop()
        if slot == last:
            return
        for layer in shelf.layers:
            layer[:, slot] = layer[:, last]
        shelf.rows[slot] = row
        self.places[row] = shelf, slot

    def _trim(self) -> None:
        for shelf in list(self.shelves.values()):
            if shelf.rows:
                shelf.trim()
            else:
                del self.shelves[shelf.capacity]

    def release(self) -> None:
        """Forget all rows and give their memory back."""
        self.shelves.clear()
        self.places.clear()

    def write(self, row: int, cells: torch.Tensor) -> None:
        """Set the first tokens of a row: ``(layers, 2, tokens, heads, width)``."""
        shelf, slot = self.places[row]
        for layer, values in zip(shelf.layers, cells):
            layer[:, slot, : cells.shape[2]] = values

    def read(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Some tokens of a row, ``(layers, 2, tokens, heads, width)``."""
        shelf, slot = self.places[row]
        return torch.stack([layer[:, slot, start:stop] for layer in shelf.layers])

    def plan(self, lengths: list[int], prompts: list[tuple[int, int]]) -> PackedStep:
        """Lay out one forward pass.

        Args:
            lengths: cached tokens of each decoding row, which are rows ``0..len(lengths) - 1``.
            prompts: of each following row, its cached tokens and its tokens altogether.
        """
        decoding = len(lengths)
        decodes = []
        for shelf in self.shelves.values():
            rows = [row for row in shelf.rows if row < decoding]  # new rows stand behind them
            if rows:
                positions = torch.tensor([lengths[row] for row in rows])
                longest = int(positions.max()) + 1
                mask = torch.zeros((len(rows), longest), dtype=self.dtype)
                mask.masked_fill_(torch.arange(longest) > positions[:, None], float("-inf"))
                decodes.append(Decode(shelf, torch.tensor(rows), positions, longest, mask[:, None, None]))
        positions, prefills, start = [torch.tensor(lengths, dtype=torch.long)], [], decoding
        for row, (cached, length) in enumerate(prompts, start=decoding):
            count = length - cached
            positions.append(torch.arange(cached, length))
            mask = None
            if cached:
                mask = torch.full((count, length), float("-inf"), dtype=self.dtype).triu(cached + 1)
            prefills.append(Prefill(*self.places[row], start, start + count, length, mask))
            start += count
        return PackedStep(torch.cat(positions), decoding, decodes, prefills)

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
            packed_rows=self,
        )
        return out.logits[0]

    # --- what transformers calls -----------------------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Store the packed tokens' ``(1, heads, tokens, head dim)``; returns them as they are."""
        self.layer = layer_idx
        for states, kind, width in ((key_states, 0, self.key_width), (value_states, 1, self.value_width)):
            tokens = states[0].transpose(0, 1)
            for d in self.step.decodes:
                target = d.shelf.layers[layer_idx][kind, ..., :width]
                target[torch.arange(len(d.tokens)), d.positions] = tokens[d.tokens]
            for p in self.step.prefills:
                cached = p.length - (p.stop - p.start)
                p.shelf.layers[layer_idx][kind, p.slot, cached : p.length, :, :width] = tokens[p.start : p.stop]
        return key_states, value_states

    def stored(self, shelf: Shelf, slots: slice, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of this layer's first tokens in some slots, ``(slots, heads, tokens, their width)``."""
        keys, values = shelf.layers[self.layer][:, slots, :tokens].transpose(2, 3)
        return keys[..., : self.key_width], values[..., : self.value_width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed_rows: KVRows | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of packed tokens over :class:`KVRows`; plain scaled dot product attention for any other call.

    transformers' own function repeats keys and values for grouped queries whenever there is a mask, which copies the
    whole cache in every layer and step; here the queries that share a key head are folded together instead.

    Args:
        query: ``(1, query heads, tokens, head dim)``.
        key, value: the same tokens', ``(1, heads, tokens, width of a key or a value)``; those before are in ``packed_rows``.

    Returns:
        ``(1, tokens, query heads, width of a value)`` and None.

    Raises:
        UnsupportedModel: the layer asks for more than a softmax of scaled dot products.
    """
    if packed_rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    refuse_odd_attention(module, kwargs)
    heads, tokens, dim = query.shape[1:]
    kv_heads = key.shape[1]
    out = query.new_empty((1, tokens, heads, value.shape[3]))  # contiguous: some models view it
    for d in packed_rows.step.decodes:
        count = len(d.tokens)
        found = scaled_dot_product_attention(
            query[0, :, d.tokens].transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, dim),
            *packed_rows.stored(d.shelf, slice(count), d.longest),
            attn_mask=d.mask.expand(-1, -1, heads // kv_heads, -1),
            scale=scaling,
        )
        out[0, d.tokens] = found.reshape(count, heads, -1)
    for p in packed_rows.step.prefills:
        found = scaled_dot_product_attention(
            query[:, :, p.start : p.stop],
            *packed_rows.stored(p.shelf, slice(p.slot, p.slot + 1), p.length),
            attn_mask=p.mask,
            is_causal=p.mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        out[:, p.start : p.stop] = found.transpose(1, 2)
    return out, None


AttentionInterface.register(ROW_ATTENTION, row_attention)
AttentionMaskInterface.register(ROW_ATTENTION, sdpa_mask)
# transformers passes a four-dimensional mask on as it is, so no mask is built that row_attention would not read.
_NO_MASK = torch.zeros((1, 1, 1, 1))


class PrefixCache:
    """Keys and values of token blocks that were computed before, found by the tokens up to the block's end.

    Holds at most ``tokens`` tokens, least recently used blocks make room. Memory is taken when it is first written.
    """

    def __init__(self, rows: KVRows, tokens: int, block: int) -> None:
        layers, heads, width = rows.cell
        self.block = block
        self.capacity = tokens // block
        self.pool = torch.empty((self.capacity, layers, 2, block, heads, width), dtype=rows.dtype)
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
        rows.write(row, blocks.permute(1, 2, 0, 3, 4, 5).flatten(2, 3))

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
        new = rows.read(row, held * self.block, len(keys) * self.block)
        self.pool[ids] = new.unflatten(2, (len(missing), self.block)).permute(2, 0, 1, 3, 4, 5)
        self.index.update(zip(missing, ids))
        self._touch(keys)

    def _touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            self.index.move_to_end(key)
