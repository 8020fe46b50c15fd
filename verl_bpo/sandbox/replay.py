"""The ``replay`` backend: a snapshot is the list of actions that led there; a fork plays them again.

Works for every deterministic environment, whatever its state is made of, at the price of the prefix's steps per fork.
What the world answers is compared with what it answered before, so a world that drifts is caught.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

from verl_bpo.sandbox.base import Capabilities, Environment, Observation, Sandbox, SandboxError, Snapshot
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
            _digest(hide(observation.text, volatile)),
            float(observation.reward),
            observation.terminated,
            observation.truncated,
            "" if observation.actions is None else _digest("\n".join(observation.actions)),
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
    actions: tuple[str, ...] = ()
    answers: tuple[Fingerprint, ...] = ()
    volatile: Mapping[str, str] = field(default_factory=dict)
    """What answers may differ in, see :class:`verl_bpo.sandbox.Environment`."""

    @classmethod
    def start(cls, task: str, seed: int, observation: Observation, volatile: Mapping[str, str]) -> History:
        return cls(task, seed, Fingerprint.of(observation, volatile), volatile=volatile)

    def then(self, action: str, observation: Observation) -> History:
        answer = Fingerprint.of(observation, self.volatile)
        return replace(self, actions=(*self.actions, action), answers=(*self.answers, answer))

    def replay(self, reset: Callable[[str, int], Observation], step: Callable[[str], Observation]) -> None:
        """Play it again with ``reset`` and ``step``.

        Raises:
            SandboxError: the world answered otherwise than before; says at which step and what differed.
        """
        self.first.check(reset(self.task, self.seed), self.volatile, f"reset of {self.task}")
        for number, (action, answer) in enumerate(zip(self.actions, self.answers), start=1):
            answer.check(step(action), self.volatile, f"step {number} ({action!r})")


class ReplaySandbox(Sandbox):
    """A branch with an environment of its own.

    Args:
        make: makes a fresh environment; called once here and once per fork.
    """

    capabilities = Capabilities(snapshot=True, nested=True, exact=False)

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Environment | None = make()
        self._history: History | None = None
        self.env_steps = 0
        self.replayed_steps = 0
        """Steps that were played again to bring this fork into its snapshot's state; not in ``env_steps``."""

    def reset(self, task: str, seed: int = 0) -> Observation:
        self._history = None
        observation = self._live().reset(task, seed)
        self._history = History.start(task, seed, observation, self._live().volatile)
        return observation

    def step(self, action: str) -> Observation:
        environment, history = self._live(), self._known()
        self._history = None  # what an exception leaves behind can't be told
        observation = environment.step(action)
        self._history = history.then(action, observation)
        self.env_steps += 1
        return observation

    def snapshot(self) -> Snapshot:
        self._live()
        return ReplaySnapshot(self._make, self._known())

    def fork(self, snapshot: Snapshot, count: int = 1) -> list[Sandbox | Exception]:
        """``count`` branches in the snapshot's state. The sandbox itself may be closed already."""
        if not isinstance(snapshot, ReplaySnapshot):
            raise TypeError(f"a {type(snapshot).__name__} is no snapshot of this backend")
        return snapshot.fork(count)

    def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    def _live(self) -> Environment:
        if self._environment is None:
            raise SandboxError("this sandbox is closed")
        return self._environment

    def _known(self) -> History:
        if self._history is None:
            raise SandboxError("this branch has no state to go on from: it was never reset, or its last step failed")
        return self._history


class ReplaySnapshot(Snapshot):
    """The way to one state."""

    def __init__(self, make: Callable[[], Environment], history: History) -> None:
        self._make = make
        self._history: History | None = history

    def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        """``count`` sandboxes in this state, whether or not the sandbox it was taken of is still open."""
        if self._history is None:
            raise SandboxError("this snapshot is released")
        return [self._fork() for _ in range(count)]

    def _fork(self) -> Sandbox | Exception:
        fork = None
        try:
            fork = ReplaySandbox(self._make)
            self._history.replay(fork.reset, fork.step)
        except Exception as error:
            if fork is not None:
                fork.close()
            return error
        fork.replayed_steps, fork.env_steps = fork.env_steps, 0
        return fork

    def release(self) -> None:
        self._history = None


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
