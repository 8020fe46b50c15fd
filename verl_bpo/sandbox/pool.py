"""Workers kept warm for the worlds of many trees, so that an environment that crashes, hangs or leaks loses one branch."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl_bpo.sandbox.base import SandboxError, SandboxTimeout
from verl_bpo.sandbox.loading import BACKENDS
from verl_bpo.sandbox.process import ProcessWorker
from verl_bpo.sandbox.worker import LocalWorker, Worker
from verl_bpo.sandbox.world import World

logger = logging.getLogger(__name__)


class SandboxPool:
    """Worlds of one environment for many trees, at most ``size`` at a time. Safe to use from many threads.

    Processes start when they are first needed, are reused between trees, and end with :meth:`close`, with the
    interpreter, or when this process dies.

    Args:
        env: name of the environment, see :mod:`verl_bpo.sandbox.loading`.
        env_kwargs: arguments of its constructor.
        backend: name of the snapshot backend, ``memory`` say.
        size: most worlds open at once; :meth:`open` waits for a free place.
        step_timeout: seconds that an action, a snapshot, the forks of one, or giving a tree back may take.
        reset_timeout: seconds that opening a task, starting a process, or playing a branch's actions again may take, each
            as a whole.
        place_timeout: seconds to wait for a place without one coming free.
        isolation: ``process``, or ``none``: worlds live in this process; timeouts and crashes aren't caught then.
        snapshot_bytes: what the snapshots of one world may take together, as far as the backend knows their size. Above
            it those that weren't used for longest are forgotten; a fork of one plays its actions again. None: any.
        memory_bytes: what a worker's process, and each that it starts, may have in memory of its own; None: any.
        growth_bytes: a worker that has grown by more than this since its first tree is renewed. None: never.
        worker_trees: a worker is renewed after so many trees. None: never.
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
        place_timeout: float = 3600.0,
        snapshot_bytes: int | None = None,
        memory_bytes: int | None = None,
        growth_bytes: int | None = None,
        worker_trees: int | None = None,
        make_worker: Callable[[], Worker] | None = None,
    ) -> None:
        if isolation not in ("process", "none"):
            raise ValueError(f"isolation={isolation!r}: use 'process' or 'none'")
        self.env, self.backend = env, BACKENDS.load(backend)
        self._make_worker = make_worker or (
            partial(ProcessWorker, memory_bytes) if isolation == "process" else LocalWorker
        )
        self.step_timeout, self.reset_timeout, self.place_timeout = step_timeout, reset_timeout, place_timeout
        self._growth_bytes, self._worker_trees = growth_bytes, worker_trees
        self.renewals = 0
        """Workers that were ended between two trees for what they had grown to, left behind or done."""
        self.snapshot_bytes = snapshot_bytes
        self.volatile: dict[str, str] = {}
        """The environment's own, once a worker has loaded it."""
        self._spec = (env, dict(env_kwargs or {}), backend)
        self._lock = threading.Lock()
        self._place_came_free = threading.Condition(self._lock)
        self._free, self._returned = size, 0
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()
        self._ages: dict[Worker, _Age] = {}
        self._closed = False
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def open(self) -> World:
        """One tree's world. Waits for a free place; close it (or use it as a context) to give the place back.

        Raises:
            EnvironmentUnavailable: there is no such environment here, or it doesn't take these arguments.
            SandboxTimeout: no place came free in ``place_timeout`` seconds.
            SandboxError: the pool is closed, or a process couldn't start.
        """
        self._take_place()
        try:
            return World(self, self._take())
        except BaseException:
            self._return_place()
            raise

    def _take_place(self) -> None:
        with self._lock:
            while self._free == 0 and not self._closed:
                returned = self._returned
                if not self._place_came_free.wait(self.place_timeout) and returned == self._returned:
                    raise SandboxTimeout(
                        f"all places of {self.env} were taken for {self.place_timeout:g} s and none came free: raise "
                        "bpo.env.workers or bpo.env.place_timeout"
                    )
            self._check_open()
            self._free -= 1

    def _return_place(self) -> None:
        with self._lock:
            self._free += 1
            self._returned += 1
            self._place_came_free.notify()

    def close(self) -> None:
        """End all processes. Worlds that are still open end with them. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            self._place_came_free.notify_all()
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
            self._ages.pop(worker, None)

    def _give_back(self, worker: Worker | None) -> None:
        """Take back a world's place, and its worker unless that died."""
        try:
            if worker is not None:
                try:
                    worn = self._worn(worker, worker.call("clear", timeout=self.step_timeout))
                except SandboxError as error:
                    logger.warning("%s: a worker is ended: %s", self.env, error)
                    self._discard(worker)
                else:
                    if worn:
                        logger.info("%s: a worker is renewed: %s", self.env, worn)
                        self.renewals += 1
                        self._discard(worker)
                    else:
                        with self._lock:
                            if not self._closed:
                                self._idle.append(worker)
        finally:
            self._return_place()

    def _worn(self, worker: Worker, census: dict[str, Any] | None) -> str:
        """Why a worker shouldn't take another tree; empty: it may. ``census``: what it said of itself after the last one."""
        if census is None:
            return ""
        age = self._ages.setdefault(worker, _Age(census["memory"]))
        age.trees += 1
        grown = census["memory"] - age.first_memory
        if census["left"]:
            return f"close() left {len(census['left'])} processes ({census['left'][0]}, ...)"
        if self._growth_bytes is not None and grown > self._growth_bytes:
            return f"it has grown by {grown >> 20} MB in {age.trees} trees"
        if self._worker_trees is not None and age.trees >= self._worker_trees:
            return f"it has had {age.trees} trees"
        return ""


@dataclass
class _Age:
    """What is known of a worker."""

    first_memory: int
    """After its first tree."""
    trees: int = 0


def _stop_all(workers: set[Worker]) -> None:
    for worker in list(workers):
        worker.stop()
    workers.clear()
