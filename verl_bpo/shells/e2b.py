"""Commands in sandboxes of E2B, by its SDK; for every service that speaks the same. Not run against the service by us.

A saved state is a snapshot of the service's, and going back to it a new sandbox made of that: the SDK's own ``fork`` copies a
sandbox that runs, at once, while a saved state must wait and serve again and again. Where no command ran since the last
snapshot, saving takes none.
"""

from __future__ import annotations

import base64
import os
import shlex
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from verl_bpo.sandbox.base import SandboxError, TaskError
from verl_bpo.shells.base import PINNED, CommandResult, Limits, Shell, Workspace, unfit

SHELL = "E2BShell"
INSTALL = "pip install e2b (Python 3.11 or later)"

# What is said goes to a file first, since a stream would be held open by what a command left behind, and is no bytes in the
# SDK. kill -1 ends everything of this user but the caller; the service's own programs are root's.
_WRAPPER = """
out=$(mktemp /dev/shm/said.XXXXXX) || exit 125
cd -- "$1" && ulimit -u "$4" && ulimit -f "$5" &&
timeout -s KILL "$2" env -i {environment} bash -c "$3" <"$7" >"$out" 2>&1
code=$?
kill -9 -1 2>/dev/null
size=$(stat -c %s "$out")
echo "$code $size"
if [ "$size" -le "$6" ]; then base64 -w0 "$out"; else
  head -c $(($6 / 2)) "$out" | base64 -w0; echo; tail -c $(($6 - $6 / 2)) "$out" | base64 -w0
fi
rm -f "$out"
[ "$7" = /dev/null ] || rm -f "$7"
exit 0
"""
_GRACE = 30.0
"""Seconds beside a command's own for the service to answer."""


class E2BFiles:
    """A saved state: a snapshot on the service, deleted when nothing refers to it; without a name, the template itself."""

    nbytes: int | None = None
    """Not known: the service doesn't say it."""

    def __init__(self, template: str, snapshot: bool = False) -> None:
        self.template = template
        if snapshot:
            weakref.finalize(self, _forget, template)


