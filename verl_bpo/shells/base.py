"""What a shell is: files, and commands that run in them. To add a kind, write a module of this package that names its class
in ``SHELL``, or a file of your own: ``bpo.env.execution=path/to/file.py:Class``.

Nothing here knows where commands run; environments know nothing else.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from verl_bpo.sandbox.base import SandboxError
from verl_bpo.sandbox.loading import Registry

PINNED = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": "/tmp",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "COLUMNS": "120",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "SOURCE_DATE_EPOCH": "1700000000",
    "GIT_AUTHOR_DATE": "2023-11-14T22:13:20Z",
    "GIT_COMMITTER_DATE": "2023-11-14T22:13:20Z",
    "PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_PAGER": "cat",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
}
"""The whole environment of a command, beside what a workspace adds: the same everywhere, nothing of the host's."""


@dataclass(frozen=True)
class Limits:
    """What the commands of one shell may use. All sizes are bytes."""

    processes: int = 256
    """Processes and threads at once."""
    memory: int = 2 << 30
    """All processes together and the files they wrote, with a control group; without, each process by itself."""
    disk: int = 512 << 20
    """What a branch may add to its trees (and, apart from that, to /dev/shm)."""
    files: int = 200_000
    """Files and folders that a branch may add."""
    file_size: int = 512 << 20
    seconds: float = 60.0
    """Time of a command that names no other."""
    output: int = 1 << 20
    """Of a longer output the middle is left out."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"limits: {name}={value} must be above 0")


@dataclass(frozen=True)
class Workspace:
    """What a task needs a shell to hold. A shell uses what its ``files_from`` says, and ``env``."""

    trees: Mapping[str, str | os.PathLike | None]
    """Where each file tree is, and the folder that it begins as a copy of (None: empty). Commands run in the first."""
    read_only: Sequence[str | os.PathLike] = ()
    """Paths of this machine that are visible at the same place, such as a virtual environment."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside, or instead of, those of :data:`PINNED`."""
    image: str | None = None
    """Name of the image that holds the trees."""


@dataclass(frozen=True)
class CommandResult:
    """What a command came to."""

    output: str
    """Standard output and error in the order they came. Bytes that are no UTF-8 are replaced."""
    returncode: int
    """128 + n when it was ended by signal n."""
    timed_out: bool = False
    data: bytes = b""
    """The bytes that ``output`` is the text of."""
    left_out: int = 0
    """Bytes missing from the middle."""


class Saved(Protocol):
    """A saved state of a shell's files. It goes when nothing refers to it any more."""

    nbytes: int | None
    """Bytes that this state holds beside those that it stands on; None: not known."""


class Shell(Protocol):
    """Files, and commands that run in them one at a time: what a command left running is dead when it returns, so files are
    the whole state. Derive a kind from this class to have what is written out here."""

    files_from: ClassVar[str]
    """``folders``: it holds copies of a workspace's folders. ``image``: what the workspace's image has."""
    cwd: str
    """Where commands run that name no other place."""
    limits: Limits
    facts: Mapping[str, str]
    """What is in force here: ``files``, ``isolation``, ``processes``, ``memory``, ``disk``."""

    @classmethod
    def open(cls, workspace: Workspace, limits: Limits, allow_unsafe: bool = False, **options: Any) -> Shell:
        """A fresh shell.

        Args:
            allow_unsafe: even where the isolation or a limit isn't in force.
            options: the kind's own.

        Raises:
            TaskError: what the workspace names isn't here.
            SandboxError: this machine can't hold it; says what to install or allow.
        """

    @classmethod
    def check(cls, **options: Any) -> None:
        """What can be told about the options before there is a task.

        Raises:
            SandboxError, ValueError, TypeError: no shell can be opened with them.
        """

    @classmethod
    def probe(cls, **options: Any) -> tuple[bool, str]:
        """Whether shells of this kind work on this machine, and what is in force, or why not. Tries one."""

    def execute(
        self,
        command: str,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        most: int | None = None,
    ) -> CommandResult:
        """Run a command with ``bash -c``. When it returns, nothing that it started lives.

        Args:
            timeout: seconds; None: ``limits.seconds``.
            most: bytes of output to keep; None: ``limits.output``.

        Raises:
            SandboxError: the shell itself failed; what wasn't saved may be lost.
        """

    def save(self) -> Saved:
        """The files as they are now. Where nothing changed since the last one, it is the same again."""

    def load(self, files: Saved) -> None:
        """Go to a saved state, which stays valid. What wasn't saved is lost."""

    def reset(self) -> None:
        """Go back to the files as they were first."""

    def close(self) -> None:
        """Give everything back. Safe to call twice."""

    def read(self, path: str) -> bytes:
        """A file's content.

        Raises:
            SandboxError: it can't be read, or is larger than ``limits.file_size``.
        """
        found = self.execute(f"cat -- {shlex.quote(path)} 2>/dev/null", most=self.limits.file_size)
        if found.returncode != 0 or found.left_out:
            why = f"exit code {found.returncode}" if found.returncode else f"{found.left_out} bytes too long"
            raise SandboxError(f"{path} can't be read in the shell ({why})")
        return found.data

    def write(self, path: str, data: bytes) -> None:
        """Write a file, and the folders above it that aren't there.

        Raises:
            SandboxError: it can't be written; says why.
        """
        place = shlex.quote(path)
        done = self.execute(f'mkdir -p -- "$(dirname -- {place})" && cat > {place}', stdin=data)
        if done.returncode != 0:
            raise SandboxError(f"{path} can't be written in the shell: {done.output.strip()[-300:]}")

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def unfit(command: str) -> str:
    """Why no program can be given this command; empty: it can."""
    if "\0" in command:
        return "a command can't contain the character NUL"
    try:
        os.fsencode(command)
    except UnicodeEncodeError:
        return "a command must be text: this one has half a pair of characters"
    return ""


_DEMANDED = ("open", "check", "probe", "execute", "read", "write", "save", "load", "reset", "close")


def _lacks(found: type) -> str:
    missing = [name for name in _DEMANDED if not callable(getattr(found, name, None))]
    missing += (
        [] if getattr(found, "files_from", None) in ("folders", "image") else ["files_from ('folders' or 'image')"]
    )
    return f"give it {', '.join(missing)}, as verl_bpo.shells.base.Shell describes" if missing else ""


SHELLS = Registry("kind of shell", "verl_bpo.shells", "SHELL", _lacks)
"""What ``bpo.env.execution`` may name."""
