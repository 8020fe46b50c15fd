"""Workers kept warm for the worlds of many trees, so that an environment that crashes, hangs or leaks loses one branch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from verl_bpo.sandbox.base import SandboxError
from verl_bpo.sandbox.loading import BACKENDS
from verl_bpo.sandbox.process import ProcessWorker
from verl_bpo.sandbox.worker import LocalWorker, Worker
from verl_bpo.sandbox.world import World

_ISOLATIONS: dict[str, Callable[[], Worker]] = {"process": ProcessWorker, "none": LocalWorker}


class SandboxPool:
    """Worlds of one environment for many trees, at most ``size`` at a time. Safe to use from many threads.

    Processes start when they are first needed, are reused between trees, and end with :meth:`close`, with the
    interpreter, or when this process dies.

    Args:
        env: name of the environment, see :mod:`verl_bpo.sandbox.loading`.
        env_kwargs: arguments of its constructor.
        backend: name of the snapshot backend, ``memory`` say.
        size: most worlds open at once; :meth:`open` waits for a free place.
        step_timeout: seconds that an action, a snapshot or one fork may take.
        reset_timeout: seconds that opening a task, or starting a process, may take.
        isolation: ``process``, or ``none``: worlds live in this process; timeouts and crashes aren't caught then.
        snapshot_bytes: what the snapshots of one world may take together, as far as the backend knows their size. Above
            it those that weren't used for longest are forgotten; a fork of one plays its actions again. None: any.
        make_worker: makes the place where a world lives, instead of what ``isolation`` names. May raise SandboxError.

    Raises:
        EnvironmentUnavailable: there is no such backend.
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
        if isolation not in _ISOLATIONS:
            raise ValueError(f"isolation={isolation!r}: use 'process' or 'none'")
        self.env, self.backend = env, BACKENDS.load(backend)
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

    def open(self) -> World:
        """One tree's world. Waits for a free place; close it (or use it as a context) to give the place back.

        Raises:
            EnvironmentUnavailable: there is no such environment here, or it doesn't take these arguments.
            SandboxError: the pool is closed, or a process couldn't start.
        """
        self._places.acquire()
        try:
            return World(self, self._take())
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
        """Take back a world's place, and its worker unless that died."""
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


def _stop_all(workers: set[Worker]) -> None:
    for worker in list(workers):
        worker.stop()
    workers.clear()
