"""Where a tree branches.

A selector is an object that owns its parameters (``bpo.branch.NAME``) and says what it needs. One that *chooses* decides
at a decision point while a trajectory runs through it; one that *ranks* looks at the decision points of finished
trajectories. ``bpo.branch.selector`` names a built-in one or an own one, as ``file.py:Class``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from verl_bpo.options import ConfigError, Options
from verl_bpo.sandbox.loading import EnvironmentUnavailable, Registry, derived_from

Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class DecisionPoint:
    """A state in which the model is about to act, as a selector sees it."""

    depth: int
    """Turns before it, at least 1: the initial state branches by ``root_samples``."""
    entropy: float
    """Entropy signal of the state, nats: see :class:`verl_bpo.tree.branching.Branching`."""
    value: float | None
    """V of the state by SAPO's readout; None where the rollout engine gives none."""
    chance: float
    """Drawn uniformly from [0, 1), independently for each decision point."""
    trajectory: int = 0
    node: int = -1
    """The turn that was taken there, once it was."""
    success: bool = False
    """Whether its trajectory won, once it has ended."""
    initial_entropy: float = 0.0
    """Entropy signal of the initial state, nats, as the first turn on the way here saw it."""


class Selector(Options):
    """Where to branch. Subclass :class:`Choosing` or :class:`Ranking`: its fields are its parameters."""

    NAME: ClassVar[str] = ""
    """What ``bpo.branch.selector`` calls a built-in one."""

    @property
    def needs(self) -> frozenset[str]:
        """What it looks at of a point: ``entropy``, ``value``."""
        return frozenset()

    def state_only(self, entropy_of_state: bool) -> bool:
        """Whether it chooses from the state alone, so that the action that was taken there anyway is a fair draw.

        Args:
            entropy_of_state: whether the entropy that it may look at is a function of the state.
        """
        return False


class Choosing(Selector):
    """Decides while the trajectory runs. With a memory it goes by past training steps, never by the present one: a choice
    then depends neither on the order in which trees happen to be rolled nor on which worker rolls them."""

    @abstractmethod
    def chooses(self, point: DecisionPoint) -> bool:
        """Whether to branch here."""

    def lesson(self, point: DecisionPoint) -> float | None:
        """What its memory is to keep of this point; None for nothing."""
        return None

    def memory(self) -> ScoreMemory | None:
        """A new memory, which the trainer keeps; None where nothing is learnt."""
        return None

    def taught(self, memory: ScoreMemory) -> float | None:
        """What a training step's rollouts are to know of the memory."""
        return None

    def knowing(self, lesson: float | None) -> Choosing:
        """This selector, as it chooses with what :meth:`taught` gave."""
        return self


class Ranking(Selector):
    """Ranks the points of finished trajectories."""

    OFFERS_INITIAL: ClassVar[bool] = False
    """Whether the initial state stands among the backbone's points."""
    FORKS_AGAIN: ClassVar[bool] = False
    """Whether a point that was forked may be forked again."""

    @property
    @abstractmethod
    def rounds(self) -> int | None:
        """How often affordable points are forked; points of their forks stand among the next round's. None: as long as the
        budget lasts."""

    @abstractmethod
    def ranked(self, points: Sequence[DecisionPoint]) -> list[DecisionPoint]:
        """The points that may be forked, best first."""

    def picked(self, points: Sequence[DecisionPoint], draw: Callable[[int], float]) -> list[DecisionPoint]:
        """Those that one round forks: the best.

        Args:
            draw: number -> a draw from [0, 1), another one in each round.
        """
        return self.ranked(points)[:1]


class ScoreMemory:
    """Scores of past training steps, which the ``quantile`` selector takes its limit from."""

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


class NoBranching(Choosing):
    """Plain trajectories."""

    NAME: ClassVar[str] = "none"

    def chooses(self, point: DecisionPoint) -> bool:
        return False

    def state_only(self, entropy_of_state: bool) -> bool:
        return True


