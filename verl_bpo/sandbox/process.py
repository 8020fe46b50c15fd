"""Worlds in child processes, so that an environment that crashes, hangs or leaks loses one branch and nothing else.

A :class:`SandboxHost` is one tree's world. The world itself lives in a worker (``worker.py``); the host gives out
handles and remembers for each the actions that led to its state, so that it can be rebuilt in a fresh worker by playing
them again. A :class:`SandboxPool` keeps workers warm between trees.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Protocol

from verl_bpo.sandbox.base import Observation, Sandbox, SandboxCrashed, SandboxError, Snapshot
from verl_bpo.sandbox.replay import History
from verl_bpo.sandbox.worker import BACKENDS, LocalWorker, ProcessWorker, to_exception


class Worker(Protocol):
    """A place where one world lives at a time, see :class:`verl_bpo.sandbox.worker.ProcessWorker`."""

    def call(self, operation: str, *args: Any, timeout: float) -> Any: ...

    def alive(self) -> bool:
        """Whether it can take a call. Asked before and after each, so it mustn't take time."""

    def stop(self) -> None: ...


_ISOLATIONS: dict[str, Callable[[], Worker]] = {"process": ProcessWorker, "none": LocalWorker}


class SandboxPool:
    """Worlds of one environment for many trees, at most ``size`` at a time. Safe to use from many threads.

    Processes start when they are first needed, are reused between trees, and end with :meth:`close`, with the
    interpreter, or when this process dies.

    Args:
        env: name of the environment, see :func:`verl_bpo.envs.load_environment`.
        env_kwargs: arguments of its constructor.
        backend: ``memory``, ``fork`` or ``replay``.
        size: most worlds open at once; :meth:`open` waits for a free place.
        step_timeout: seconds that an action, a snapshot or one fork may take.
        reset_timeout: seconds that opening a task, or starting a process, may take.
        isolation: ``process``, or ``none``: worlds live in this process; timeouts and crashes aren't caught then.
        snapshot_bytes: what the snapshots of one world may take together, as far as the backend knows their size. Above
            it those that weren't used for longest are forgotten; a fork of one plays its actions again. None: any.
        make_worker: makes the place where a world lives, instead of what ``isolation`` names. May raise SandboxError.
    """

    def __init__(
        self,
        env: str,
        env_kwargs: dict[str, Any] | None = None,
        backend: str = "memory",
        size: int = 2,
        step_timeout: float = 60.0,
        reset_timeout: float = 300.0,
        isolation: str = "process",
        snapshot_bytes: int | None = None,
        make_worker: Callable[[], Worker] | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}: use one of {', '.join(BACKENDS)}")
        if isolation not in _ISOLATIONS:
            raise ValueError(f"isolation={isolation!r}: use 'process' or 'none'")
        self.env, self.backend = env, backend
        self._make_worker = make_worker or _ISOLATIONS[isolation]
        self.step_timeout, self.reset_timeout = step_timeout, reset_timeout
        self.snapshot_bytes = snapshot_bytes
        self.volatile: dict[str, str] = {}
        """The environment's own, once a worker has loaded it."""
        self._spec = (env, dict(env_kwargs or {}), backend)
        self._places = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()
        self._closed = False
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def open(self) -> SandboxHost:
        """One tree's world. Waits for a free place; close it (or use it as a context) to give the place back.

        Raises:
            EnvironmentUnavailable: there is no such environment here, or it doesn't take these arguments.
            SandboxError: the pool is closed, or a process couldn't start.
        """
        self._places.acquire()
        try:
            return SandboxHost(self, self._take())
        except BaseException:
            self._places.release()
            raise

    def close(self) -> None:
        """End all processes. Worlds that are still open end with them. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._idle.clear()
        self._finalizer()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self) -> Worker:
        """A worker with nothing in it: a warm one that is still alive, else a new one."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return self._start()
            if worker.alive():
                return worker
            self._discard(worker)

    def _start(self) -> Worker:
        self._check_open()
        worker = self._make_worker()
        with self._lock:
            self._workers.add(worker)
        try:
            self._check_open()  # or close() came too early to end it
            self.volatile = worker.call("open", *self._spec, timeout=self.reset_timeout)
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox pool is closed")

    def _discard(self, worker: Worker) -> None:
        worker.stop()
        with self._lock:
            self._workers.discard(worker)

    def _give_back(self, worker: Worker | None) -> None:
        """Take back a host's place, and its worker unless that died."""
        try:
            if worker is not None:
                try:
                    worker.call("clear", timeout=self.step_timeout)
                except SandboxError:
                    self._discard(worker)
                else:
                    with self._lock:
                        if not self._closed:
                            self._idle.append(worker)
        finally:
            self._places.release()


