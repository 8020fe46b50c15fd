"""A panel: the fixed tasks that an evaluation plays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """One row of a panel."""

    env: str
    task: str
    seed: int


def read_panel(file: str | Path) -> list[Task]:
    """Tasks of a prompt file (``verl-bpo make-data``), in its order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row names no task.
    """
    import pandas

    if not Path(file).is_file():
        raise FileNotFoundError(f"no prompt file {file}: write one with `verl-bpo make-data`")
    extras = pandas.read_parquet(file)["extra_info"]
    try:
        return [Task(e["env"], e["task"], int(e.get("seed") or 0)) for e in extras]
    except (KeyError, TypeError):
        raise ValueError(
            f"a row of {file} names no env and task in extra_info: write it with `verl-bpo make-data`"
        ) from None


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
