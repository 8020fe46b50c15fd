"""What an advantage estimator is: an object that owns its parameters, says what it reads, and judges every turn of a batch.

``algorithm.adv_estimator`` names a module of this package, which says in ``ESTIMATOR`` where its class is, or an own class, as
``file.py:Class``, whose parameters are ``bpo.estimator.*``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from verl_bpo.options import Options
from verl_bpo.sandbox.loading import Registry, derived_from
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.record import AdvantageRecord, ComparisonRecord


@dataclass(frozen=True)
class Values:
    """What SAPO's readout said of N turns with the weights that sampled them, and what it is taught. float64 [N], NaN at turns
    that no row trains (of trajectories lost to a failure)."""

    v: Tensor
    """V of the state before the turn's action."""
    q: Tensor
    """Q after it."""
    returns: Tensor
    """G, the target of V."""
    action_targets: Tensor
    """y, the target of Q."""
    action_weights: Tensor
    """1 where y is a target, 0 where it is Q itself, at a bootstrapped end."""

    def for_loss(self) -> dict[str, Tensor]:
        """The constants of the value losses by the names of their fields, [N], 0 where not trained."""
        named = {
            "returns": self.returns,
            "action_targets": self.action_targets,
            "old_state_values": self.v,
            "old_action_values": self.q,
            "action_weights": self.action_weights,
        }
        return {name: x.nan_to_num(0.0) for name, x in named.items()}


@dataclass(frozen=True)
class Comparison:
    """How the advantages came out, for whoever looks at a tree. [N] each."""

    head: Tensor
    """int64: first turn of the turn's segment: the turn whose siblings decide."""
    value: Tensor
    """The turn's return as a sibling; NaN when its trajectory was lost."""
    baseline: Tensor
    """``value`` of the head less this is the advantage, before any normalisation; NaN where nothing defines one."""
    compared: Tensor
    """int64: siblings that the baseline is a mean of."""
    fair: Tensor
    """bool: the turn may stand in its siblings' baseline."""


@dataclass(frozen=True)
class Estimate:
    """What an estimator says of N turns."""

    advantage: Tensor
    """float [N]; 0 where not valid."""
    weight: Tensor
    """[N]: what the turn's policy-gradient term is to be multiplied with; 0 where not valid."""
    valid: Tensor
    """bool [N]: False where nothing defines an advantage. Such turns must leave the loss and its denominator: a zero that
    stays in dilutes a token mean."""
    metrics: dict[str, float] = field(default_factory=dict)
    comparison: Comparison | None = None
    degenerate: bool = False
    """Nothing can be learnt from this batch; worth a warning."""

    @classmethod
    def even(cls, name: str, advantage: Tensor, valid: Tensor, **metrics: float) -> Estimate:
        """Each valid turn weighs 1.

        Args:
            name: of the estimator, before its metrics' own names.
            advantage: [N]; 0 where not ``valid``.
        """
        count = valid.sum().clamp(min=1)
        sizes = {
            "advantage_mean": float(advantage.sum() / count),
            "advantage_rms": float((advantage**2).sum() / count) ** 0.5,
        }
        return cls(
            advantage,
            valid.to(advantage.dtype),
            valid,
            {f"{name}/{key}": value for key, value in (sizes | metrics).items()},
            degenerate=not bool(advantage.abs().sum() > 0),
        )

    def record(
        self, turns: slice, step: int, uid: str, session: int, options: dict[str, Any], estimator: str = "bpo"
    ) -> AdvantageRecord:
        """What is dumped of one tree, whose turns are ``turns``."""

        def plain(values: Tensor) -> list:
            return [None if x != x else x for x in values[turns].tolist()]

        comparison = None
        if self.comparison is not None:
            found = {name: plain(values) for name, values in vars(self.comparison).items()}
            found["head"] = [head - turns.start for head in found["head"]]
            comparison = ComparisonRecord(**found)
        lists = (plain(self.advantage), plain(self.weight), plain(self.valid))
        return AdvantageRecord(step, uid, session, options, *lists, comparison, estimator)


class Estimator(Options, ABC):
    """Advantages of the turns of a batch of trees. Its fields are its parameters."""

    KEYS: ClassVar[str] = "estimator"
    """The group of ``bpo.*`` that holds them."""
    PRESET: ClassVar[str] = "plain"
    """Where ``bpo.preset`` is not set."""
    NEEDS: ClassVar[frozenset[str]] = frozenset()
    """What it can't do without: ``value``, a trained readout; ``siblings``, several trajectories of a prompt."""

    @abstractmethod
    def __call__(self, forest: Forest, values: Values | None = None) -> Estimate:
        """Judge the turns of ``forest``; ``values`` are there where a readout is trained."""


ESTIMATORS = Registry("advantage estimator", __package__, "ESTIMATOR", derived_from(Estimator))
