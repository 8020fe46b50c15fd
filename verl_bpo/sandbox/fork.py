"""Each branch is a process, and a snapshot is one that waits.

For any Python environment that can neither save its state nor be copied. What is captured is the memory of the process,
page by page and only when it changes. What isn't: threads, child processes and connections (an environment that has
them is refused, with the reason) and the contents of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import random
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from verl_bpo.sandbox.answers import LARGEST, failure, read_answer, received, success
from verl_bpo.sandbox.asynchronous import settled_here
from verl_bpo.sandbox.base import (
    Backend,
    Environment,
    Observation,
    Row,
    Sandbox,
    SandboxCrashed,
    SandboxError,
    SandboxTimeout,
    Snapshot,
    SnapshotUnsupported,
    opened,
)
from verl_bpo.sandbox.family import become_subreaper, end_descendants
from verl_bpo.sandbox.line import Deadline, Line, TooLong
from verl_bpo.sandbox.loading import EnvironmentMaker
from verl_bpo.sandbox.turns import Action

BACKEND = "ForkBackend"

_END_SECONDS = 5.0
"""Within which all branches have to be gone."""

_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
_ONE_THREAD["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow
"""Threads don't survive a fork, so libraries that make some at import shouldn't."""


class ForkBackend(Backend):
    """The process that all branches of one environment descend from. It makes the environment and never plays it.

    It is a fresh interpreter, not a fork of this one with its threads and locks. When it ends, or this process does,
    all branches end.
    """

    keeps_deadlines = True

    def __init__(self, env: str, env_kwargs: Mapping[str, Any] | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            specification = json.dumps([sys.path, env, dict(env_kwargs or {}), theirs.fileno()])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, specification],
                env={**_ONE_THREAD, **os.environ},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # so that the whole family can be killed at once
            )
        self.processes = frozenset({self._process.pid})
        self._first = _Process(self, Line(ours), self._process.pid)
        try:
            self.volatile = self._first.receive("open")
        except BaseException:
            self.close()
            raise

    def sandbox(self) -> ForkSandbox:
        return ForkSandbox(self._first.branch(family=[0]))

    def close(self) -> None:
        """End all branches and snapshots. Safe to call twice."""
        self.deadline = Deadline(_END_SECONDS)
        self._first.close()
        try:
            self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_END_SECONDS)


class ForkSandbox(Sandbox):
    """A branch: a process with an environment in it. Made by the backend or by a fork.

    A call in which the process dies raises :class:`SandboxCrashed`, one that outlasts the backend's deadline kills it and
    raises :class:`SandboxTimeout`; no other branch notices.
    """

    def __init__(self, process: _Process) -> None:
        self._process = process

    def reset(self, task: str, seed: int = 0, row: Row | None = None) -> Observation:
        return self._process.call("reset", task, seed, row)

    def step(self, action: Action) -> Observation:
        self.env_steps += 1
        return self._process.call("step", action)

    def digest(self) -> dict[str, str] | None:
        return self._process.call("digest")

    def snapshot(self) -> Snapshot:
        return ForkSnapshot(self._process.branch())

    def close(self) -> None:
        self._process.close()


class ForkSnapshot(Snapshot):
    """A process that waits in one state."""

    def __init__(self, process: _Process) -> None:
        self._process = process

    def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        if self._process.closed:
            raise SandboxError("this snapshot is released")
        forks: list[Sandbox | Exception] = []
        for _ in range(count):
            try:
                forks.append(ForkSandbox(self._process.branch()))
            except SandboxError as error:
                forks.append(error)
        return forks

    def release(self) -> None:
        self._process.close()


class _Process:
    """This side of one process. ``family`` counts those of one world."""

    def __init__(self, backend: ForkBackend, line: Line, pid: int, family: list[int] | None = None) -> None:
        self._backend, self._line, self._pid, self._lock = backend, line, pid, threading.Lock()
        self._family = [0] if family is None else family
        self._family[0] += 1
        self._killed = self.closed = False

    def call(self, operation: str, *arguments: Any) -> Any:
        with self._lock:
            self._send(operation, arguments)
            return self.receive(operation)

    def branch(self, family: list[int] | None = None) -> _Process:
        """A new process, which is a copy of this one."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                self._send("branch", (), theirs.fileno())
                pid = self.receive("branch")
        except BaseException:
            ours.close()
            raise
        return _Process(self._backend, Line(ours), pid, self._family if family is None else family)

    def _send(self, operation: str, arguments: tuple, passed: int | None = None) -> None:
        if self.closed:
            raise SandboxError("this sandbox is closed")
        if self._killed:
            raise SandboxCrashed("the environment's process was killed before")
        with self._in_time(operation) as deadline:
            self._line.send(pickle.dumps((operation, arguments)), deadline, passed)

    def receive(self, operation: str) -> Any:
        with self._in_time(operation) as deadline:
            answer = self._line.receive(deadline, LARGEST)
        return read_answer(answer, operation)

    @contextlib.contextmanager
    def _in_time(self, operation: str) -> Iterator[Deadline]:
        deadline = self._backend.deadline
        try:
            yield deadline
        except TimeoutError:
            self._kill()
            raise SandboxTimeout(
                f"{operation} took longer than {deadline.seconds:g} s: its process was killed"
            ) from None
        except TooLong as error:
            self._kill()
            raise SandboxError(f"the answer to {operation} is too long ({error}): its process was killed") from None
        except (EOFError, OSError) as error:
            raise SandboxCrashed(f"the environment's process died during {operation} ({error})") from error
        except BaseException:
            self._kill()  # an answer that nobody waited for would be taken for the next call's
            raise

    def _kill(self) -> None:
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process. The last one of its world closes the environment first: all share what it holds."""
        if self.closed:
            return
        self._family[0] -= 1
        try:
            if self._family[0] == 0:
                self.call("close")
        except SandboxCrashed:
            pass
        finally:
            self.closed = True
            self._line.close()  # where nobody can ask, the process ends by itself


# --- in the processes -------------------------------------------------------------------------------------------------

_START = (
    "import sys, json; spec = json.loads(sys.argv[1]); sys.path[:] = spec[0]; "
    "from verl_bpo.sandbox.fork import serve; serve(*spec[1:])"
)


def serve(env: str, env_kwargs: dict[str, Any], descriptor: int) -> None:
    """That first process's whole life."""
    os.dup2(2, 1)  # what environments print is no result
    os.set_inheritable(descriptor, False)
    line = Line(socket.socket(fileno=descriptor))
    try:
        make = EnvironmentMaker(env, env_kwargs)
        environment = make()
    except (Exception, SystemExit) as error:
        line.send(failure(error))
        return
    become_subreaper()  # orphaned branches are ended and reaped here
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    _use_huge_pages()
    branch = _Branch(environment, line, spare=(wake, waker))
    line.send(success(make.volatile))
    while True:
        ready, _, _ = select.select([line, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap()
        if line in ready and not branch.serve_one():
            end_descendants()
            os._exit(0)


class _Branch:
    """One process's environment and its line. :meth:`serve_one` returns in the child, too, as that child's branch."""

    def __init__(self, environment: Environment, line: Line, spare: tuple[int, ...] = ()) -> None:
        self.environment, self.line, self.spare = environment, line, spare
        self.children: set[int] = set()
        """Forks that this process made; they are branches, not the environment's own children."""

    def serve_one(self) -> bool:
        """Answer one request; False when nobody will ask again."""
        passed: list[int] = []
        try:
            operation, arguments = pickle.loads(self.line.receive(descriptors=passed))
            try:
                answer = success(self._fork(passed) if operation == "branch" else self._play(operation, arguments))
            except (Exception, SystemExit) as error:
                answer = failure(error)
            finally:
                for descriptor in passed:
                    os.close(descriptor)
            self.line.send(answer)
        except (EOFError, OSError):
            return False
        return True

    def _play(self, operation: str, arguments: tuple) -> Any:
        call = partial(opened, self.environment) if operation == "reset" else getattr(self.environment, operation)
        answer = settled_here(call(*arguments))
        if operation in ("close", "digest"):
            return answer
        if operation == "reset":  # later, pages are shared with snapshots, and would be copied
            _use_huge_pages()
        return received(answer)

    def _fork(self, passed: list[int]) -> int:
        self._check_forkable(passed)
        state = random.getstate()  # Python seeds the child's anew
        gc.freeze()  # or the next collection would write to all shared pages
        child = os.fork()
        if child:
            self.children.add(child)
            return child
        try:
            random.setstate(state)
            line = Line(socket.socket(fileno=passed[0]))
            self.line.close()
            if self.spare:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in self.spare:
                    os.close(descriptor)
            _own_offsets()
            branch = _Branch(self.environment, line)
            while branch.serve_one():
                branch.reap()
        finally:
            os._exit(0)  # not to run what the parent has yet to end with

    def _check_forkable(self, passed: list[int]) -> None:
        """
        Raises:
            SnapshotUnsupported: this process holds something that a fork loses or shares; says what.
        """
        threads = len(os.listdir("/proc/self/task"))
        self.reap()
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            others = set(map(int, file.read().split())) - self.children
        if self.spare:
            others.clear()  # the first process adopts what its branches leave behind
        mine = {0, 1, 2, self.line.fileno(), *passed, *self.spare}
        connections = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                mode = os.fstat(int(name)).st_mode
                connections += int(name) not in mine and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode))
        found = {"threads": threads - 1, "child processes": len(others), "connections or pipes": connections}
        found = {what: count for what, count in found.items() if count > 0}
        if found:
            raise SnapshotUnsupported(
                f"{type(self.environment).__name__} can't be forked: it has "
                + " and ".join(f"{count} {what}" for what, count in found.items())
                + ", which a forked process loses or shares: use bpo.env.backend=replay"
            )

    def reap(self) -> None:
        for child in list(self.children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(child, os.WNOHANG)[0] == 0:
                    continue
            self.children.discard(child)


def _own_offsets() -> None:
    """Open regular files anew: a forked process moves its parent's position in them."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            number = int(name)
            if number > 2 and stat.S_ISREG(os.fstat(number).st_mode):
                with open(f"/proc/self/fdinfo/{number}") as file:
                    flags = int(next(line.split()[1] for line in file if line.startswith("flags")), 8)
                position = os.lseek(number, 0, os.SEEK_CUR)
                inheritable = os.get_inheritable(number)
                again = os.open(f"/proc/self/fd/{number}", flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
                os.lseek(again, position, os.SEEK_SET)
                os.dup2(again, number, inheritable)
                os.close(again)


_HUGE = 2 << 20
_WORTH_IT = 64 << 20


def _use_huge_pages() -> None:
    """Gather this process's memory in pages of 2 MB, where it is much and the kernel can (Linux 6.1, madvise(2)).

    A fork copies the page table: 512 times less of it. What is written after a fork is still copied 4 kB at a time, for
    the kernel splits a shared huge page first. Gathering takes a millisecond or so a page, once (benchmarks/README.md).
    """
    with open("/proc/self/smaps_rollup") as file:
        sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in file.readlines()[1:]}
    if sizes["Anonymous:"] - sizes["AnonHugePages:"] < _WORTH_IT:
        return
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for addresses, permissions, _, _, inode, *name in mappings:
        if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if start < end:  # a refusal leaves the small pages as they are
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 25)  # MADV_COLLAPSE


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
