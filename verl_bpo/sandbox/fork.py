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
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from verl_bpo.sandbox.asynchronous import settled_here
from verl_bpo.sandbox.base import (
    Backend,
    Environment,
    Observation,
    Row,
    Sandbox,
    SandboxCrashed,
    SandboxError,
    Snapshot,
    SnapshotUnsupported,
    opened,
)
from verl_bpo.sandbox.errors import PLAIN, from_exception, to_exception
from verl_bpo.sandbox.loading import EnvironmentMaker
from verl_bpo.sandbox.turns import Action

BACKEND = "ForkBackend"

_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
"""Threads don't survive a fork, so libraries that make some at import shouldn't."""


class ForkBackend(Backend):
    """The process that all branches of one environment descend from. It makes the environment and never plays it.

    It is a fresh interpreter, not a fork of this one with its threads and locks. When it ends, or this process does,
    all branches end.
    """

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
        self._line = _Line(ours)
        try:
            self.volatile = self._line.receive("making the environment")
        except BaseException:
            self.close()
            raise

    def sandbox(self) -> ForkSandbox:
        return ForkSandbox(self._line.fork(family=[0]))

    def close(self) -> None:
        """End all branches and snapshots. Safe to call twice."""
        self._line.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class ForkSandbox(Sandbox):
    """A branch: a process with an environment in it. Made by the backend or by a fork.

    A call in which the process dies raises :class:`SandboxCrashed`; no other branch notices.
    """

    def __init__(self, line: _Line) -> None:
        self._line = line

    def reset(self, task: str, seed: int = 0, row: Row | None = None) -> Observation:
        return self._line.call("reset", task, seed, row)

    def step(self, action: Action) -> Observation:
        self.env_steps += 1
        return self._line.call("step", action)

    def digest(self) -> dict[str, str] | None:
        return self._line.call("digest")

    def snapshot(self) -> Snapshot:
        return ForkSnapshot(self._line.fork())

    def close(self) -> None:
        self._line.close()


class ForkSnapshot(Snapshot):
    """A process that waits in one state."""

    def __init__(self, line: _Line) -> None:
        self._line = line

    def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        if self._line.closed:
            raise SandboxError("this snapshot is released")
        forks: list[Sandbox | Exception] = []
        for _ in range(count):
            try:
                forks.append(ForkSandbox(self._line.fork()))
            except SandboxError as error:
                forks.append(error)
        return forks

    def release(self) -> None:
        self._line.close()


