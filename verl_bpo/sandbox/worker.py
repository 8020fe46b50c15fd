"""Where a world lives: a server that holds its sandboxes, in a child process or right here."""

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
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from verl_bpo.sandbox.base import (
    Environment,
    Observation,
    Sandbox,
    SandboxCrashed,
    SandboxError,
    SandboxTimeout,
    Snapshot,
    SnapshotUnsupported,
    TaskError,
)
from verl_bpo.sandbox.fork import ForkSandbox, Nursery
from verl_bpo.sandbox.loading import EnvironmentUnavailable, load_environment
from verl_bpo.sandbox.memory import MemorySandbox
from verl_bpo.sandbox.replay import ReplaySandbox
from verl_bpo.sandbox.scratch import Scratch

BACKENDS: dict[str, type[Sandbox]] = {"memory": MemorySandbox, "fork": ForkSandbox, "replay": ReplaySandbox}

_ERRORS: dict[str, type[SandboxError]] = {
    cls.__name__: cls for cls in (SandboxError, SandboxCrashed, SandboxTimeout, SnapshotUnsupported, TaskError)
}


class _Server:
    """One world's sandboxes and snapshots under numbers. Runs wherever the environment runs."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._initial: dict[tuple[str, int], tuple[Snapshot, Observation]] = {}
        self._spare: Environment | None = None
        """The environment that :meth:`open` made to try the arguments, until it is used."""
        self._nursery: Nursery | None = None
        """Of the ``fork`` backend: where the environment was made, for all trees."""

    def open(self, env: str, env_kwargs: dict[str, Any], backend: str) -> dict[str, str]:
        """Get ready for worlds of an environment; what it declares as volatile."""

        self._backend = backend
        if backend == "fork":
            self._nursery = Nursery(env, env_kwargs)
            return self._nursery.volatile
        self._class, self._kwargs = load_environment(env), env_kwargs
        try:
            self._spare = self._class(**env_kwargs)
        except Exception as error:
            raise EnvironmentUnavailable(
                f"environment {env!r} can't be made with arguments {env_kwargs}: {type(error).__name__}: {error}"
            ) from error
        return dict(self._class.volatile)

    def reset(self, key: int, task: str, seed: int) -> Observation:
        if (task, seed) in self._initial:
            snapshot, observation = self._initial[task, seed]
            (sandbox,) = snapshot.fork(1)
            if isinstance(sandbox, Exception):
                raise sandbox
        else:
            sandbox = self._new_sandbox()
            try:
                observation = sandbox.reset(task, seed)
                if self._backend != "replay":
                    self._keep(sandbox, task, seed, observation)
            except BaseException:
                sandbox.close()
                raise
        self._objects[key] = sandbox
        return observation

    def step(self, key: int, action: str) -> Observation:
        return self._objects[key].step(action)

    def snapshot(self, key: int, snapshot_key: int) -> int | None:
        snapshot = self._objects[key].snapshot()
        self._objects[snapshot_key] = snapshot
        return snapshot.nbytes

    def fork(self, snapshot_key: int, keys: list[int]) -> list[int | tuple[str, str]]:
        """Per fork: the steps that were played again for it, or its error."""
        answers: list[int | tuple[str, str]] = []
        for key, fork in zip(keys, self._objects[snapshot_key].fork(len(keys))):
            if isinstance(fork, Exception):
                answers.append(from_exception(fork))
            else:
                self._objects[key] = fork
                answers.append(getattr(fork, "replayed_steps", 0))
        return answers

    def drop(self, keys: list[int]) -> None:
        """Give back what is no longer needed. What fails in that is the environment's own matter: it is only told."""
        for key in keys:
            thing = self._objects.pop(key, None)
            if thing is not None:
                self._end(thing.close if isinstance(thing, Sandbox) else thing.release)

    def clear(self) -> None:
        """Give everything back, environments too: the next tree starts with a new one."""
        for snapshot, _ in self._initial.values():
            self._end(snapshot.release)
        self._initial.clear()
        self.drop(list(self._objects))
        if self._spare is not None:
            spare, self._spare = self._spare, None
            self._end(spare.close)

    def _keep(self, sandbox: Sandbox, task: str, seed: int, observation: Observation) -> None:
        # Where that can't be, each root sample gets a world of its own; who branches is told by its own snapshot.
        with contextlib.suppress(SnapshotUnsupported):
            self._initial[task, seed] = sandbox.snapshot(), observation

    def _new_sandbox(self) -> Sandbox:
        if self._nursery is not None:
            return self._nursery.branch()
        return ReplaySandbox(self._make) if self._backend == "replay" else MemorySandbox(self._make())

    def _make(self) -> Environment:
        environment, self._spare = self._spare, None
        return environment if environment is not None else self._class(**self._kwargs)

    @staticmethod
    def _end(end: Callable[[], None]) -> None:
        try:
            end()
        except Exception:
            traceback.print_exc()


class LocalWorker:
    """A server in this process: no process to die, nothing to stop it."""

    def __init__(self) -> None:
        self.server = _Server()

    def call(self, operation: str, *args: Any, timeout: float) -> Any:
        try:
            return getattr(self.server, operation)(*args)
        except (Exception, SystemExit) as error:
            raise to_exception(*from_exception(error)) from error

    def alive(self) -> bool:
        return True

    def stop(self) -> None:
        if self.server._nursery is not None:
            self.server._nursery.close()


class ProcessWorker:
    """A server in a child process, and the line to it. One call at a time.

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
        """The server's answer.

        Raises:
            SandboxTimeout: there was none in ``timeout`` seconds; the process is killed.
            SandboxCrashed: the process died.
            SandboxError, EnvironmentUnavailable: what the server raised.
        """
        return read_answer(self.ask(operation, *args, timeout=timeout), operation)

    def ask(self, operation: str, *args: Any, timeout: float) -> bytes:
        """The server's answer as it came, for :func:`read_answer`. Raises what concerns the process alone."""
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


PLAIN = "keep Observation.info to plain values"

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from verl_bpo.sandbox.worker import serve; "
    "serve(int(sys.argv[2]), int(sys.argv[3]))"
)


def serve(connection_fd: int, lifeline: int) -> None:
    """The child's whole life."""
    for fd in (connection_fd, lifeline):
        os.set_inheritable(fd, False)  # what the environment starts must not keep the line open
    _die_with(lifeline)
    os.dup2(2, 1)  # what environments print is no result
    connection = Connection(connection_fd)
    server = _Server()
    while True:
        try:
            operation, args = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # not to wait for whatever the environment left running
        try:
            answer = ("ok", getattr(server, operation)(*args))
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
    """What a server answered.

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


def from_exception(error: BaseException) -> tuple[str, str]:
    """An exception as names and text: classes of an environment's own may not exist on the other side."""

    if isinstance(error, EnvironmentUnavailable):
        return "EnvironmentUnavailable", str(error)
    for base in type(error).__mro__:
        if base in _ERRORS.values():
            return base.__name__, str(error)
    line = traceback.format_exception_only(type(error), error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    return "SandboxError", f"{line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else line


def to_exception(kind: str, message: str) -> Exception:

    return EnvironmentUnavailable(message) if kind == "EnvironmentUnavailable" else _ERRORS[kind](message)
