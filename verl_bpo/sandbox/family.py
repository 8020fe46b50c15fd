"""A process and all that descends from it end together, however one of them ends.

The process forks once at its start. The child lives on as what it is meant to be; the parent is its guard: it adopts what
the child's children leave behind (daemons, sessions of their own), and when the child or the one who asked for it ends, it
kills them all. It also reads what they print, and passes on a bounded part.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import time
import traceback
from pathlib import Path

from verl_bpo.sandbox.line import speaks

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PRINTED = 64 << 10
"""Bytes of a family's prints that are passed on."""
_LAST = 2 << 10
"""Bytes of what was left out that are shown when the child crashes."""
_PATIENCE = 5.0
"""Seconds after which the guard goes, whatever can't be killed."""
_ENGINES = {"conmon", "podman", "docker", "runc", "crun"}
"""Programs that tidy up after a container when what they were started by is gone, and are given the time for it."""


def guarded(lifeline: int, others: tuple[int, ...] = (), folder: str | None = None) -> None:
    """Go on in a child, guarded by this process.

    Args:
        lifeline: the reading end of a pipe. When its other end closes, the family ends.
        others: the guard's copies of these descriptors are closed: they are the child's.
        folder: removed when the family has ended.
    """
    become_subreaper()
    guard = os.getpid()
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        for descriptor in (writing, *others):
            os.close(descriptor)
        _Guard(child, lifeline, reading).stay(folder)
    os.close(lifeline)
    os.close(reading)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guard:
        os._exit(0)
    for descriptor in (1, 2):  # what environments print is no result
        os.dup2(writing, descriptor)
    os.close(writing)


class _Guard:
    def __init__(self, child: int, lifeline: int, prints: int) -> None:
        self.child, self.lifeline, self.prints = child, lifeline, prints
        self.printed, self.last = 0, b""

    def stay(self, folder: str | None) -> None:
        """Until the family ends. Doesn't return: the process ends as the child did."""
        status = 0
        try:
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, _told_to_end)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may end by the child's signal
            with contextlib.suppress(_ToldToEnd):
                status = self._attend()
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            end_descendants()
            self._drain(status)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if status < 0:
                with contextlib.suppress(OSError):  # SIGKILL has no other
                    signal.signal(-status, signal.SIG_DFL)
                os.kill(os.getpid(), -status)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(max(0, status))

    def _attend(self) -> int:
        """The child's exit code, negative for a signal; 0 where the lifeline closed."""
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        poll = select.poll()
        for descriptor in (self.lifeline, self.prints, wake):
            poll.register(descriptor, select.POLLIN)
        while (status := self._bury()) is None:
            events = dict(poll.poll())
            if self.prints in events and not self._pass_on():
                poll.unregister(self.prints)
            if self.lifeline in events:
                return 0
            if wake in events:
                os.read(wake, 4096)
        return status

    def _bury(self) -> int | None:
        """Bury what has ended, adopted ones too; the child's exit code if it was among them."""
        code = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.child:
                    code = os.waitstatus_to_exitcode(ended[1])
        return code

    def _pass_on(self) -> bool:
        """Read what was printed and show it while there is room; False when nobody can print any more."""
        data = os.read(self.prints, 1 << 16)
        room = max(0, _PRINTED - self.printed)
        _say(data[:room])
        self.last = (self.last + data[room:])[-_LAST:]
        if self.printed <= _PRINTED < self.printed + len(data):
            _say(
                f"\n[a world's process ({self.child}) has printed {_PRINTED >> 10} KB: the rest is left out, but for the "
                "end if it crashes]\n".encode()
            )
        self.printed += len(data)
        return bool(data)

    def _drain(self, status: int) -> None:
        while speaks(self.prints) and self._pass_on():
            pass
        if status and self.last:
            _say(b"\n[...]\n" + self.last + b"\n")


class _ToldToEnd(Exception):
    pass


def _told_to_end(*_: object) -> None:
    raise _ToldToEnd


def _say(data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody listens
        while data:
            data = data[os.write(2, data) :]


def become_subreaper() -> None:
    """Adopt what one's children leave behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def _name(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
    return ""


def descendants(pid: int, but: set[str] = frozenset()) -> list[int]:
    """All processes below one, without those of the names ``but`` and what is below them."""
    found, unseen = [], [pid]
    while unseen:
        below = [child for child in _children(unseen.pop()) if not but or _name(child) not in but]
        found += below
        unseen += below
    return found


def end_descendants() -> None:
    """Kill all that descends from this process, which must be a subreaper, and wait until none is left."""
    started = time.monotonic()
    while (passed := time.monotonic() - started) < _PATIENCE:
        for pid in descendants(os.getpid(), _ENGINES if passed < _PATIENCE - 1 else set()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def end_marked(mark: str) -> None:
    """Kill every process that has ``mark`` (``NAME=value``) in its environment: what a family's killed guard left."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(pid) != os.getpid() and mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(int(pid), signal.SIGKILL)
