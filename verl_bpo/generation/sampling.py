"""What a request asks of the sampler, and the sampler: one token per sequence with its log-prob and entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import log
from typing import Any

import numpy as np
import torch

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy, as in vLLM."""


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling parameters; names and meanings are vLLM's.

    Log-probs and entropies are those of the distribution the token is drawn from: logits over temperature, cut by
    min_p, top_k and top_p, normalised again (vLLM's ``processed_logprobs``, which verl asks for). Without a cut they
    are the actor's own: a full softmax at that temperature. A greedy request reports temperature 1 without cuts.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Only 1: any other value would make the log-probs differ from the actor's."""
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    """Stop after the token that completes one of these strings; needs a tokenizer."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop after one of these tokens, like the end-of-sequence token."""
    seed: int | None = None
    """Same seed, prompt and weights: same tokens, whatever else is in the batch (up to float rounding)."""
    ignore_eos: bool = False
    logprobs: bool = True
    """Report log-probs and entropies."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= -1, "-1 or 0 (off), or positive"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (self.repetition_penalty == 1, "1.0, nothing else is supported"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
        }
        for name, (right, rule) in checks.items():
            if not right:
                raise ValueError(f"sampling parameter {name}={getattr(self, name)} must be {rule}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from a plain dict as verl's agent loops send it.

        Raises:
            ValueError: a key that is not known here, or a value that is not allowed.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown sampling parameter {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        values = {k: v for k, v in values.items() if v is not None}
        stop = values.get("stop", ())
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
        logprobs = values.get("logprobs", False)  # vLLM's int 0 means "the sampled token's"
        values["logprobs"] = logprobs is not False
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def cuts(self) -> bool:
        """Is the distribution truncated?"""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float], list[float]]:
    """Draw one token per row.

    Args:
        logits: ``(rows, vocabulary)``.
        params: one per row.
        uniforms: one number in [0, 1) per row, which decides the draw (inverse transform sampling): a row's token
            depends on nothing but its own logits and its own number.

    Returns:
        Token ids, their log-probs and the entropies of the distributions, natural logarithm, one per row. Entropies
        are exact sums over the vocabulary, never estimates from the sampled token.
    """
    temperatures = [1.0 if p.greedy else p.temperature for p in params]
    scaled = logits.float()
    if any(t != 1 for t in temperatures):
        scaled = scaled / torch.tensor(temperatures)[:, None]
    cut = [i for i, p in enumerate(params) if p.cuts]
    if cut:
        scaled = scaled.clone()  # the caller's logits stay
        for i in cut:
            _cut(scaled[i].numpy(), params[i])
    logprobs = scaled.log_softmax(-1)
    probs = logprobs.exp()
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    targets = torch.from_numpy(np.asarray(uniforms, dtype=np.float64))[:, None] * cumulative[:, -1:]
    # right=True skips tokens of probability 0: their cumulative probability equals their predecessor's.
    tokens = torch.searchsorted(cumulative, targets, right=True)
    if any(p.greedy for p in params):
        greedy = torch.tensor([p.greedy for p in params])[:, None]
        tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), tokens)
    chosen = logprobs.gather(-1, tokens)[:, 0]
    # 0 * log 0 = 0 for tokens that were cut.
    entropies = -(probs * (logprobs.clamp_min(torch.finfo(logprobs.dtype).min) if cut else logprobs)).sum(-1)
    return tokens[:, 0].tolist(), chosen.tolist(), entropies.tolist()


def _cut(logits: np.ndarray, p: SamplingParams) -> None:
    """Set one row's tokens outside min_p, then top_k, then top_p to -inf, in vLLM's order. Of equal logits at the edge,
    those of lower token ids stay."""
    # Values alone, by numpy: torch's sort brings the order too and takes 20 times as long on a large vocabulary.
    ascending = np.sort(logits)
    size, largest = len(ascending), ascending[-1]
    kept = size
    if p.min_p > 0:
        kept = size - int(np.searchsorted(ascending, largest + np.float32(log(p.min_p))))
    if p.top_k > 0:
        kept = min(kept, p.top_k)
    if p.top_p < 1:
        mass = np.exp(ascending[size - kept :][::-1] - largest).cumsum(dtype=np.float64)
        # A token stays while the mass before it is below top_p: the first one always.
        kept = 1 + int(np.searchsorted(mass[:-1], p.top_p * mass[-1]))
    edge = ascending[size - kept]
    logits[logits < edge] = -np.inf
    above = size - int(np.searchsorted(ascending, edge, side="right"))
    logits[np.flatnonzero(logits == edge)[kept - above :]] = -np.inf
