"""One tree's world: handles on the branches that live in a worker, which are rebuilt elsewhere when it dies."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl_bpo.sandbox.base import Observation, Row, Sandbox, SandboxCrashed, SandboxError, SandboxTimeout, Snapshot
from verl_bpo.sandbox.errors import to_exception
from verl_bpo.sandbox.history import History
from verl_bpo.sandbox.line import Deadline
from verl_bpo.sandbox.turns import Action
from verl_bpo.sandbox.worker import Worker

if TYPE_CHECKING:
    from verl_bpo.sandbox.pool import SandboxPool

logger = logging.getLogger(__name__)

_MOST_HUNG = 3
"""Calls in a row that may hang before a world is given up."""
_SLOWER = 3
"""Playing steps again may take so many times as long as they took at first."""
_MOST_LATE = 2
"""Forks of one request that may hang before those that weren't tried count as lost, too."""


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
        self._hung = 0
        """Calls in a row that had no answer in time, with no step answered in between."""
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

    @contextlib.contextmanager
    def _turn(self, task: str | None, turn: int) -> Iterator[None]:
        """Hold the lock for one branch's call; its errors say where they happened."""
        with self._lock:
            try:
                yield
            except SandboxError as error:
                where = "" if task is None else f"{self._pool.env}, task {task}, turn {turn}: "
                error.args = (f"{where}{error}",)
                if isinstance(error, SandboxTimeout):  # said at once: the next ones may cost as long
                    logger.warning("%s (%d hung in a row in this world)", error, self._hung)
                raise

    # What follows is called with the lock held.

    def _ready(self) -> None:
        """Make sure of a living worker that holds nothing needless; a new generation if the last one is found dead.

        Raises:
            SandboxTimeout: this world hangs again and again. Each try would cost its whole deadline.
        """
        if self._closed:
            raise SandboxError("this world is closed")
        if self._hung >= _MOST_HUNG:
            raise SandboxTimeout(f"{self._hung} calls in a row hung in this world: it is given up")
        if self._worker is not None and self._garbage:
            garbage = [self._garbage.popleft() for _ in range(len(self._garbage))]
            with contextlib.suppress(SandboxError):  # whoever calls now has no part in it
                self._call("drop", garbage, timeout=self._pool.step_timeout)
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
        except SandboxTimeout:
            self._hung += 1
            raise
        finally:
            if not self._worker.alive():
                self._lose_worker()

    def _rebuild(self, history: History) -> int:
        """A branch in the state that ``history`` leads to, in the present generation. All of it within ``reset_timeout``."""
        key, pool = next(self._ids), self._pool
        deadline = Deadline(pool.reset_timeout)

        def reset(*opening: Any) -> Observation:
            return self._call("reset", key, *opening, timeout=deadline.left())

        def step(action: Action) -> Observation:
            self.replayed_steps += 1
            return self._call("step", key, action, timeout=min(pool.step_timeout, deadline.left()))

        try:
            history.replay(reset, step)
        except TimeoutError:
            self._hung += 1
            self._garbage.append(key)
            raise SandboxTimeout(
                f"playing {len(history.actions)} steps again took longer than {pool.reset_timeout:g} s"
            ) from None
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
        with world._turn(task, 0):
            self._check_open()
            self._forget("its reset failed")
            world._ready()
            key = next(world._ids)
            started = time.monotonic()
            observation = world._call("reset", key, task, seed, row, timeout=world._pool.reset_timeout)
            self._key, self._generation = key, world.generation
            self._history = History.start(
                task, seed, observation, world._pool.volatile, row, time.monotonic() - started
            )
            return observation

    def step(self, action: Action) -> Observation:
        world = self._world
        with world._turn(self._task, self._turns + 1):
            self._wake()
            self.env_steps += 1
            started = time.monotonic()
            try:
                observation = world._call("step", self._key, action, timeout=world._pool.step_timeout)
            except SandboxError as error:
                self._forget(f"its last step failed ({error})")
                raise
            world._hung = 0
            self._history = self._history.then(action, observation, time.monotonic() - started)
            return observation

    def digest(self) -> dict[str, str] | None:
        world = self._world
        with world._turn(self._task, self._turns):
            self._wake()
            return world._call("digest", self._key, timeout=world._pool.step_timeout)

    def snapshot(self) -> Snapshot:
        world = self._world
        with world._turn(self._task, self._turns):
            self._wake()
            key = next(world._ids)
            nbytes = world._call("snapshot", self._key, key, timeout=world._pool.step_timeout)
            return _WorldSnapshot(world, key, self._history, nbytes)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._forget("it is closed")

    @property
    def _task(self) -> str | None:
        return None if self._history is None else self._history.task

    @property
    def _turns(self) -> int:
        return 0 if self._history is None else len(self._history.actions)

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
        world = self._world
        with world._lock:
            if self._released:
                raise SandboxError("this snapshot is released")
            together = count > 1 and not world._pool.backend.replays
            forks = self._fork(count) if together else []
            if not forks or all(isinstance(fork, SandboxTimeout) for fork in forks):  # then perhaps one of them hung
                forks, late = [], 0
                while len(forks) < count and late < _MOST_LATE:
                    forks += self._fork(1)
                    late += isinstance(forks[-1], SandboxTimeout)
                forks += [forks[-1]] * (count - len(forks))
            return forks

    def _fork(self, count: int) -> list[Sandbox | Exception]:
        """``count`` forks by one call, within one deadline."""
        world, pool = self._world, self._world._pool
        try:
            with world._turn(self._history.task, len(self._history.actions)):
                rebuilt = self._wake()
                keys = [next(world._ids) for _ in range(count)]
                timeout = pool.step_timeout
                if pool.backend.replays:  # one that hangs is told from one that takes its time again
                    timeout = min(pool.reset_timeout, timeout + _SLOWER * self._history.seconds)
                answers, replayed = world._call("fork", self._key, keys, timeout=timeout)
                if len(answers) != count:
                    raise SandboxError(f"{count} forks were asked for and {len(answers)} came")
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
