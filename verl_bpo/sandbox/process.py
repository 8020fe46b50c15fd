"""A worker in a child process, and the line to it.

Requests travel as pickles: a world trusts who asks it. Answers travel as data (:mod:`verl_bpo.sandbox.answers`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Container
from typing import Any

from verl_bpo.sandbox.answers import LARGEST, failure, read_answer, success
from verl_bpo.sandbox.base import SandboxCrashed, SandboxError, SandboxTimeout
from verl_bpo.sandbox.family import descendants, end_marked, guarded
from verl_bpo.sandbox.line import Deadline, Line, TooLong, speaks
from verl_bpo.sandbox.loading import BACKENDS
from verl_bpo.sandbox.scratch import Scratch
from verl_bpo.sandbox.worker import LocalWorker

_END_SECONDS = 10.0
"""Within which a killed process has to be gone."""
_SETTLES = 0.5
"""Seconds that processes may take to end after their tree."""
_TRACKER = "multiprocessing.resource_tracker"
"""Python's own, one for each process that uses multiprocessing."""
_GRACE = 5.0
"""Seconds beside a call's own where the backend keeps deadlines, so that it comes first and loses one branch alone."""
_GOES_ON, _IS_DONE = b".", b"!"
_HEAD = struct.Struct("!cI")
"""Before an answer: whether the process takes another call, and the number of the call that it answers."""


class ProcessWorker:
    """A :class:`LocalWorker` in a child process, and the line to it. One call at a time.

    The child is a fresh interpreter, not a fork: it doesn't inherit this process's threads, and it imports neither this
    process's main module nor anything else that the environment doesn't need. It has a guard
    (:mod:`verl_bpo.sandbox.family`), which is the process that is started here.

    Args:
        memory_bytes: what the child and each of its children may have in memory of their own; None: any.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        self._line = Line(ours)
        lifeline, lifeline_end = os.pipe()
        self._lifeline = os.fdopen(lifeline_end, "wb", buffering=0)  # closed by this process's end, however that comes
        self._scratch = Scratch("world")
        self._calls, self._grace = 0, 0.0
        self._stopped, self._stopping = False, threading.Lock()
        with theirs, os.fdopen(lifeline, "rb", buffering=0):
            specification = [sys.path, theirs.fileno(), lifeline, str(self._scratch.path), memory_bytes]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(specification)],
                env={**os.environ, "TMPDIR": str(self._scratch.folder)},  # a killed environment can't tidy up
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,  # a Ctrl-C is for this process
            )

    def call(self, operation: str, *args: Any, timeout: float) -> Any:
        """The worker's answer.

        Raises:
            SandboxTimeout: there was none in ``timeout`` seconds; the process is killed.
            SandboxCrashed: the process died.
            SandboxError, EnvironmentUnavailable: what the worker raised.
        """
        return read_answer(self.ask(operation, *args, timeout=timeout), operation)

    def ask(self, operation: str, *args: Any, timeout: float) -> bytes:
        """The worker's answer as it came, for :func:`read_answer`. Raises what concerns the process alone."""
        if operation == "open":
            self._grace = _GRACE if BACKENDS.load(args[2]).keeps_deadlines else 0.0
        deadline = Deadline(timeout + self._grace)
        try:
            self._calls += 1
            self._line.send(pickle.dumps((self._calls, operation, args, timeout)), deadline)
            answer = self._line.receive(deadline, LARGEST + _HEAD.size)
        except TimeoutError:
            self.stop()
            raise SandboxTimeout(f"{operation} took longer than {timeout:g} s: the process was killed") from None
        except TooLong as error:
            self.stop()
            raise SandboxError(f"the answer to {operation} is too long ({error}): the process was killed") from None
        except (EOFError, OSError) as error:
            raise SandboxCrashed(f"the environment's process died during {operation}: {self._death()}") from error
        except BaseException:
            self.stop()  # an answer that nobody waited for would be taken for the next call's
            raise
        flag, number = _HEAD.unpack_from(answer.ljust(_HEAD.size))
        if flag != _GOES_ON or number != self._calls:
            self.stop()
        if number != self._calls:
            raise SandboxError(f"{operation} was answered out of turn: the process was killed")
        return answer[_HEAD.size :]

    def alive(self) -> bool:
        return not (self._stopped or speaks(self._line)) and self._process.poll() is None

    def wait(self) -> None:
        """Return when the process has ended. From any thread, beside calls."""
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            descriptor = os.pidfd_open(self._process.pid)  # Popen.wait would keep alive() from seeing the end
            try:
                select.select([descriptor], [], [])
            finally:
                os.close(descriptor)

    def stop(self) -> None:
        """End the process and all that descends from it, and wait for their end. From any thread, more than once."""
        with self._stopping:
            if not self._stopped:
                self._stopped = True
                self._end()

    def _end(self) -> None:
        self._lifeline.close()
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # not even that: the kernel holds it
                self._process.wait(_END_SECONDS)
            code = -signal.SIGKILL
        if code == -signal.SIGKILL:  # perhaps the guard itself was killed, and left something
            end_marked(f"TMPDIR={self._scratch.folder}")
        self._line.close()
        self._scratch.close()

    def _death(self) -> str:
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            self.stop()
            return "it closed its line and was killed"
        self.stop()
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


_START = (
    "import sys, json; spec = json.loads(sys.argv[1]); sys.path[:] = spec[0]; "
    "from verl_bpo.sandbox.process import serve; serve(*spec[1:])"
)


def serve(connection: int, lifeline: int, scratch: str, memory_bytes: int | None) -> None:
    """The child's whole life."""
    gc.freeze()
    os.set_inheritable(connection, False)  # what the environment starts must not keep the line open
    guarded(lifeline, (connection,), scratch)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    line, worker = Line(socket.socket(fileno=connection)), LocalWorker()
    while True:
        try:
            number, operation, args, timeout = pickle.loads(line.receive())
            answer, goes_on = _answer(worker, operation, args, timeout)
            line.send(_HEAD.pack(_GOES_ON if goes_on else _IS_DONE, number) + answer)
        except (EOFError, OSError):
            os._exit(0)  # not to wait for whatever the environment left running


def _answer(worker: LocalWorker, operation: str, args: tuple, timeout: float) -> tuple[bytes, bool]:
    """The answer, encoded, and whether the process is fit for another call."""
    try:
        return success(_perform(worker, operation, args, timeout)), True
    except MemoryError as error:
        return failure(error), False
    except (Exception, SystemExit) as error:
        return failure(error), True


def _perform(worker: LocalWorker, operation: str, args: tuple, timeout: float) -> Any:
    answer = worker.perform(operation, args, timeout)
    return _census(worker.kept_processes) if operation == "clear" else answer


def _census(kept: Container[int]) -> dict[str, Any]:
    """What is there between two trees: bytes of memory, and the names of processes that the last one left."""
    deadline, guard = time.monotonic() + _SETTLES, os.getppid()
    while True:
        others = [pid for pid in descendants(guard) if pid != os.getpid()]
        left = [name for pid in others if pid not in kept and (name := _command(pid)) and _TRACKER not in name]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)  # what was closed may take a moment to end
    return {"memory": sum(map(_resident, (os.getpid(), *others))), "left": [name[:100] for name in left]}


def _command(pid: int) -> str:
    """A process's command line; empty when it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return ""


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0
