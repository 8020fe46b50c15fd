"""A snapshot is the list of actions that led there; a fork plays them again.

Works for every deterministic environment, whatever its state is made of, at the price of the prefix's steps per fork.
What the world answers is compared with what it answered before, so a world that drifts is caught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_bpo.sandbox.asynchronous import settled
from verl_bpo.sandbox.base import Backend, Environment, Observation, Row, Sandbox, SandboxError, Snapshot, opened
from verl_bpo.sandbox.history import History
from verl_bpo.sandbox.loading import EnvironmentMaker
from verl_bpo.sandbox.turns import Action

BACKEND = "ReplayBackend"


class ReplayBackend(Backend):
    """Each branch has an environment of its own."""

    replays = True

    def __init__(self, env: str, env_kwargs: dict[str, Any]) -> None:
        self._make = EnvironmentMaker(env, env_kwargs)
        self.volatile = self._make.volatile

    def sandbox(self) -> ReplaySandbox:
        return ReplaySandbox(self._make)

    def clear(self) -> None:
        self._make.clear()


class ReplaySandbox(Sandbox):
    """A branch with an environment of its own.

    Args:
        make: makes a fresh environment; called once here and once per fork.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Environment | None = make()
        self._history: History | None = None

    def reset(self, task: str, seed: int = 0, row: Row | None = None) -> Observation:
        self._history = None
        observation = settled(opened(self._live(), task, seed, row))
        self._history = History.start(task, seed, observation, self._live().volatile, row)
        return observation

    def step(self, action: Action) -> Observation:
        environment, history = self._live(), self._known()
        self._history = None  # what an exception leaves behind can't be told
        self.env_steps += 1
        observation = settled(environment.step(action))
        self._history = history.then(action, observation)
        return observation

    def digest(self) -> dict[str, str] | None:
        return self._live().digest()

    def snapshot(self) -> Snapshot:
        self._live()
        return ReplaySnapshot(self._make, self._known())

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
                self.replayed_steps += fork.env_steps
                fork.close()
            return error
        fork.replayed_steps, fork.env_steps = fork.env_steps, 0
        self.replayed_steps += fork.replayed_steps
        return fork

    def release(self) -> None:
        self._history = None
