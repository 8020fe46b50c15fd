"""How a command ends before it is done: at Ctrl-C, at SIGTERM, on a full disk."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 7.0
"""Time to give things back; then the process ends at once, and what it started ends with it."""
_STOPS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal said so."""


@contextmanager
def ends_on_signals(name: str) -> Iterator[None]:
    """Meanwhile Ctrl-C and SIGTERM raise :class:`Stopped` here, in the main thread, say so in a line, and end the process
    whatever it waits for. Also where it was started with Ctrl-C ignored, as bash starts what a script runs with ``&``."""

    told: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        told.append(number)
        leave_soon(name, number)
        raise Stopped(number)

    before = {stop: signal.signal(stop, end) for stop in _STOPS}
    try:
        yield
    except KeyboardInterrupt:  # Ray's core makes a plain one of ours
        raise Stopped(*told) from None
    except BaseException:
        _restore(before)
        raise
    else:
        _restore(before)


def _restore(handlers: dict) -> None:
    for stop, handler in handlers.items():
        signal.signal(stop, handler)


def leave_soon(name: str, number: int) -> None:
    """Say why, and see that the process has ended in :data:`SECONDS`."""
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_IGN)
    print(f"\n{name}: stopped by {signal.Signals(number).name}: the same command goes on from here", file=sys.stderr)
    sys.stderr.flush()

    def leave() -> None:
        time.sleep(SECONDS)
        os._exit(128 + number)

    threading.Thread(target=leave, daemon=True).start()


def is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_full(error: BaseException) -> str:
    where = f" ({error.filename})" if getattr(error, "filename", None) else ""
    return f"the disk is full{where}: make room, then the same command goes on from the last checkpoint"
