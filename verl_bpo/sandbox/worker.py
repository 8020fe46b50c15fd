"""Where a world lives: a worker holds its sandboxes and snapshots under numbers."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from verl_bpo.sandbox.answers import received
from verl_bpo.sandbox.base import Observation, Row, Sandbox, Snapshot, SnapshotUnsupported
from verl_bpo.sandbox.errors import from_exception, to_exception
from verl_bpo.sandbox.line import Deadline
from verl_bpo.sandbox.loading import BACKENDS
from verl_bpo.sandbox.turns import Action


class Worker(Protocol):
    """One world at a time, wherever: here, in a child process, in a process of another machine."""

    def call(self, operation: str, *args: Any, timeout: float) -> Any:
        """What :class:`LocalWorker`'s method of that name answers.

        Raises:
            SandboxTimeout: nothing was answered in ``timeout`` seconds; the worker is gone.
            SandboxCrashed: it died.
            SandboxError, EnvironmentUnavailable: what the method raised.
        """

    def alive(self) -> bool:
        """Whether it can take a call. Asked before and after each, so it mustn't take time."""

    def stop(self) -> None: ...


class LocalWorker:
    """A worker in this process: nothing that dies alone, nothing to stop it. Other workers are one of these, and a line."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._initial: dict[tuple[str, int], tuple[Snapshot, Observation]] = {}
        self._backend = None

    def call(self, operation: str, *args: Any, timeout: float) -> Any:
        try:
            return self.perform(operation, args, timeout)
        except (Exception, SystemExit) as error:
            raise to_exception(*from_exception(error)) from error

    def alive(self) -> bool:
        return True

    def stop(self) -> None:
        if self._backend is not None:
            self._backend.close()

    def perform(self, operation: str, args: tuple, timeout: float) -> Any:
        """What :meth:`call` answers; raises whatever comes."""
        if self._backend is not None:
            self._backend.deadline = Deadline(timeout)
        return getattr(self, operation)(*args)

    @property
    def kept_processes(self) -> frozenset[int]:
        """Numbers of the processes that are no tree's."""
        return self._backend.processes

    # --- operations -------------------------------------------------------------------------------------------------

    def open(self, env: str, env_kwargs: dict[str, Any], backend: str) -> dict[str, str]:
        """Get ready for worlds of an environment; what it declares as volatile."""
        self._backend = BACKENDS.load(backend)(env, env_kwargs)
        return dict(self._backend.volatile)

    def reset(self, key: int, task: str, seed: int, row: Row | None = None) -> Observation:
        if (task, seed) in self._initial:
            snapshot, observation = self._initial[task, seed]
            (sandbox,) = snapshot.fork(1)
            if isinstance(sandbox, Exception):
                raise sandbox
        else:
            sandbox = self._backend.sandbox()
            try:
                observation = received(sandbox.reset(task, seed, row))
                if not self._backend.replays:
                    self._keep(sandbox, task, seed, observation)
            except BaseException:
                sandbox.close()
                raise
        self._objects[key] = sandbox
        return observation

    def step(self, key: int, action: Action) -> Observation:
        return received(self._objects[key].step(action))

    def digest(self, key: int) -> dict[str, str] | None:
        return self._objects[key].digest()

    def snapshot(self, key: int, snapshot_key: int) -> int | None:
        snapshot = self._objects[key].snapshot()
        self._objects[snapshot_key] = snapshot
        return snapshot.nbytes

    def fork(self, snapshot_key: int, keys: list[int]) -> tuple[list[int | tuple[str, str]], int]:
        """Per fork: the steps that were played again for it, or its error. And the steps played again for all of them."""
        snapshot = self._objects[snapshot_key]
        before, answers = snapshot.replayed_steps, []
        for key, fork in zip(keys, snapshot.fork(len(keys))):
            if isinstance(fork, Exception):
                answers.append(from_exception(fork))
            else:
                self._objects[key] = fork
                answers.append(fork.replayed_steps)
        return answers, snapshot.replayed_steps - before

    def drop(self, keys: list[int]) -> None:
        """Give back what is no longer needed. What fails in that is the environment's own matter: it is only told."""
        for key in keys:
            thing = self._objects.pop(key, None)
            if thing is not None:
                self._end(thing.close if isinstance(thing, Sandbox) else thing.release)

    def clear(self) -> None:
        """Give everything back, environments too: the next tree starts with a new one."""
        for snapshot, _ in self._initial.values():
            self._end(snapshot.release)
        self._initial.clear()
        self.drop(list(self._objects))
        self._end(self._backend.clear)

    def _keep(self, sandbox: Sandbox, task: str, seed: int, observation: Observation) -> None:
        # Where that can't be, each root sample gets a world of its own; who branches is told by its own snapshot.
        with contextlib.suppress(SnapshotUnsupported):
            self._initial[task, seed] = sandbox.snapshot(), observation

    @staticmethod
    def _end(end: Callable[[], None]) -> None:
        try:
            end()
        except Exception:
            traceback.print_exc()