class _Scored(Selector):
    score: Literal["entropy", "value", "entropy_value"] = "entropy"
    """What makes a decision point worth branching: ``entropy`` of the policy (nats); ``value``, V(1-V) of SAPO's value
    readout for returns in [0, 1], highest where the outcome is still open; ``entropy_value``, their product."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(self.score.split("_"))

    def score_of(self, point: DecisionPoint) -> float:
        """The point's score. V(1-V) is the variance of a return that is 0 or 1 with mean V, held within [0, 1].

        Raises:
            ValueError: there is no value where one is needed.
        """
        if self.score == "entropy":
            return point.entropy
        if point.value is None:
            raise ValueError(f"bpo.branch.score={self.score} needs state values, and the rollout engine gives none")
        value = min(max(point.value, 0.0), 1.0)
        openness = value * (1 - value)
        return openness if self.score == "value" else point.entropy * openness


class Threshold(_Scored, Choosing):
    """The paper's: branch where the score reaches a limit set by hand."""

    NAME: ClassVar[str] = "threshold"
    threshold: float = 1.0
    """Branch where the score is at least this."""

    def chooses(self, point: DecisionPoint) -> bool:
        return self.score_of(point) >= self.threshold

    def state_only(self, entropy_of_state: bool) -> bool:
        return self.score == "value" or entropy_of_state


class Quantile(_Scored, Choosing):
    """Branch above the score that a share of past points exceed; at random with that share while too few are known."""

    NAME: ClassVar[str] = "quantile"
    share: Share = 0.25
    """Target share of decision points that branch, by the scores of past steps."""

    def chooses(self, point: DecisionPoint) -> bool:
        return point.chance < self.share

    def state_only(self, entropy_of_state: bool) -> bool:
        return self.score == "value" or entropy_of_state

    def lesson(self, point: DecisionPoint) -> float:
        return self.score_of(point)

    def memory(self) -> ScoreMemory:
        return ScoreMemory()

    def taught(self, memory: ScoreMemory) -> float | None:
        return memory.limit(self.share)

    def knowing(self, lesson: float | None) -> Choosing:
        return self if lesson is None else _TaughtQuantile(**self.model_dump(), limit=lesson)


class _TaughtQuantile(Quantile):
    NAME: ClassVar[str] = ""
    limit: float

    def chooses(self, point: DecisionPoint) -> bool:
        return self.score_of(point) > self.limit


class FixedInterval(Choosing):
    """Branch at every so many turns."""

    NAME: ClassVar[str] = "fixed_interval"
    interval: Annotated[int, Field(ge=1)] = 3
    """Branch at every this many turns."""

    def chooses(self, point: DecisionPoint) -> bool:
        return point.depth % self.interval == 0

    def state_only(self, entropy_of_state: bool) -> bool:
        return True


class AtRandom(Choosing):
    """Branch with one probability everywhere."""

    NAME: ClassVar[str] = "random"
    share: Share = 0.25
    """Probability of a branch point."""

    def chooses(self, point: DecisionPoint) -> bool:
        return point.chance < self.share

    def state_only(self, entropy_of_state: bool) -> bool:
        return True


class Every(Choosing):
    """Branch everywhere."""

    NAME: ClassVar[str] = "every"

    def chooses(self, point: DecisionPoint) -> bool:
        return True

    def state_only(self, entropy_of_state: bool) -> bool:
        return True


class TopK(_Scored, Ranking):
    """The points of highest score among those visited."""

    NAME: ClassVar[str] = "top_k"
    top_k: Annotated[int, Field(ge=1)] = 2
    """At most this many branch points a tree."""
    trunk: Literal["any", "success"] = "any"
    """Fork trajectories of ``any`` outcome, or only those that ended in ``success``: below a prefix that has
    already failed forks are wasted."""

    @property
    def rounds(self) -> int:
        return self.top_k

    def ranked(self, points: Sequence[DecisionPoint]) -> list[DecisionPoint]:
        # Trajectories that came to one state hold equal scores, up to the rounding of whatever batch each was computed in.
        # Those go by trajectory, not by which was sampled first, so that a run can be repeated.
        kept = [p for p in points if self.trunk == "any" or p.success]
        return sorted(kept, key=lambda p: (-round(self.score_of(p), 4), p.trajectory, p.node))


