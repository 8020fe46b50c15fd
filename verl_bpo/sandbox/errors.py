"""Exceptions on their way between processes: as a name and a text, for a class of one side may not exist on the other.

One that has no name here, such as an own backend's, travels as the nearest of its bases that has one.
"""

from __future__ import annotations

import traceback

from verl_bpo.sandbox.base import SandboxCrashed, SandboxError, SandboxTimeout, SnapshotUnsupported, TaskError
from verl_bpo.sandbox.loading import EnvironmentUnavailable

_LONGEST = 2000
"""Characters of an error's text."""

_NAMED: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (SandboxError, SandboxCrashed, SandboxTimeout, SnapshotUnsupported, TaskError, EnvironmentUnavailable)
}


def from_exception(error: BaseException) -> tuple[str, str]:
    """Name and text. Anything but the named ones becomes a SandboxError that says where it came from."""
    for base in type(error).__mro__:
        if base in _NAMED.values():
            return base.__name__, _printable(str(error))
    line = _printable(traceback.format_exception_only(type(error), error)[-1].strip())
    if isinstance(error, MemoryError):
        line += ": its process has no more memory (bpo.env.memory_mb)"
    frames = traceback.extract_tb(error.__traceback__)
    return "SandboxError", f"{line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else line


def to_exception(kind: str, message: str) -> Exception:
    """The exception again."""
    return _NAMED[kind](_printable(message))


def in_a_line(error: BaseException, most: int | None = None) -> str:
    """What an error says in a line of at most ``most`` characters; its class where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def _printable(text: str) -> str:
    """``text`` without halves of character pairs, and not too long to be read."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
