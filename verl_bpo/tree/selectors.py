"""Where a tree branches: the entropy signal and the selectors.

An online selector decides at a decision point while the trajectory runs through it. A ranked selector looks at the
decision points of finished trajectories.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def decision_score(entropy: list[float], tokens: str, m: int, forced: int = 0) -> float:
    """Entropy signal of a decision point, nats.

    Args:
        entropy: true entropy of the distribution that each action token was sampled from.
        tokens: ``first`` (a function of the state alone), ``open`` (nearly so: of the sampled action too where that departs
            from the form), ``first_m`` or ``all`` (functions of the sampled action too).
        m: length of ``first_m``.
        forced: how many of the tokens the form of an answer dictates; ``open`` is the next one.
    """
    if not entropy:
        return 0.0
    at = min(forced, len(entropy) - 1)  # a sample may be cut inside the form
    used = {"first": entropy[:1], "open": [entropy[at]], "first_m": entropy[:m], "all": entropy}[tokens]
    return float(sum(used) / len(used))


def branch_score(kind: str, entropy: float, value: float | None) -> float:
    """How much a decision point is worth branching.

    Args:
        kind: ``entropy``; ``value``, V(1-V), the variance of a return that is 0 or 1 with mean V, and so highest where the
            outcome is still open; ``entropy_value``, their product.
        entropy: of the policy there, nats.
        value: V of the state, held within [0, 1]. Needed for all but ``entropy``.

    Raises:
        ValueError: no value where ``kind`` needs one.
    """
    if kind == "entropy":
        return entropy
    if value is None:
        raise ValueError(f"bpo.branch.score={kind} needs state values, and the rollout engine gives none")
    value = min(max(value, 0.0), 1.0)
    openness = value * (1 - value)
    return openness if kind == "value" else entropy * openness


OnlineSelector = Callable[[float, int, float], bool]
"""(score of the decision point, turns before it, a number drawn uniformly from [0, 1)) -> branch here?"""


def threshold(limit: float) -> OnlineSelector:
    """The paper's: branch where the score reaches a limit set by hand."""
    return lambda score, depth, chance: score >= limit


def quantile(limit: float | None, share: float) -> OnlineSelector:
    """Branch above the limit of a :class:`ScoreMemory`; at random with the same share while it has none."""
    return at_random(share) if limit is None else lambda score, depth, chance: score > limit


class ScoreMemory:
    """Scores of past training steps, which the ``quantile`` selector takes its limit from.

    The limit in force during a step comes from earlier steps alone. So a choice stays a function of the state, and depends
    neither on the order in which trees happen to be rolled nor on which worker rolls them.
    """

    def __init__(self, window: int = 2048, warm: int = 32) -> None:
        self.window, self.warm = window, warm
        self.steps: deque[list[float]] = deque()

    def add(self, scores: list[float]) -> None:
        """Take one step's scores; forget the oldest steps that the window does without."""
        self.steps.append(list(scores))
        while sum(map(len, self.steps)) - len(self.steps[0]) >= self.window:
            self.steps.popleft()

    def limit(self, share: float) -> float | None:
        """The score that ``share`` of the remembered ones exceed; None with fewer than ``warm`` of them."""
        scores = [score for step in self.steps for score in step]
        return float(np.quantile(scores, 1 - share)) if len(scores) >= self.warm else None


def fixed_interval(interval: int) -> OnlineSelector:
    return lambda score, depth, chance: depth % interval == 0


def at_random(share: float) -> OnlineSelector:
    return lambda score, depth, chance: chance < share


def every() -> OnlineSelector:
    return lambda score, depth, chance: True


def online_selector(
    name: str, *, limit: float, share: float, interval: int, learnt_limit: float | None = None
) -> OnlineSelector | None:
    """The online selector called ``name``, None for ``top_k`` and ``none``. ``learnt_limit`` is ``quantile``'s."""
    return {
        "threshold": lambda: threshold(limit),
        "quantile": lambda: quantile(learnt_limit, share),
        "fixed_interval": lambda: fixed_interval(interval),
        "random": lambda: at_random(share),
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
    """Candidates by falling score; with ``trunk='success'`` only those of successful trajectories.

    Trajectories that came to one state hold equal scores, up to the rounding of whatever batch each was computed in. Those
    go by trajectory, not by which was sampled first, so that a run can be repeated.
    """
    kept = [c for c in candidates if trunk == "any" or c.success]
    return sorted(kept, key=lambda c: (-round(c.score, 4), c.trajectory, c.node))
