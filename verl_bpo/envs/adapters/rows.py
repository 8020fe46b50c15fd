"""Rows of a file, for environments whose tasks are rows: what is played where no trainer hands one over."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_bpo.sandbox.base import Row, TaskError


@lru_cache(maxsize=4)
def read_rows(file: str) -> list[dict[str, Any]]:
    """All rows of a ``.parquet``, ``.json`` or ``.jsonl`` file, as verl reads them.

    Raises:
        TaskError: there is no such file.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise TaskError(f"bpo.env.kwargs.rows={file}: there is no such file")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    import pandas

    return pandas.read_json(path, lines=True).to_dict("records")


def row_numbers(file: str) -> list[str]:
    """A task for each row of a file."""
    return list(map(str, range(len(read_rows(file)))))


def row_for(task: str, row: Row | None, file: str | None) -> Mapping[str, Any]:
    """The row that a task is: the one that the trainer handed over, unless it is ``make-data``'s, which only has the task's
    name; then the one of ``file``; an empty one where there is none.

    Raises:
        TaskError: ``task`` is no row of ``file``.
    """
    if row is not None and (row.get("reward_model") or {}).get("style") != "environment":
        return row
    if file is None:
        return {}
    rows = read_rows(file)
    if not task.isdigit() or int(task) >= len(rows):
        raise TaskError(f"task {task!r} is no row of {file}, which has {len(rows)}: use 0 to {len(rows) - 1}")
    return rows[int(task)]
