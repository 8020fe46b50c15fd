"""Sandboxes on other machines: their processes live in Ray actors, and Ray's scheduler says where.

A :class:`SandboxActor` holds the processes of several worlds, each a :class:`verl_bpo.sandbox.process.ProcessWorker` as
a local pool has them: a world that crashes or hangs ends alone, and a snapshot stays in the process that took it.
:class:`RayWorkers` makes the pool's side of them. Calls block their thread, so they are made from the rollout's thread pool,
like those of local sandboxes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from verl_bpo.generation.pools import Pools, memory_bytes
from verl_bpo.sandbox.answers import failure, read_answer
from verl_bpo.sandbox.base import SandboxCrashed, SandboxError, SandboxTimeout
from verl_bpo.sandbox.loading import EnvironmentUnavailable
from verl_bpo.sandbox.process import ProcessWorker

if TYPE_CHECKING:
    from verl_bpo.config.worlds import EnvConfig, PlacementConfig

logger = logging.getLogger(__name__)

_GRACE = 30.0
"""Seconds beside a call's own after which an actor counts as dead."""


class SandboxActor:
    """The actor. It holds processes by number and passes on what they answer. Its end, however it comes, is theirs."""

    def __init__(self) -> None:
        self._workers: dict[int, ProcessWorker] = {}
        self._numbers = itertools.count()

    def start(self, memory_bytes: int | None) -> int | str:
        """The number of a new process, or why there is none."""
        number = next(self._numbers)
        try:
            self._workers[number] = ProcessWorker(memory_bytes)
        except OSError as error:  # of processes, files, memory: this one's place is lost, not what lives here
            return str(error)
        return number

    def ask(self, number: int, operation: str, args: tuple, timeout: float) -> tuple[bytes, bool]:
        """The answer as the process gave it, and whether the process still lives."""
        worker = self._workers.get(number)
        if worker is None:
            return failure(SandboxCrashed(f"the process was ended before {operation}")), False
        try:
            answer = worker.ask(operation, *args, timeout=timeout)
        except Exception as error:
            answer = failure(error)
        return answer, worker.alive()

    def watch(self, number: int) -> None:
        """Return when the process has ended."""
        self._workers[number].wait()

    def stop(self, number: int) -> None:
        worker = self._workers.pop(number, None)
        if worker is not None:
            worker.stop()


class RayWorkers:
    """Makes workers (see :class:`verl_bpo.sandbox.SandboxPool`) whose processes live in Ray actors.

    Actors start when they are first needed, hold up to ``placement.worlds`` processes each, and end with :meth:`close`, with
    this object, or when the process that made them dies. One that dies is replaced when its place is needed.
    """

    def __init__(self, placement: PlacementConfig, memory_bytes: int | None = None) -> None:
        self.placement, self._memory_bytes = placement, memory_bytes
        self._lock = threading.Lock()
        self._actors: list[_Actor] = []
        self._lost = 0
        self._finalizer = weakref.finalize(self, _end_all, self._actors)

    def __call__(self) -> RayWorker:
        """
        Raises:
            EnvironmentUnavailable: Ray found no place for an actor; says what was asked for and what there is.
            SandboxError: the same after an actor was lost: its node may come back, so it's no reason to end a run.
        """
        actor = self._with_room()
        try:
            number = ray.get(actor.handle.start.remote(self._memory_bytes), timeout=self.placement.start_timeout)
        except GetTimeoutError as error:
            self._drop(actor, error if actor.placed else None)
            if actor.placed:
                raise SandboxTimeout(
                    f"a sandbox actor started no process in {self.placement.start_timeout:g} s: it was killed"
                ) from error
            raise (SandboxError if self._lost else EnvironmentUnavailable)(self._no_place()) from None
        except RayError as error:
            self._drop(actor, error)
            raise SandboxCrashed(f"a sandbox actor died as it started a process: {_line(error)}") from error
        actor.placed = True
        if isinstance(number, str):
            self._leave(actor)
            raise SandboxError(
                f"no process could be started in a sandbox actor: {number}: lower bpo.env.placement.worlds"
            )
        return RayWorker(self, actor, number)

    def close(self) -> None:
        """End all actors and what lives in them. Safe to call twice."""
        self._finalizer()

    def _with_room(self) -> _Actor:
        """An actor with a place, which is now taken. May not be running yet."""
        with self._lock:
            actor = next((a for a in self._actors if a.worlds < self.placement.worlds), None)
            if actor is None:
                self._actors.append(actor := _Actor(self.placement))
            actor.worlds += 1
            return actor

    def _leave(self, actor: _Actor) -> None:
        with self._lock:
            actor.worlds -= 1

    def _drop(self, actor: _Actor, why: Exception | None = None) -> None:
        """Do without an actor that never came (``why`` is None), that died or doesn't answer."""
        with self._lock:
            if actor not in self._actors:
                return
            self._actors.remove(actor)
            self._lost += why is not None
        if why is not None:
            logger.warning("lost a sandbox actor and the %d worlds in it: %s", actor.worlds, _line(why))
        actor.end()

    def _no_place(self) -> str:
        placement, asked = self.placement, self.placement.asked
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fits = sum(all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in nodes)
        names = ", ".join(f"{name}={sum(node.get(name, 0) for node in nodes):g}" for name in asked)
        if fits:
            why = f"{fits} of {len(nodes)} nodes are large enough but full; {len(self._actors)} such actors run here"
            advice = "add nodes, lower bpo.env.workers, or raise bpo.env.placement.worlds"
        else:
            why = f"none of {len(nodes)} nodes is large enough; all together have {names}"
            advice = "start nodes with it (ray start --resources=...), or ask for less in bpo.env.placement"
        wanted = ", ".join(f"{name}={amount:g}" for name, amount in asked.items())
        return f"Ray found no place for a sandbox actor ({wanted}) in {placement.start_timeout:g} s: {why}: {advice}"


