"""Temporary folders that are found and removed by the next process when their owner was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from verl_bpo.sandbox.family import end_marked

_PREFIX = "verl-bpo-"
_reclaimed: set[str] = set()


class Scratch:
    """A folder ``<temporary folder>/verl-bpo-<kind>-...``, removed with :meth:`close` or with this object.

    Its owner holds a lock on a file in it. The first scratch that a process makes removes those whose owner is gone.
    """

    def __init__(self, kind: str) -> None:
        parent = tempfile.gettempdir()
        if parent not in _reclaimed:
            _reclaimed.add(parent)
            reclaim(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=parent))
        self.folder = self.path / "files"
        """What the owner may use."""
        self.folder.mkdir()
        # Under its own name only once it is held: another process that starts now would take it for a dead one's.
        unheld = self.path / "unheld"
        self._lock = os.open(unheld, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unheld.rename(self.path / "lock")
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock)

    def close(self) -> None:
        """Remove it. Safe to call twice."""
        self._finalizer()


def reclaim(parent: Path) -> list[Path]:
    """Remove the scratch folders in ``parent`` whose owner died, and end what still runs in them; which they were."""
    removed = []
    for lock in parent.glob(f"{_PREFIX}*/lock"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_marked(f"TMPDIR={lock.parent / 'files'}")
                shutil.rmtree(lock.parent, ignore_errors=True)
                removed.append(lock.parent)
            finally:
                os.close(descriptor)
    return removed


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