class _Line:
    """This side's end of the line to one process. ``family`` counts the open lines of one world."""

    def __init__(self, ours: socket.socket, family: list[int] | None = None) -> None:
        self._socket, self._lock = ours, threading.Lock()
        self._family = [0] if family is None else family
        self._family[0] += 1
        self.closed = False

    def call(self, operation: str, *arguments: Any) -> Any:
        with self._lock:
            self._send(operation, arguments)
            return self.receive(operation)

    def fork(self, family: list[int] | None = None) -> _Line:
        """A line to a new process, which is a copy of that one."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                self._send("fork", (), theirs)
                self.receive("fork")
        except BaseException:
            ours.close()
            raise
        return _Line(ours, self._family if family is None else family)

    def _send(self, operation: str, arguments: tuple, passed: socket.socket | None = None) -> None:
        if self.closed:
            raise SandboxError("this sandbox is closed")
        body = pickle.dumps((operation, arguments))
        header = struct.pack("!I", len(body))
        try:
            if passed is None:
                self._socket.sendall(header + body)
            else:
                socket.send_fds(self._socket, [header], [passed.fileno()])
                self._socket.sendall(body)
        except OSError as error:
            raise SandboxCrashed(f"the environment's process is gone ({error})") from error

    def receive(self, operation: str) -> Any:
        try:
            answer, _ = _receive(self._socket)
        except OSError as error:
            raise SandboxCrashed(f"the environment's process is gone ({error})") from error
        if answer is None:
            raise SandboxCrashed(f"the environment's process died during {operation}")
        kind, *content = answer
        if kind == "ok":
            return content[0]
        raise to_exception(*content)

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
            self._socket.close()  # where nobody can ask, the process ends by itself


# --- in the processes -------------------------------------------------------------------------------------------------

_START = (
    "import sys, json; spec = json.loads(sys.argv[1]); sys.path[:] = spec[0]; "
    "from verl_bpo.sandbox.fork import serve; serve(*spec[1:])"
)


def serve(env: str, env_kwargs: dict[str, Any], descriptor: int) -> None:
    """That first process's whole life."""
    os.dup2(2, 1)  # what environments print is no result
    line = socket.socket(fileno=descriptor)
    line.set_inheritable(False)
    try:
        make = EnvironmentMaker(env, env_kwargs)
        environment = make()
    except (Exception, SystemExit) as error:
        _answer(line, ("error", *from_exception(error)))
        return
    _become_subreaper()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    _use_huge_pages()
    branch = _Branch(environment, line, spare=(wake, waker))
    _answer(line, ("ok", make.volatile))
    while True:
        ready, _, _ = select.select([line, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap()
        if line in ready and not branch.serve_one():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(0, signal.SIGKILL)  # the family, this process included


class _Branch:
    """One process's environment and its line. :meth:`serve_one` returns in the child, too, as that child's branch."""

    def __init__(self, environment: Environment, line: socket.socket, spare: tuple[int, ...] = ()) -> None:
        self.environment, self.line, self.spare = environment, line, spare
        self.children: set[int] = set()
        """Forks that this process made; they are branches, not the environment's own children."""

    def serve_one(self) -> bool:
        """Answer one request; False when nobody will ask again."""
        try:
            request, passed = _receive(self.line)
        except OSError:
            return False
        if request is None:
            return False
        operation, arguments = request
        try:
            answer = ("ok", self._fork(passed) if operation == "fork" else self._play(operation, arguments))
        except (Exception, SystemExit) as error:
            answer = ("error", *from_exception(error))
        finally:
            for descriptor in passed:
                os.close(descriptor)
        try:
            _answer(self.line, answer)
        except OSError:
            return False
        except Exception as error:
            problem = f"the answer to {operation} can't be sent ({type(error).__name__}: {error}): {PLAIN}"
            _answer(self.line, ("error", "SandboxError", problem))
        return True

    def _play(self, operation: str, arguments: tuple) -> Any:
        call = partial(opened, self.environment) if operation == "reset" else getattr(self.environment, operation)
        answer = settled_here(call(*arguments))
        if operation == "reset":  # later, pages are shared with snapshots, and would be copied
            _use_huge_pages()
        return answer

    def _fork(self, passed: list[int]) -> None:
        self._check_forkable(passed)
        state = random.getstate()  # Python seeds the child's anew
        gc.freeze()  # or the next collection would write to all shared pages
        child = os.fork()
        if child:
            self.children.add(child)
            return
        try:
            random.setstate(state)
            line = socket.socket(fileno=passed[0])
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


def _become_subreaper() -> None:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphaned branches are ended and reaped here


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(line: socket.socket, answer: tuple) -> None:
    body = pickle.dumps(answer)
    line.sendall(struct.pack("!I", len(body)) + body)


def _receive(line: socket.socket) -> tuple[Any, list[int]]:
    """One message and the descriptors that came with it; None when the other side is gone."""
    header, passed, _, _ = socket.recv_fds(line, 4, 1)
    while 0 < len(header) < 4:
        more = line.recv(4 - len(header))
        if not more:
            return None, passed
        header += more
    if not header:
        return None, passed
    (count,) = struct.unpack("!I", header)
    body = bytearray()
    while len(body) < count:
        part = line.recv(min(count - len(body), 1 << 20))
        if not part:
            return None, passed
        body += part
    return pickle.loads(body), passed
