"""One tree's world: handles on the branches that live in a worker, which are rebuilt elsewhere when it dies."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_bpo.sandbox.base import Observation, Row, Sandbox, SandboxCrashed, SandboxError, Snapshot
from verl_bpo.sandbox.errors import to_exception
from verl_bpo.sandbox.history import History
from verl_bpo.sandbox.turns import Action
from verl_bpo.sandbox.worker import Worker

if TYPE_CHECKING:
    from verl_bpo.sandbox.pool import SandboxPool


class World:
    """One tree's world. Its sandboxes may be used from several threads; their calls take turns.

    When a call kills the process (a crash, a timeout), the branch that made it is lost. The others notice nothing: at
    their next call they are rebuilt in a fresh process from their own actions, and what the world answers is compared
    with what it answered before.
    """

    def __init__(self, pool: SandboxPool, worker: Worker) -> None:
        self._pool = pool
        self._worker: Worker | None = worker
        self._lock = threading.RLock()
        self._closed = False
        self._ids = itertools.count()
        self._garbage: deque[int] = deque()
        """What the worker holds and nobody needs any more; it goes with the next call, so that closing never waits."""
        self.generation = 0
        """Counts the processes that this world has lived in."""
        self.recoveries = 0
        """Fresh processes that were started because one had died."""
        self.replayed_steps = 0
        """Steps that were executed again to get back to a state: by forks, where the backend replays, or by a rebuild."""
        self.evictions = 0
        """Snapshots that were forgotten to stay within the pool's ``snapshot_bytes``."""
        self._kept: OrderedDict[_WorldSnapshot, int] = OrderedDict()
        """Snapshots that the worker holds and their bytes, the one used last at the end."""

    def reset(self, task: str, seed: int = 0, row: Row | None = None) -> tuple[Sandbox, Observation]:
        """A sandbox in the task's initial state, and what is seen there.

        Except with the ``replay`` backend the initial state is kept: the same task and seed again costs a fork, not a reset.

        Raises:
            TaskError: the task can't be opened.
            SandboxTimeout, SandboxCrashed: see the class.
        """
        sandbox = _WorldSandbox(self)
        return sandbox, sandbox.reset(task, seed, row)

    @property
    def volatile(self) -> Mapping[str, str]:
        """What the environment declares as such."""
        return self._pool.volatile

    def close(self) -> None:
        """Give the place in the pool back. It ends this world's sandboxes. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            worker, self._worker = self._worker, None
            self._pool._give_back(worker)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # What follows is called with the lock held.

    def _ready(self) -> None:
        """Make sure of a living worker that holds nothing needless; a new generation if the last one is found dead."""
        if self._closed:
            raise SandboxError("this world is closed")
        if self._worker is not None and self._garbage:
            garbage = [self._garbage.popleft() for _ in range(len(self._garbage))]
            with contextlib.suppress(SandboxError):  # whoever calls now has no part in it
                self._worker.call("drop", garbage, timeout=self._pool.step_timeout)
        if self._worker is not None and not self._worker.alive():
            self._lose_worker()
        if self._worker is None:
            self._worker = self._pool._take()
            self.recoveries += 1

    def _keep(self, snapshot: _WorldSnapshot) -> None:
        """Note that a snapshot is used now, and make room for it."""
        self._kept[snapshot] = snapshot.nbytes or 0
        self._kept.move_to_end(snapshot)
        limit = self._pool.snapshot_bytes
        while limit is not None and len(self._kept) > 1 and sum(self._kept.values()) > limit:
            oldest, _ = self._kept.popitem(last=False)
            oldest._evict()
            self.evictions += 1

    def _lose_worker(self) -> None:
        self._pool._discard(self._worker)
        self._worker = None
        self._kept.clear()
        self.generation += 1

    def _call(self, operation: str, *args: Any, timeout: float) -> Any:
        """Ask the worker that :meth:`_ready` made sure of."""
        if self._worker is None:
            raise SandboxCrashed("the environment's process died before")
        try:
            return self._worker.call(operation, *args, timeout=timeout)
        finally:
            if not self._worker.alive():
                self._lose_worker()

    def _reset(self, key: int, task: str, seed: int, row: Row | None) -> Observation:
        return self._call("reset", key, task, seed, row, timeout=self._pool.reset_timeout)

    def _step(self, key: int, action: Action) -> Observation:
        return self._call("step", key, action, timeout=self._pool.step_timeout)

    def _rebuild(self, history: History) -> int:
        """A branch in the state that ``history`` leads to, in the present generation."""
        key = next(self._ids)

        def step(action: Action) -> Observation:
            self.replayed_steps += 1
            return self._step(key, action)

        try:
            history.replay(lambda *opening: self._reset(key, *opening), step)
        except BaseException:
            self._garbage.append(key)
            raise
        return key


class _WorldSandbox(Sandbox):
    """A handle on a branch that lives in the worker."""

    def __init__(self, world: World, key: int | None = None, history: History | None = None) -> None:
        self._world = world
        self._key = key
        self._generation = world.generation
        self._history = history
        self._lost = "it was never reset"
        self._closed = False

    def reset(self, task: str, seed: int = 0, row: Row | None = None) -> Observation:
        world = self._world
        with world._lock:
            self._check_open()
            self._forget("its reset failed")
            world._ready()
            key = next(world._ids)
            observation = world._reset(key, task, seed, row)
            self._key, self._generation = key, world.generation
            self._history = History.start(task, seed, observation, world._pool.volatile, row)
            return observation

    def step(self, action: Action) -> Observation:
        world = self._world
        with world._lock:
            self._wake()
            self.env_steps += 1
            try:
                observation = world._step(self._key, action)
            except SandboxError as error:
                self._forget(f"its last step failed ({error})")
                raise
            self._history = self._history.then(action, observation)
            return observation

    def digest(self) -> dict[str, str] | None:
        world = self._world
        with world._lock:
            self._wake()
            return world._call("digest", self._key, timeout=world._pool.step_timeout)

    def snapshot(self) -> Snapshot:
        world = self._world
        with world._lock:
            self._wake()
            key = next(world._ids)
            nbytes = world._call("snapshot", self._key, key, timeout=world._pool.step_timeout)
            return _WorldSnapshot(world, key, self._history, nbytes)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._forget("it is closed")

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox is closed")

    def _forget(self, why: str) -> None:
        if self._key is not None:
            self._world._garbage.append(self._key)
        self._key, self._history, self._lost = None, None, why

    def _wake(self) -> None:
        """Make sure that the worker has this branch."""
        self._check_open()
        if self._history is None:
            raise SandboxError(f"this branch has no state to go on from: {self._lost}")
        world = self._world
        world._ready()
        if self._generation != world.generation:
            self._key = world._rebuild(self._history)
            self._generation = world.generation
            self.replayed_steps += len(self._history.actions)


class _WorldSnapshot(Snapshot):
    """A handle on a snapshot that lives in the worker."""

    def __init__(self, world: World, key: int, history: History, nbytes: int | None) -> None:
        self._world, self._key, self._history = world, key, history
        self._generation = world.generation
        self._released = False
        self.nbytes = nbytes
        world._keep(self)

    def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        world, pool = self._world, self._world._pool
        with world._lock:
            if self._released:
                raise SandboxError("this snapshot is released")
            try:
                rebuilt = self._wake()
                keys = [next(world._ids) for _ in range(count)]
                each = pool.step_timeout
                if pool.backend.replays:
                    each = pool.reset_timeout + len(self._history.actions) * pool.step_timeout
                answers, replayed = world._call("fork", self._key, keys, timeout=count * each)
            except SandboxError as error:
                return [error] * count
            world.replayed_steps += replayed
            forks: list[Sandbox | Exception] = []
            for key, answer in zip(keys, answers):
                if isinstance(answer, int):
                    forks.append(fork := _WorldSandbox(world, key, self._history))
                    fork.replayed_steps, rebuilt = answer + rebuilt, 0  # the first fork is the one that asked for it
                else:
                    forks.append(to_exception(*answer))
            return forks

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._world._kept.pop(self, None)
            self._world._garbage.append(self._key)

    def _evict(self) -> None:
        self._world._garbage.append(self._key)
        self._generation = -1  # of no process: a fork builds it anew

    def _wake(self) -> int:
        """Make sure that the worker has this snapshot; the steps that were executed again for it."""
        world, rebuilt = self._world, 0
        world._ready()
        if self._generation != world.generation:
            branch = world._rebuild(self._history)
            rebuilt = len(self._history.actions)
            key = next(world._ids)
            world._call("snapshot", branch, key, timeout=world._pool.step_timeout)
            world._garbage.append(branch)
            self._key, self._generation = key, world.generation
        world._keep(self)
        return rebuilt
