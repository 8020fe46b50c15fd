"""A worker in a child process, and the line to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from verl_bpo.sandbox.base import SandboxCrashed, SandboxError, SandboxTimeout
from verl_bpo.sandbox.errors import PLAIN, from_exception, to_exception
from verl_bpo.sandbox.scratch import Scratch
from verl_bpo.sandbox.worker import LocalWorker


class ProcessWorker:
    """A :class:`LocalWorker` in a child process, and the line to it. One call at a time.

    The child is a fresh interpreter, not a fork: it doesn't inherit this process's threads, and it imports neither this
    process's main module nor anything else that the environment doesn't need.
    """

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        lifeline, ours = os.pipe()
        self._lifeline = os.fdopen(ours, "wb", buffering=0)  # closed by this process's end, however that comes
        self._scratch = Scratch("world")
        self._stopped = False
        with theirs, os.fdopen(lifeline, "rb", buffering=0):
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno()), str(lifeline)],
                env={**os.environ, "TMPDIR": str(self._scratch.folder)},  # a killed environment can't tidy up
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,  # a Ctrl-C is for this process; and the whole group can be killed at once
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
        request = pickle.dumps((operation, args))
        try:
            self._connection.send_bytes(request)
            if not self._connection.poll(timeout):
                raise SandboxTimeout(f"{operation} took longer than {timeout:g} s: the process was killed")
            return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise SandboxCrashed(f"the environment's process died during {operation}: {self._death()}") from error
        except BaseException:
            self.stop()  # an answer that nobody waited for would be taken for the next call's
            raise

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Return when the process has ended. From any thread, beside calls."""
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            descriptor = os.pidfd_open(self._process.pid)  # Popen.wait would keep alive() from seeing the end
            try:
                select.select([descriptor], [], [])
            finally:
                os.close(descriptor)

    def stop(self) -> None:
        """Kill the process and what it started, and wait for its end."""
        if not self._stopped:
            self._stopped = True  # later the number may be another group's
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone (macOS: a zombie)
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._scratch.close()

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.stop()
            return "it closed its line and was killed"
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from verl_bpo.sandbox.process import serve; "
    "serve(int(sys.argv[2]), int(sys.argv[3]))"
)


def serve(connection_fd: int, lifeline: int) -> None:
    """The child's whole life."""
    for fd in (connection_fd, lifeline):
        os.set_inheritable(fd, False)  # what the environment starts must not keep the line open
    _die_with(lifeline)
    os.dup2(2, 1)  # what environments print is no result
    connection = Connection(connection_fd)
    worker = LocalWorker()
    while True:
        try:
            operation, args = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # not to wait for whatever the environment left running
        try:
            answer = ("ok", getattr(worker, operation)(*args))
        except (Exception, SystemExit) as error:
            answer = ("error", *from_exception(error))
        try:
            data = pickle.dumps(answer)
        except Exception as error:
            problem = f"the answer to {operation} can't be sent ({type(error).__name__}: {error}): {PLAIN}"
            data = pickle.dumps(("error", "SandboxError", problem))
        connection.send_bytes(data)


def _die_with(lifeline: int) -> None:
    """Let the kernel end this process when the other end of ``lifeline`` closes.

    A thread that waits for it couldn't act while the environment's C code holds the interpreter; a signal that asks no
    Python can (on Linux; elsewhere a hanging world outlives a parent that was killed).
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | fcntl.FASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(0)


def read_answer(answer: bytes, operation: str) -> Any:
    """What a worker answered.

    Raises:
        SandboxError, EnvironmentUnavailable: what it raised; or the answer can't be read in this process.
    """
    try:
        kind, *content = pickle.loads(answer)
    except Exception as error:
        raise SandboxError(
            f"the answer to {operation} can't be read here ({type(error).__name__}: {error}): {PLAIN}"
        ) from error
    if kind == "ok":
        return content[0]
    raise to_exception(*content)
