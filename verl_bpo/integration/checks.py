"""What a run needs beside its config: one list of checks, made by the run before Ray starts and by its dry run."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_bpo.config.schema import BPOConfig
from verl_bpo.generation.prompts import MAKE, Task, prompt_rows
from verl_bpo.model.checkpoint import find_weights, latest_step
from verl_bpo.options import ConfigError
from verl_bpo.sandbox.base import NoTaskCanWork, SandboxError
from verl_bpo.sandbox.loading import load_environment

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

AT_LEAST_ONE = (
    "data.train_batch_size",
    "data.val_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
    "trainer.total_training_steps",
)
"""Keys whose value must be a whole number of at least 1, where it is set."""
WITHIN = {
    "actor_rollout_ref.rollout.temperature": (
        lambda value: value > 0,
        "above 0: a policy is trained on what it samples",
    ),
    "actor_rollout_ref.rollout.top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": (lambda value: value >= 0, "at least 0"),
    "actor_rollout_ref.rollout.val_kwargs.top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "actor_rollout_ref.rollout.val_kwargs.top_k": (lambda value: value >= -1, "-1 or 0 (off), or positive"),
}


def check_numbers(config: DictConfig) -> None:
    """See that numbers of verl's keys, which verl takes as they are, can work.

    Raises:
        ConfigError: one can't.
    """
    for key in AT_LEAST_ONE:
        value = OmegaConf.select(config, key)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{key}={value!r} must be a whole number of at least 1")
    for key, (right, rule) in WITHIN.items():
        value = OmegaConf.select(config, key)
        if value is not None and (not isinstance(value, int | float) or not right(value)):
            raise ConfigError(f"{key}={value!r} must be {rule}")


def missing_inputs(config: DictConfig, bpo: BPOConfig, folder: Path) -> list[str]:
    """What a run would not find, or not be able to use: one line a key or file. Empty: it can start.

    Args:
        config: verl's, completed.
        folder: what relative paths start from.
    """
    return [*_models(config, folder), *_resumed(config, folder), *_prompts(config, bpo, folder)]


def _models(config: DictConfig, folder: Path) -> Iterator[str]:
    keys = ["actor_rollout_ref.model.path"] + ["critic.model.path"] * bool(config.critic.enable)
    for key in keys:
        name = str(OmegaConf.select(config, key))
        path = folder / Path(name).expanduser()
        local = path.exists() or not _HUB_NAME.fullmatch(name) or (folder / name.partition("/")[0]).is_dir()
        if "://" in name or not local:
            continue  # verl fetches it
        if not (path / "config.json").is_file():
            yield f"{key}: no model in {name} (no config.json): give a Hugging Face folder, or make the warm start first"
        elif not find_weights(path):
            yield f"{key}: no weights in {name}: give a Hugging Face folder that was saved with them"


def _resumed(config: DictConfig, folder: Path) -> Iterator[str]:
    """A checkpoint holds one shard for each rank, and only as many ranks can go on from it."""
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return
    if trainer.resume_mode == "resume_path":
        step = folder / str(trainer.resume_from_path)
        if not step.is_dir():
            yield f"trainer.resume_from_path: no checkpoint {trainer.resume_from_path}: give a folder global_step_N"
            return
    else:
        step = latest_step(folder / str(trainer.default_local_dir))
    file = None if step is None else step / "actor/fsdp_config.json"
    if file is None or not file.is_file():
        return
    saved, ranks = json.loads(file.read_text())["world_size"], trainer.n_gpus_per_node * trainer.nnodes
    if saved != ranks:
        yield (
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, nnodes={trainer.nnodes}: {step} was saved by {saved} "
            f"ranks and can't be gone on from by {ranks}: run as many, or give another trainer.default_local_dir, or set "
            f"trainer.resume_mode=disable"
        )


def _prompts(config: DictConfig, bpo: BPOConfig, folder: Path) -> Iterator[str]:
    for key in ("train_files", "val_files"):
        files, rows, complete = config.data[key], 0, True
        for name in files if isinstance(files, ListConfig) else [files]:
            if "://" in str(name):
                complete = False  # verl fetches it
                continue
            path = folder / Path(str(name)).expanduser()
            if not path.is_file():
                yield f"data.{key}: no {name}: verl-bpo make-data {bpo.env.name} {name} --split {path.stem}"
                complete = False
                continue
            try:
                found = prompt_rows(path)
            except ConfigError as error:
                yield f"data.{key}: {error}"
                complete = False
                continue
            rows += len(found)
            wrong = [(number, said) for number, row in enumerate(found) if (said := _wrong_row(row, config, bpo))]
            if wrong:
                others = f" and {len(wrong) - 1} more rows" if len(wrong) > 1 else ""
                yield f"data.{key}: {name}: {wrong[0][1]} (row {wrong[0][0]}{others})"
        if key == "train_files" and complete:
            most = config.data.get("train_max_samples") or -1
            rows = min(rows, most) if most > 0 else rows
            if rows < config.data.train_batch_size:
                yield (
                    f"data.train_files: {rows} rows are fewer than data.train_batch_size={config.data.train_batch_size}: "
                    f"lower it, or give more tasks"
                )


def _wrong_row(row: dict[str, Any], config: DictConfig, bpo: BPOConfig) -> str | None:
    """Why a row can't be used, None where it can."""
    prompt = row.get(config.data.prompt_key)
    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
        return f"has no messages in {config.data.prompt_key} ({str(prompt)[:60]!r}): {MAKE}"
    try:
        task = Task.of(row, bpo.env.name)
        lacks = _takes(task.env, json.dumps(bpo.env.kwargs, sort_keys=True, default=str))
        if lacks:
            return lacks
        load_environment(task.env).check_task(task.task, **bpo.env.kwargs)
    except (ConfigError, NoTaskCanWork, SandboxError) as error:
        return " ".join(str(error).split())
    return None


@lru_cache(maxsize=16)
def _takes(env: str, kwargs: str) -> str | None:
    """Why an environment can't be made with these arguments, by its signature."""
    try:
        inspect.signature(load_environment(env)).bind(**json.loads(kwargs))
    except TypeError as error:
        return f"is of environment {env}, which bpo.env.kwargs={kwargs} don't fit: {error}"
    return None


def needs_platform() -> str | None:
    """What to do where a running Ray cluster is to be used from a machine that verl takes for one with an accelerator."""
    import torch

    if not os.environ.get("RAY_ADDRESS") or "VERL_PLATFORM" in os.environ or torch.cuda.is_available():
        return None
    if torch.version.cuda or torch.version.hip:
        return None
    return (
        "RAY_ADDRESS names a running cluster, and this machine's PyTorch drives no accelerator: for a cluster without any, "
        "set VERL_PLATFORM=cpu here and before `ray start --head --num-cpus=16 --num-gpus=1`; for one with them, install "
        "here what its machines have; to train on this machine alone, unset RAY_ADDRESS"
    )
