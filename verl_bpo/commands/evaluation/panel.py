"""A panel: the fixed tasks that an evaluation plays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from verl_bpo.generation.prompts import Task


def panel_digest(panel: Sequence[Task]) -> str:
    """Tells whether two panels are the same tasks: names, order, seeds and, where tasks are files, contents. Folders don't
    matter."""
    digest = hashlib.sha256()
    for row in panel:
        path = Path(row.task)
        name = path.name if path.is_absolute() or path.exists() else row.task
        digest.update(f"{row.env}\0{name}\0{row.seed}\0".encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
