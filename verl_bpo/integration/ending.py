"""How a command ends before it is done: at Ctrl-C, at SIGTERM, and when what it can't do without is gone."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
import time
from types import FrameType

SECONDS = 7.0
"""Time to give things back; then the process ends at once, and what it started ends with it."""
_STOPS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal said so."""


def end_on_signals(name: str) -> None:
    """From now on Ctrl-C and SIGTERM raise :class:`Stopped` here, in the main thread, say so in a line, and end the process
    whatever it waits for. Also where it was started with Ctrl-C ignored, as bash starts what a script runs with ``&``."""

    def end(number: int, frame: FrameType | None) -> None:
        for stop in _STOPS:
            signal.signal(stop, signal.SIG_IGN)
        leave_soon(name, number)
        raise Stopped(number)

    for stop in _STOPS:
        signal.signal(stop, end)


def leave_soon(name: str, number: int) -> None:
    """Say why, and see that the process has ended in :data:`SECONDS`."""
    print(f"\n{name}: stopped by {signal.Signals(number).name}: the same command goes on from here", file=sys.stderr)
    sys.stderr.flush()

    def leave() -> None:
        time.sleep(SECONDS)
        os._exit(128 + number)

    threading.Thread(target=leave, daemon=True).start()


def told(error: BaseException) -> str | None:
    """One line on an error of Ray that is not the program: a process that died, a full disk. None: it is another one."""
    from ray.exceptions import RayActorError, RayError

    while True:
        if isinstance(error, RayActorError):
            return _death(str(error))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return disk_full(error)
        inner = getattr(error, "cause", None) if isinstance(error, RayError) else error.__cause__
        if not isinstance(inner, BaseException):
            break
        error = inner
    text = str(error)
    if "ActorDiedError" in text or "ActorUnavailableError" in text:
        return _death(text)
    return disk_full(error) if os.strerror(errno.ENOSPC) in text else None


def disk_full(error: BaseException) -> str:
    where = f" ({error.filename})" if getattr(error, "filename", None) else ""
    return f"the disk is full{where}: make room, then the same command goes on from the last checkpoint"


def _death(text: str) -> str:
    """What Ray says over ten lines of an actor's end."""
    kind = re.search(r"class_name: (\S+)", text)
    why = re.search(
        r"(?:Worker exit detail|The actor died because[^:\n]*|The actor is dead because)[:,]? *([^\n]*)", text
    )
    who = {"TransformersServer": "the rollout engine", "vLLMHttpServer": "the rollout engine"}.get(
        kind[1] if kind else "", f"the process of {kind[1]}" if kind else "a process of the run"
    )
    reason = " ".join(why[0].split())[:200] if why else "see the log above"
    return f"{who} died ({reason}): the run ends; the same command goes on from the last checkpoint"
