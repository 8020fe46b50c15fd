"""Where a tree branches: the entropy signal and the selectors.

An online selector decides at a decision point while the trajectory runs through it. A ranked selector looks at the
decision points of finished trajectories.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def decision_score(entropy: list[float], tokens: str, m: int) -> float:
    """Entropy signal of a decision point, nats.

    Args:
        entropy: true entropy of the distribution that each action token was sampled from.
        tokens: ``first`` (a function of the state alone), ``first_m`` or ``all`` (functions of the sampled action too).
        m: length of ``first_m``.
    """
    if not entropy:
        return 0.0
    used = {"first": entropy[:1], "first_m": entropy[:m], "all": entropy}[tokens]
    return float(sum(used) / len(used))


OnlineSelector = Callable[[float, int], bool]
"""(score of the decision point, turns before it) -> branch here?"""


def threshold(limit: float) -> OnlineSelector:
    """The paper's: branch where the score reaches a limit set by hand."""
    return lambda score, depth: score >= limit


class Quantile:
    """Branch at the share of decision points with the highest scores, by a threshold tracked over past ones.

    The threshold in force at a decision point comes from earlier ones only, so the choice stays a function of the state.
    Until ``warm`` scores are known it branches at random with the same share.
    """

    def __init__(self, share: float, rng: random.Random, window: int = 2048, warm: int = 32) -> None:
        self.share, self.rng, self.warm = share, rng, warm
        self.scores: deque[float] = deque(maxlen=window)

    def __call__(self, score: float, depth: int) -> bool:
        if len(self.scores) < self.warm:
            chosen = self.rng.random() < self.share
        else:
            chosen = score > float(np.quantile(np.fromiter(self.scores, float), 1 - self.share))
        self.scores.append(score)
        return chosen


def fixed_interval(interval: int) -> OnlineSelector:
    return lambda score, depth: depth % interval == 0


def at_random(share: float, rng: random.Random) -> OnlineSelector:
    return lambda score, depth: rng.random() < share


def every() -> OnlineSelector:
    return lambda score, depth: True


def online_selector(
    name: str, *, limit: float, share: float, interval: int, rng: random.Random
) -> OnlineSelector | None:
    """The online selector called ``name``, None for ``top_k`` and ``none``."""
    return {
        "threshold": lambda: threshold(limit),
        "quantile": lambda: Quantile(share, rng),
        "fixed_interval": lambda: fixed_interval(interval),
        "random": lambda: at_random(share, rng),
        "every": every,
        "top_k": lambda: None,
        "none": lambda: None,
    }[name]()


@dataclass(frozen=True)
class Candidate:
    """A decision point of a finished trajectory that could be forked."""

    trajectory: int
    node: int
    """The turn that was taken there."""
    score: float
    success: bool


def rank(candidates: list[Candidate], trunk: str) -> list[Candidate]:
    """Candidates by falling score; with ``trunk='success'`` only those of successful trajectories."""
    kept = [c for c in candidates if trunk == "any" or c.success]
    return sorted(kept, key=lambda c: (-c.score, c.node))
