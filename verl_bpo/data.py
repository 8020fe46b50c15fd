"""Prompt files in verl's parquet format: one row a task, which names its environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl_bpo.envs import load_environment


def write_prompts(
    env: str, split: str, out: Path, *, limit: int | None = None, seed: int = 0, kwargs: dict[str, Any] | None = None
) -> int:
    """Write the tasks of a split as verl prompt rows, atomically.

    The observation that a task starts with comes from the sandbox at rollout time, so ``prompt`` holds the task id only
    (verl needs it to be there, and to be shorter than ``data.max_prompt_length``).

    Args:
        env: an environment's name, see :func:`verl_bpo.envs.load_environment`.
        split: ``train``, ``valid``, ... as the environment calls them.
        out: the parquet file.
        limit: first so many tasks of the environment's own fixed order.
        kwargs: passed to the environment's ``tasks``.

    Returns:
        Number of rows.

    Raises:
        ValueError: the split has no tasks.
    """
    import pandas

    tasks = load_environment(env).tasks(split, **(kwargs or {}))[:limit]
    if not tasks:
        raise ValueError(f"environment {env} has no tasks in split {split!r}")
    rows = [
        {
            "data_source": env.rsplit(":", 1)[-1],
            "prompt": [{"role": "user", "content": os.path.basename(os.path.dirname(task)) or task}],
            "ability": "agent",
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"index": index, "split": split, "env": env, "task": task, "seed": seed},
        }
        for index, task in enumerate(tasks)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    pandas.DataFrame(rows).to_parquet(partial)
    os.replace(partial, out)
    return len(rows)