class E2BShell(Shell):
    """Commands in a sandbox of E2B. Used by one thread at a time (calls from several take turns).

    The sandbox is a virtual machine of the template's size: its memory and disk are the template's. Processes and the size of
    a file are limited for each command. There is no network in it. Keys and addresses are the SDK's own: ``E2B_API_KEY``,
    ``E2B_DOMAIN``.

    Args:
        template: name of a template with bash, coreutils and what tasks need.
        places: folders that are made, empty, in a fresh sandbox; commands run in the first.
        lifetime: seconds that a sandbox may live; what wasn't saved is lost then.
        snapshot: ``full`` (files and memory: forks start at once) or ``filesystem`` (smaller; forks boot).
        user: who commands run as. Not root, whose leftovers can't be ended without the service's own programs.

    Raises:
        SandboxError: the SDK or a key is missing.
    """

    files_from = "image"

    @classmethod
    def open(cls, workspace: Workspace, limits: Limits, allow_unsafe: bool = False, **options: Any) -> E2BShell:
        """A sandbox of ``template``; of the template that the workspace's image names where there is none."""
        template = options.pop("template", None) or workspace.image
        if template is None:
            raise SandboxError(
                "this task names no image: set +bpo.env.kwargs.shell.template to a template that has all"
            )
        return cls(template, tuple(workspace.trees), workspace.env, limits, **options)

    @classmethod
    def check(
        cls,
        template: str | None = None,
        lifetime: int = 3600,
        snapshot: str = "full",
        user: str = "user",
    ) -> None:
        try:
            import e2b  # noqa: F401
        except ImportError as error:
            raise SandboxError(f"bpo.env.execution=e2b needs the SDK ({error}): {INSTALL}") from error
        if not os.environ.get("E2B_API_KEY"):
            raise SandboxError("bpo.env.execution=e2b needs a key of the service: export E2B_API_KEY=...")
        if snapshot not in ("full", "filesystem"):
            raise ValueError(f"snapshot={snapshot!r}: use full or filesystem")
        if user == "root":
            raise ValueError("user='root': commands must run as another user of the template, 'user' say")

    @classmethod
    def probe(cls, template: str = "base", **options: Any) -> tuple[bool, str]:
        try:
            cls.check(**options)
            with cls(template, ("/testbed",), **options) as shell:
                answer = shell.execute("echo ready", timeout=20)
        except (SandboxError, ValueError) as error:
            return False, str(error)
        return answer.output == "ready\n", "; ".join(f"{name}: {value}" for name, value in shell.facts.items())

    def __init__(
        self,
        template: str,
        places: tuple[str, ...] = ("/testbed",),
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        lifetime: int = 3600,
        snapshot: str = "full",
        user: str = "user",
    ) -> None:
        self.check(template, lifetime, snapshot, user)
        self.cwd, self.limits = places[0], limits or Limits()
        self._places, self._lifetime, self._mode, self._user = places, lifetime, snapshot, user
        environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in {**PINNED, **(env or {})}.items())
        self._wrapper = _WRAPPER.replace("{environment}", environment)
        self.facts = {
            "files": f"snapshots ({snapshot})", "isolation": "the service's machine", "processes": "ulimit",
            "memory": "the template's", "disk": "the template's",
        }  # fmt: skip
        self._lock = threading.RLock()
        self._first = self._state = E2BFiles(template)
        self._dirty = False
        """Whether something ran since the state that the sandbox was in last."""
        self._sandbox: Any = None

    def execute(
        self,
        command: str,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        most: int | None = None,
    ) -> CommandResult:
        if problem := unfit(command):
            return CommandResult(problem, 2)
        seconds, most = self.limits.seconds if timeout is None else timeout, most or self.limits.output
        data = stdin.encode() if isinstance(stdin, str) else stdin
        with self._lock, self._told():
            sandbox = self._running()
            self._dirty = True
            source = "/dev/null"
            if data:
                source = f"/dev/shm/asked.{uuid.uuid4().hex}"
                sandbox.files.write(source, data, user=self._user)
            words = [
                cwd or self.cwd,
                f"{seconds:g}",
                command,
                self.limits.processes,
                self.limits.file_size >> 10,
                most,
                source,
            ]
            line = shlex.join(["bash", "-c", self._wrapper, "bash", *map(str, words)])
            started = time.monotonic()
            said = sandbox.commands.run(line, user=self._user, cwd="/", timeout=seconds + _GRACE).stdout
        return _result(said, most, late=time.monotonic() - started >= seconds)

    def save(self) -> E2BFiles:
        with self._lock, self._told():
            if self._dirty:
                made = self._sandbox.create_snapshot(mode=self._mode)
                self._state, self._dirty = E2BFiles(made.snapshot_id, snapshot=True), False
            return self._state

    def load(self, files: E2BFiles) -> None:
        with self._lock:
            if self._dirty or files is not self._state:
                self._end()
            self._state = files

    def reset(self) -> None:
        self.load(self._first)

    def close(self) -> None:
        """End the sandbox. Safe to call twice."""
        with self._lock:
            self._end()
            self._state = self._first

    def _running(self) -> Any:
        if self._sandbox is not None:
            return self._sandbox
        from e2b import Sandbox, SandboxException

        try:
            made = Sandbox.create(self._state.template, timeout=self._lifetime, allow_internet_access=False)
        except SandboxException as error:
            if self._state is not self._first or getattr(error, "status_code", None) != 404:
                raise
            raise TaskError(f"the service has no template {self._state.template}: {error}") from error
        self._sandbox = made
        if self._state is self._first:
            folders = shlex.join(self._places)
            made.commands.run(f"mkdir -p -- {folders} && chown {shlex.quote(self._user)} -- {folders}", user="root")
        return made

    def _end(self) -> None:
        sandbox, self._sandbox, self._dirty = self._sandbox, None, False
        if sandbox is not None:
            with suppress(Exception):  # it ends by itself after its lifetime
                sandbox.kill()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What the SDK raises, as an error of this sandbox. What wasn't saved is lost."""
        try:
            yield
        except SandboxError:
            raise
        except Exception as error:  # the SDK's and its transports' have no base in common
            self._end()
            said = " ".join(str(error).split())[-300:]
            raise SandboxError(f"E2B: {type(error).__name__}: {said}: what wasn't saved is lost") from error


def _result(said: str, most: int, late: bool) -> CommandResult:
    head, *parts = said.split("\n")
    code, size = map(int, head.split())
    pieces = [base64.b64decode(part) for part in parts]
    left_out = max(0, size - most)
    middle = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
    data = middle.join(pieces)
    return CommandResult(data.decode("utf-8", "replace"), code, late and code == 137, data, left_out)


def _forget(snapshot: str) -> None:
    from e2b import Sandbox

    with suppress(Exception):  # the service may be gone by now
        Sandbox.delete_snapshot(snapshot)
