"""``verl-bpo make-data``: prompt files in verl's parquet format, one row a task, which names its environment."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from verl_bpo.commands.environment import add_environment, environment_kwargs
from verl_bpo.sandbox.loading import list_tasks, load_environment

RECORD = b"verl_bpo"
"""Key of the record in a prompt file's metadata."""


def write_prompts(
    env: str,
    split: str,
    out: Path,
    *,
    limit: int | None = None,
    panel: int | None = None,
    seed: int = 0,
    kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the tasks of a split as verl prompt rows, atomically.

    The observation that a task starts with comes from the sandbox at rollout time, so ``prompt`` holds the task id only
    (verl needs it to be there, and to be shorter than ``data.max_prompt_length``).

    Args:
        env: an environment's name, see :func:`verl_bpo.envs.load_environment`.
        split: ``train``, ``valid``, ... as the environment calls them.
        out: the parquet file.
        limit: first so many tasks of the environment's own fixed order, which may go by kind.
        panel: so many tasks drawn by a hash of their names: a fixed sample, whatever the order of files on a disk.
        kwargs: passed to the environment's ``tasks``: the constructor's arguments and ``root``.

    Returns:
        The record that also stands in the file's metadata (:func:`read_record`): ``env``, ``split``, ``rows``, ``seed``
        and ``sha256`` over the tasks' names, seeds and contents, by which two people can tell that
        they evaluate on the same panel.

    Raises:
        ValueError: the split has no tasks, or fewer than ``panel``.
    """
    import pyarrow
    import pyarrow.parquet

    environment = load_environment(env)
    tasks = list_tasks(env, split, **(kwargs or {}))[:limit]
    if not tasks:
        raise ValueError(f"environment {env} has no tasks in split {split!r}")
    if panel is not None:
        if panel > len(tasks):
            raise ValueError(f"--panel {panel} is more than the {len(tasks)} tasks of {env} {split}")
        root = (kwargs or {}).get("root")
        tasks = sorted(tasks, key=lambda task: hashlib.sha256(_name(task, root).encode()).digest())[:panel]
    rows = [
        {
            "data_source": environment.data_source(task, split) or env.rsplit(":", 1)[-1],
            "prompt": [{"role": "user", "content": os.path.basename(os.path.dirname(task)) or task}],
            "ability": "agent",
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"index": index, "split": split, "env": env, "task": task, "seed": seed},
        }
        for index, task in enumerate(tasks)
    ]
    digest = _digest(tasks, seed, (kwargs or {}).get("root"), partial(environment.task_content, **(kwargs or {})))
    record = {"env": env, "split": split, "rows": len(rows), "seed": seed, "sha256": digest}
    table = pyarrow.Table.from_pylist(rows)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), RECORD: json.dumps(record).encode()})
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.partial")
    pyarrow.parquet.write_table(table, unfinished)
    os.replace(unfinished, out)
    return record


def read_record(file: Path) -> dict[str, Any] | None:
    """What :func:`write_prompts` recorded in a prompt file; None for files made otherwise."""
    import pyarrow.parquet

    record = (pyarrow.parquet.read_schema(file).metadata or {}).get(RECORD)
    return json.loads(record) if record else None


def _name(task: str, root: str | None) -> str:
    """The task without the place where this machine keeps it."""
    return os.path.relpath(task, Path(root).expanduser().absolute()) if root and os.path.isabs(task) else task


def _digest(tasks: list[str], seed: int, root: str | None, content: Callable[[str], bytes]) -> str:
    digest = hashlib.sha256()
    for task in tqdm(tasks, desc="checksum", unit="task", leave=False, disable=None):
        digest.update(f"{_name(task, root)}\0{seed}\0".encode())
        digest.update(content(task))
    return digest.hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_environment(parser)
    parser.add_argument("out", type=Path, help="the parquet file")
    parser.add_argument("--limit", type=int, help="first so many tasks")
    parser.add_argument("--panel", type=int, help="so many tasks drawn by their names, the same ones every time")
    parser.add_argument("--seed", type=int, default=0, help="seed of every task's reset")


def main(arguments: argparse.Namespace) -> int:
    """Exit status."""
    kwargs = environment_kwargs(arguments) | ({"root": arguments.root} if arguments.root else {})
    record = write_prompts(
        arguments.env,
        arguments.split,
        arguments.out,
        limit=arguments.limit,
        panel=arguments.panel,
        seed=arguments.seed,
        kwargs=kwargs,
    )
    print(f"{arguments.out}: {record['rows']} tasks of {arguments.env} {arguments.split}, sha256 {record['sha256']}")
    return 0
