"""The log file of a resumed run goes on where its checkpoint is; verl's file logger would empty it."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

_after: int | None = None


def go_on_after(step: int) -> None:
    """Say in this process that the run goes on from the checkpoint of ``step``; 0: it begins."""
    global _after
    _after = step or None


def keep_log(module: ModuleType) -> None:
    """``verl.utils.tracking``: open the file logger's file at its end where a run goes on.

    verl 0.9.1 opens it with ``"wb"``, whatever it holds.
    """

    def open_log(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "wb" and _after is not None and Path(file).is_file():
            set_aside_lines(Path(file), _after)
            mode = "ab"
        return builtins.open(file, mode, *args, **kwargs)

    module.open = open_log


def set_aside_lines(file: Path, after: int) -> None:
    """Move the lines of steps behind ``after``, which this run takes again, to ``<file>.aside``, and a line that was cut."""
    kept, left = [], []
    for line in file.read_text().splitlines(keepends=True):
        try:
            kept_one = line.endswith("\n") and json.loads(line)["step"] <= after
        except (ValueError, KeyError, TypeError):
            kept_one = False
        (kept if kept_one else left).append(line)
    if not left:
        return
    with builtins.open(f"{file}.aside", "a") as aside:
        aside.writelines(line if line.endswith("\n") else line + "\n" for line in left)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text("".join(kept))
    os.replace(partial, file)