class PlacedPools(Pools):
    """Pools whose worlds live where ``spec.placement`` says."""

    def __init__(self, spec: EnvConfig) -> None:
        self._ray = RayWorkers(spec.placement, memory_bytes(spec)) if spec.placement.where == "ray" else None
        super().__init__(spec, make_worker=self._ray)

    def close(self) -> None:
        super().close()
        if self._ray is not None:
            self._ray.close()


class RayWorker:
    """One process in an actor. One call at a time."""

    def __init__(self, workers: RayWorkers, actor: _Actor, number: int) -> None:
        self._workers, self._actor, self._number = workers, actor, number
        self._end = actor.handle.watch.remote(number).future()
        """Done when the process has ended, or its actor or node."""
        self._dead = self._stopped = False

    def call(self, operation: str, *args: Any, timeout: float) -> Any:
        """The worker's answer.

        Raises:
            SandboxTimeout: there was none in ``timeout`` seconds; the process is killed.
            SandboxCrashed: the process, its actor or its node died.
            SandboxError, EnvironmentUnavailable: what the worker raised.
        """
        try:
            asked = self._actor.handle.ask.remote(self._number, operation, args, timeout)
            answer, lives = ray.get(asked, timeout=timeout + _GRACE)
        except GetTimeoutError as error:
            self._lose_actor(error)
            raise SandboxTimeout(
                f"{operation}: the sandbox's actor gave no answer in {timeout + _GRACE:g} s: it was killed"
            ) from error
        except ActorUnavailableError as error:  # it may live on, and whether it heard the call can't be told
            self._dead = True
            raise SandboxCrashed(f"the sandbox's actor couldn't be reached for {operation}: {_line(error)}") from error
        except RayError as error:
            self._lose_actor(error)
            raise SandboxCrashed(f"the sandbox's actor died during {operation}: {_line(error)}") from error
        except BaseException:
            self._dead = True  # an answer that nobody waited for would be taken for the next call's
            raise
        self._dead = not lives
        return read_answer(answer, operation)

    def alive(self) -> bool:
        return not (self._dead or self._end.done())

    def stop(self) -> None:
        """End the process and what it started. Safe to call twice."""
        if self._stopped:
            return
        self._stopped = self._dead = True
        if self._actor.ended or not ray.is_initialized():
            return
        try:
            ray.get(self._actor.handle.stop.remote(self._number), timeout=_GRACE)
        except RayError as error:
            self._lose_actor(error)
        else:
            self._workers._leave(self._actor)

    def _lose_actor(self, why: Exception) -> None:
        self._dead = True
        self._workers._drop(self._actor, why)


class _Actor:
    """This side of one actor."""

    def __init__(self, placement: PlacementConfig) -> None:
        self.worlds = 0
        """Processes in it, or about to be."""
        self.placed = self.ended = False
        """Whether Ray has found a node for it; whether it is done with."""
        self.handle = (
            ray.remote(SandboxActor)
            .options(
                num_cpus=placement.num_cpus,
                num_gpus=0,
                resources=placement.resources or None,
                scheduling_strategy=placement.strategy,
                max_concurrency=2 * placement.worlds + 2,  # a call and a watch for each, and starts and stops
                max_restarts=0,  # what lived in it is gone; the pool rebuilds it from its actions
            )
            .remote()
        )

    def end(self) -> None:
        self.ended = True
        if ray.is_initialized():
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self.handle)


def _end_all(actors: list[_Actor]) -> None:
    for actor in actors:
        actor.end()
    actors.clear()


def _line(error: BaseException) -> str:
    """An error of Ray's in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
