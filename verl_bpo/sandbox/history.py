"""How a branch came to its state, so that it can be played again and what the world answers compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

from verl_bpo.sandbox.base import Observation, Row, SandboxError
from verl_bpo.sandbox.turns import Action
from verl_bpo.sandbox.volatile import hide


class Fingerprint(NamedTuple):
    """An observation in a few bytes, enough to notice that another one differs, and where."""

    text: str
    reward: float
    terminated: bool
    truncated: bool
    actions: str

    @classmethod
    def of(cls, observation: Observation, volatile: Mapping[str, str]) -> Fingerprint:
        return cls(
            digest_of(hide(_read(observation), volatile)),
            float(observation.reward),
            observation.terminated,
            observation.truncated,
            "" if observation.actions is None else digest_of("\n".join(observation.actions)),
        )

    def check(self, observation: Observation, volatile: Mapping[str, str], where: str) -> None:
        """
        Raises:
            SandboxError: ``observation`` is another one; names what differs.
        """
        again = Fingerprint.of(observation, volatile)
        if again != self:
            fields = [name for name, old, new in zip(self._fields, self, again) if old != new]
            raise SandboxError(
                f"the environment isn't deterministic: {where} gave another {' and '.join(fields)} when played again "
                f"(now {observation.text[:80]!r}, reward {observation.reward:g})"
            )


@dataclass(frozen=True)
class History:
    """How a branch came to its state: the task and the actions, and what the world answered to each."""

    task: str
    seed: int
    first: Fingerprint
    actions: tuple[Action, ...] = ()
    answers: tuple[Fingerprint, ...] = ()
    volatile: Mapping[str, str] = field(default_factory=dict)
    """What answers may differ in, see :class:`verl_bpo.sandbox.Environment`."""
    row: Row | None = None
    seconds: float = 0.0
    """How long it took."""

    @classmethod
    def start(
        cls,
        task: str,
        seed: int,
        observation: Observation,
        volatile: Mapping[str, str],
        row: Row | None = None,
        seconds: float = 0.0,
    ) -> History:
        return cls(task, seed, Fingerprint.of(observation, volatile), volatile=volatile, row=row, seconds=seconds)

    def then(self, action: Action, observation: Observation, seconds: float = 0.0) -> History:
        answer, seconds = Fingerprint.of(observation, self.volatile), self.seconds + seconds
        return replace(self, actions=(*self.actions, action), answers=(*self.answers, answer), seconds=seconds)

    def replay(
        self, reset: Callable[[str, int, Row | None], Observation], step: Callable[[Action], Observation]
    ) -> None:
        """Play it again with ``reset`` and ``step``.

        Raises:
            SandboxError: the world answered otherwise than before; says at which step and what differed.
        """
        self.first.check(reset(self.task, self.seed, self.row), self.volatile, f"reset of {self.task}")
        for number, (action, answer) in enumerate(zip(self.actions, self.answers), start=1):
            answer.check(step(action), self.volatile, f"step {number} ({str(action)!r})")


def _read(observation: Observation) -> str:
    """What the policy reads of it."""
    messages = observation.messages
    return "\n".join(f"{m.role}: {m.content}" for m in messages) if messages else observation.text


def digest_of(text: str) -> str:
    """What tells texts apart, in 16 characters."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