class SandboxHost:
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
        """Server objects that nobody needs any more; they go with the next call, so that closing never waits."""
        self.generation = 0
        """Counts the processes that this world has lived in."""
        self.recoveries = 0
        """Fresh processes that were started because one had died."""
        self.evictions = 0
        """Snapshots that were forgotten to stay within the pool's ``snapshot_bytes``."""
        self._kept: OrderedDict[_HostedSnapshot, int] = OrderedDict()
        """Snapshots that the worker holds and their bytes, the one used last at the end."""

    def reset(self, task: str, seed: int = 0) -> tuple[Sandbox, Observation]:
        """A sandbox in the task's initial state, and what is seen there.

        Except with the ``replay`` backend the initial state is kept: the same task and seed again costs a fork, not a reset.

        Raises:
            TaskError: the task can't be opened.
            SandboxTimeout, SandboxCrashed: see the class.
        """
        sandbox = _HostedSandbox(self)
        return sandbox, sandbox.reset(task, seed)

    def close(self) -> None:
        """Give the place in the pool back. It ends this world's sandboxes. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            worker, self._worker = self._worker, None
            self._pool._give_back(worker)

    def __enter__(self) -> SandboxHost:
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

    def _keep(self, snapshot: _HostedSnapshot) -> None:
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

    def _reset(self, key: int, task: str, seed: int) -> Observation:
        return self._call("reset", key, task, seed, timeout=self._pool.reset_timeout)

    def _step(self, key: int, action: str) -> Observation:
        return self._call("step", key, action, timeout=self._pool.step_timeout)

    def _rebuild(self, history: History) -> int:
        """A branch in the state that ``history`` leads to, in the present generation."""
        key = next(self._ids)
        try:
            history.replay(lambda task, seed: self._reset(key, task, seed), lambda action: self._step(key, action))
        except BaseException:
            self._garbage.append(key)
            raise
        return key


class _HostedSandbox(Sandbox):
    """A handle on a branch that lives in a host's worker."""

    def __init__(self, host: SandboxHost, key: int | None = None, history: History | None = None) -> None:
        self._host = host
        self._key = key
        self._generation = host.generation
        self._history = history
        self._lost = "it was never reset"
        self._closed = False
        self.capabilities = BACKENDS[host._pool.backend].capabilities
        self.env_steps = 0
        self.replayed_steps = 0
        """Steps that were played again to bring this branch into its state; not in ``env_steps``."""

    def reset(self, task: str, seed: int = 0) -> Observation:
        host = self._host
        with host._lock:
            self._check_open()
            self._forget("its reset failed")
            host._ready()
            key = next(host._ids)
            observation = host._reset(key, task, seed)
            self._key, self._generation = key, host.generation
            self._history = History.start(task, seed, observation, host._pool.volatile)
            return observation

    def step(self, action: str) -> Observation:
        host = self._host
        with host._lock:
            self._wake()
            try:
                observation = host._step(self._key, action)
            except SandboxError as error:
                self._forget(f"its last step failed ({error})")
                raise
            self._history = self._history.then(action, observation)
            self.env_steps += 1
            return observation

    def snapshot(self) -> Snapshot:
        host = self._host
        with host._lock:
            self._wake()
            key = next(host._ids)
            nbytes = host._call("snapshot", self._key, key, timeout=host._pool.step_timeout)
            return _HostedSnapshot(host, key, self._history, nbytes)

    def fork(self, snapshot: Snapshot, count: int = 1) -> list[Sandbox | Exception]:
        """``count`` branches in the snapshot's state. The sandbox itself may be closed already."""
        if not isinstance(snapshot, _HostedSnapshot) or snapshot._host is not self._host:
            raise TypeError("this snapshot was taken in another world")
        return snapshot.fork(count)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._forget("it is closed")

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox is closed")

    def _forget(self, why: str) -> None:
        if self._key is not None:
            self._host._garbage.append(self._key)
        self._key, self._history, self._lost = None, None, why

    def _wake(self) -> None:
        """Make sure that the worker has this branch."""
        self._check_open()
        if self._history is None:
            raise SandboxError(f"this branch has no state to go on from: {self._lost}")
        host = self._host
        host._ready()
        if self._generation != host.generation:
            self._key = host._rebuild(self._history)
            self._generation = host.generation
            self.replayed_steps += len(self._history.actions)


class _HostedSnapshot(Snapshot):
    """A handle on a snapshot that lives in a host's worker."""

    def __init__(self, host: SandboxHost, key: int, history: History, nbytes: int | None) -> None:
        self._host, self._key, self._history = host, key, history
        self._generation = host.generation
        self._released = False
        self.nbytes = nbytes
        host._keep(self)

    def fork(self, count: int) -> list[Sandbox | Exception]:
        host, pool = self._host, self._host._pool
        with host._lock:
            if self._released:
                raise SandboxError("this snapshot is released")
            try:
                self._wake()
                keys = [next(host._ids) for _ in range(count)]
                each = pool.step_timeout
                if pool.backend == "replay":
                    each = pool.reset_timeout + len(self._history.actions) * pool.step_timeout
                answers = host._call("fork", self._key, keys, timeout=count * each)
            except SandboxError as error:
                return [error] * count
            forks: list[Sandbox | Exception] = []
            for key, answer in zip(keys, answers):
                if isinstance(answer, int):
                    forks.append(fork := _HostedSandbox(host, key, self._history))
                    fork.replayed_steps = answer
                else:
                    forks.append(to_exception(*answer))
            return forks

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._host._kept.pop(self, None)
            self._host._garbage.append(self._key)

    def _evict(self) -> None:
        self._host._garbage.append(self._key)
        self._generation = -1  # of no process: a fork builds it anew

    def _wake(self) -> None:
        host = self._host
        host._ready()
        if self._generation != host.generation:
            branch = host._rebuild(self._history)
            key = next(host._ids)
            host._call("snapshot", branch, key, timeout=host._pool.step_timeout)
            host._garbage.append(branch)
            self._key, self._generation = key, host.generation
        host._keep(self)


def _stop_all(workers: set[Worker]) -> None:
    for worker in list(workers):
        worker.stop()
    workers.clear()