class MostUncertain(_Scored, Ranking):
    """The paper's: one backbone, then forks at its most uncertain points, the initial state among them, as long as the budget
    lasts."""

    NAME: ClassVar[str] = "most_uncertain"
    OFFERS_INITIAL: ClassVar[bool] = True
    threshold: float = 0.0
    """A point with a lower score isn't forked, even if budget is left."""

    @property
    def rounds(self) -> None:
        return None

    def ranked(self, points: Sequence[DecisionPoint]) -> list[DecisionPoint]:
        kept = [p for p in points if self.score_of(p) >= self.threshold]
        return sorted(kept, key=lambda p: (-round(self.score_of(p), 4), p.trajectory, p.node))


class RandomNodes(Ranking):
    """Tree-GRPO's (Ji et al. 2025, arXiv 2509.21240): L rounds, each of which draws N of the tree's states, the initial
    one among them, uniformly and with replacement, and rolls ``forks`` trajectories from each."""

    NAME: ClassVar[str] = "random_nodes"
    OFFERS_INITIAL: ClassVar[bool] = True
    FORKS_AGAIN: ClassVar[bool] = True
    nodes: Annotated[int, Field(ge=1)] = 2
    """N: states that a round expands."""
    expansions: Annotated[int, Field(ge=1)] = 1
    """L: rounds."""

    @property
    def rounds(self) -> int:
        return self.expansions

    def ranked(self, points: Sequence[DecisionPoint]) -> list[DecisionPoint]:
        return sorted(points, key=lambda p: (p.trajectory, p.node))

    def picked(self, points: Sequence[DecisionPoint], draw: Callable[[int], float]) -> list[DecisionPoint]:
        places = self.ranked(points)
        return [places[int(draw(i) * len(places))] for i in range(self.nodes)] if places else []


class EntropyRise(Choosing):
    """ARPO's (Dong et al. 2025, arXiv 2507.19849): branch after an observation with a probability that grows with the
    entropy's rise over the initial state's, share + weight (H_t - H_0)."""

    NAME: ClassVar[str] = "entropy_rise"
    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a branch where the entropy is the initial state's."""
    weight: Annotated[float, Field(ge=0)] = 0.335
    """What a nat more adds to it."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def chooses(self, point: DecisionPoint) -> bool:
        return point.chance < self.share + self.weight * (point.entropy - point.initial_entropy)

    def state_only(self, entropy_of_state: bool) -> bool:
        return entropy_of_state


SELECTORS: dict[str, type[Selector]] = {
    cls.NAME: cls
    for cls in (
        MostUncertain,
        Threshold,
        Quantile,
        TopK,
        FixedInterval,
        AtRandom,
        Every,
        RandomNodes,
        EntropyRise,
        NoBranching,
    )
}
"""Built-in selectors by name."""
_OWN = Registry("selector", __name__, "", derived_from(Selector))


def selector_class(name: str) -> type[Selector]:
    """The class called ``name``: a built-in one, or ``file.py:Class``.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(name, str) and name in SELECTORS:
        return SELECTORS[name]
    if not isinstance(name, str) or ":" not in name:
        raise ConfigError(f"bpo.branch.selector={name!r} is not one of {', '.join(SELECTORS)}, nor file.py:Class")
    try:
        own = _OWN.load(name)
    except EnvironmentUnavailable as error:
        raise ConfigError(f"bpo.branch.selector: {error}") from None
    own.NAME = name  # so that a resolved config names it again
    return own
