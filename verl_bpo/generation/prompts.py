"""Prompt files: the tasks that training, validation and ``verl-bpo eval`` open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from verl_bpo.options import ConfigError
from verl_bpo.sandbox.base import Row

VERLS_OWN = frozenset(
    [
        "raw_prompt",
        "dummy_tensor",
        "index",
        "tools_kwargs",
        "interaction_kwargs",
        "uid",
        "session_id",
        "global_steps",
        "agent_name",
        "priority",
    ]
)
"""What verl adds to a row on its way to a rollout."""
MAKE = "write it with `verl-bpo make-data`"


@dataclass(frozen=True)
class Task:
    """One row of a prompt file."""

    env: str
    task: str
    seed: int
    row: Row = field(default_factory=dict, compare=False, repr=False)
    """The file's columns, as plain values."""

    @classmethod
    def of(cls, row: Mapping[str, Any], env: str | None) -> Task:
        """From a row, as it stands in the file or as verl hands it to a rollout.

        Args:
            env: ``bpo.env.name``, which rows that name no environment are of.

        Raises:
            ConfigError: it names no environment or no task.
        """
        extra = row.get("extra_info")
        found = extra if isinstance(extra, Mapping) else {}
        name, task, seed = found.get("env") or env, found.get("task"), found.get("seed") or 0
        wrong = None
        if not isinstance(task, str) or not task:
            wrong = "names no task"
        elif not isinstance(name, str) or not name:
            wrong = "names no environment, and bpo.env.name is unset"
        elif not isinstance(seed, int | float) or not isfinite(seed) or seed != int(seed):
            wrong = f"has seed={seed!r}, which is no whole number"
        if wrong:
            raise ConfigError(f"{wrong} (extra_info={extra!r}): {MAKE}")
        return cls(name, task, int(seed), {key: _plain(row[key]) for key in row if key not in VERLS_OWN})


def _plain(value: Any) -> Any:
    """With Python's own containers and numbers in place of numpy's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def prompt_rows(file: str | Path) -> list[dict[str, Any]]:
    """All rows of a prompt file, in the formats that verl reads.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it can't be read, or has no rows.
    """
    import pandas
    import pyarrow.parquet

    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no prompt file {file}: {MAKE}")
    try:
        if path.suffix == ".parquet":
            rows = pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix in (".json", ".jsonl"):
            rows = pandas.read_json(path, lines=True).to_dict("records")
        else:
            raise ConfigError(f"{file} is no prompt file: it must end in .parquet, .json or .jsonl; {MAKE}")
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} can't be read ({' '.join(str(error).split())}): {MAKE}") from None
    if not rows:
        raise ConfigError(f"{file} has no rows: {MAKE}")
    return rows


def prompt_tasks(file: str | Path, env: str | None) -> list[Task]:
    """Tasks of a prompt file, in its order.

    Args:
        env: ``bpo.env.name``, which rows that name no environment are of.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it can't be read, has no rows, or a row names no task; the first such row is named.
    """
    tasks = []
    for number, row in enumerate(prompt_rows(file)):
        try:
            tasks.append(Task.of(row, env))
        except ConfigError as error:
            raise ConfigError(f"{file}: row {number} {error}") from None
    return tasks
