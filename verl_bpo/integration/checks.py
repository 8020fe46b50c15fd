"""What a run needs beside its config: one list of checks, made by the run before Ray starts and by its dry run."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_bpo.config.schema import BPOConfig
from verl_bpo.generation.prompts import MAKE, Task, prompt_rows
from verl_bpo.model.checkpoint import find_weights, latest_step
from verl_bpo.model.tensor_files import check_files
from verl_bpo.options import ConfigError
from verl_bpo.sandbox.base import NoTaskCanWork, SandboxError
from verl_bpo.sandbox.errors import in_a_line
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
    "actor_rollout_ref.rollout.max_model_len",
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
    "actor_rollout_ref.rollout.gpu_memory_utilization": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "actor_rollout_ref.actor.optim.lr": (lambda value: 0 < value < 1, "above 0 and below 1"),
    "critic.optim.lr": (lambda value: 0 < value < 1, "above 0 and below 1"),
    "actor_rollout_ref.actor.clip_ratio": (lambda value: value > 0, "above 0"),
    "actor_rollout_ref.actor.grad_clip": (lambda value: value > 0, "above 0"),
    "actor_rollout_ref.actor.entropy_coeff": (lambda value: isfinite(value), "a finite number"),
    "actor_rollout_ref.actor.kl_loss_coef": (lambda value: isfinite(value), "a finite number"),
    "algorithm.gamma": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "data.dataloader_num_workers": (lambda value: value >= 0, "at least 0"),
    "algorithm.lam": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": (lambda value: value >= 0, "at least 0"),
    "actor_rollout_ref.rollout.val_kwargs.top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "actor_rollout_ref.rollout.val_kwargs.top_k": (lambda value: value >= -1, "-1 or 0 (off), or positive"),
}

WHOLE = (
    "trainer.test_freq",
    "trainer.save_freq",
    "data.train_max_samples",
    "data.val_max_samples",
    "data.seed",
    "actor_rollout_ref.rollout.top_k",
)
"""Keys whose value must be a whole number: what is not above 0 turns something off."""
NEEDED = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
)
"""Keys that must be set."""
FLAGS = ("data.shuffle", "trainer.val_before_train", "critic.enable", "actor_rollout_ref.rollout.val_kwargs.do_sample")
"""Keys that are True or False, where they are set."""
PRECISIONS = ("fp32", "float32", "32", "bf16", "bfloat16", "fp16", "float16", "16")
CHOICES = {
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.device": ("cuda", "cpu", "npu", "xpu"),
    "actor_rollout_ref.actor.strategy": (
        "fsdp",
        "fsdp2",
        "fsdp_turbo",
        "megatron",
        "veomni",
        "torchtitan",
        "automodel",
    ),
    "actor_rollout_ref.rollout.dtype": (*PRECISIONS, "auto"),
    "actor_rollout_ref.actor.fsdp_config.model_dtype": PRECISIONS,
}
TOKENIZER_KEY = "actor_rollout_ref.model.tokenizer_path"
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of which a folder with a tokenizer has one."""
LOGGERS = {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard", "swanlab": "swanlab", "mlflow": "mlflow"}
"""Of verl's loggers those that need a package."""


def check_numbers(config: DictConfig) -> None:
    """See that numbers of verl's keys, which verl takes as they are, can work.

    Raises:
        ConfigError: one can't.
    """
    for key in NEEDED:
        if OmegaConf.select(config, key) in (None, ""):
            raise ConfigError(f"{key} is unset: it must have a value")
    for key in AT_LEAST_ONE:
        value = OmegaConf.select(config, key)
        if value is not None and (not _is_number(value, int) or value < 1):
            raise ConfigError(f"{key}={value!r} must be a whole number of at least 1")
    for key in WHOLE:
        value = OmegaConf.select(config, key)
        if value is not None and not _is_number(value, int):
            raise ConfigError(f"{key}={value!r} must be a whole number")
    for key in FLAGS:
        value = OmegaConf.select(config, key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{key}={value!r} must be True or False")
    for key, choices in {**CHOICES, **_registered()}.items():
        value = OmegaConf.select(config, key)
        own = key == "algorithm.adv_estimator" and ":" in str(value)
        if value not in choices and str(value) not in choices and not own:
            raise ConfigError(f"{key}={value!r} is not one of {', '.join(choices)}")
    options = OmegaConf.select(config, "data.apply_chat_template_kwargs")
    if options is not None and not isinstance(options, DictConfig):
        raise ConfigError(f"data.apply_chat_template_kwargs={options!r} must hold keys")
    for key, (right, rule) in WITHIN.items():
        value = OmegaConf.select(config, key)
        if value is not None and (not _is_number(value, int | float) or not isfinite(value) or not right(value)):
            raise ConfigError(f"{key}={value!r} must be {rule}")


def _registered() -> dict[str, tuple[str, ...]]:
    """Names that verl, its plugins and we register."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    return {
        "algorithm.adv_estimator": tuple(map(str, ADV_ESTIMATOR_REGISTRY)),
        "actor_rollout_ref.actor.policy_loss.loss_mode": tuple(POLICY_LOSS_REGISTRY),
        "actor_rollout_ref.rollout.name": tuple(RolloutReplicaRegistry._registry),
    }


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def missing_inputs(config: DictConfig, bpo: BPOConfig, folder: Path, starts: bool = False) -> list[str]:
    """What a run would not find, or not be able to use: one line a key or file. Empty: it can start.

    Args:
        config: verl's, completed.
        folder: what relative paths start from.
        starts: it is to start now and here, so that what it would fetch must be there to be fetched.
    """
    return [
        *_models(config, folder, starts),
        *_resumed(config, folder),
        *_prompts(config, bpo, folder),
        *_outputs(config, bpo, folder),
    ]


def _outputs(config: DictConfig, bpo: BPOConfig, folder: Path) -> Iterator[str]:
    """Where the run would write, and what it would log to."""
    trainer = config.trainer
    places = {"trainer.default_local_dir": trainer.default_local_dir, "bpo.dump_dir": bpo.dump_dir}
    loggers = (
        list(trainer.logger or []) if isinstance(trainer.logger, ListConfig | type(None)) else [str(trainer.logger)]
    )
    if "file" in loggers and (log := os.environ.get("VERL_FILE_LOGGER_PATH")):
        if (folder / log).is_dir():
            yield f"VERL_FILE_LOGGER_PATH={log} is a folder: give a file"
        places["VERL_FILE_LOGGER_PATH"] = (folder / log).parent
    for key, name in places.items():
        if name is None or "://" in str(name):
            continue
        path = folder / Path(str(name)).expanduser()
        there = next(place for place in (path, *path.parents) if place.exists())
        if not there.is_dir():
            yield f"{key}: {there} is a file: give a folder"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield f"{key}: {there} can't be written to: give another folder"
        elif shutil.disk_usage(there).free < LEAST_FREE:
            yield f"{key}: the disk of {there} is full: make room on it, or give a folder on another one"
    from verl.utils.tracking import Tracking

    for name in loggers:
        if name not in Tracking.supported_backend:
            yield f"trainer.logger: {name!r} is not one of {', '.join(Tracking.supported_backend)}"
        elif (module := LOGGERS.get(name)) and not _installed(module):
            yield f"trainer.logger: {name} isn't installed: install it, or leave it out"


def _installed(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True


LEAST_FREE = 16 << 20
"""Bytes: less is full, whatever is to be written."""


def _models(config: DictConfig, folder: Path, starts: bool = False) -> Iterator[str]:
    keys = ["actor_rollout_ref.model.path"] + ["critic.model.path"] * bool(config.critic.enable)
    for key in keys:
        name = str(OmegaConf.select(config, key))
        path = folder / Path(name).expanduser()
        local = path.exists() or not _HUB_NAME.fullmatch(name) or (folder / name.partition("/")[0]).is_dir()
        if "://" in name:
            continue  # verl fetches it
        if not local:
            yield from _hub_model(key, name) if starts else ()
        elif path.is_file():
            yield f"{key}: {name} is a file: give the folder of a Hugging Face model"
        elif not (path / "config.json").is_file():
            yield f"{key}: no model in {name} (no config.json): give a Hugging Face folder, or make the warm start first"
        elif not find_weights(path):
            yield f"{key}: no weights in {name}: give a Hugging Face folder that was saved with them"
        else:
            yield from _model_files(key, name, path, config)


def _hub_model(key: str, name: str) -> Iterator[str]:
    """A name of the Hub that is neither in its cache nor answered for within seconds; verl asks for almost a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
    except Exception as error:  # no such model, no access, no network, a name that can't be one
        yield (
            f"{key}: no folder {name}, and the Hugging Face Hub gives no model of that name ({in_a_line(error, 160)}): "
            f"give a folder, or make the warm start first"
        )


HUB_SECONDS = 5.0


def _model_files(key: str, name: str, path: Path, config: DictConfig) -> Iterator[str]:
    try:
        found = json.loads((path / "config.json").read_text())
        wrong = "" if isinstance(found, dict) and found.get("model_type") else "it names no model_type"
    except (ValueError, OSError) as error:
        wrong = in_a_line(error, 160)
    if wrong:
        yield f"{key}: {name}/config.json is no model's ({wrong}): give a Hugging Face folder"
    yield from (f"{key}: {line}" for line in check_files(path))
    tokenizer = OmegaConf.select(config, TOKENIZER_KEY)
    if not tokenizer and not any((path / file).is_file() for file in TOKENIZERS):
        yield f"{key}: no tokenizer in {name} ({TOKENIZERS[0]}): save it there, or set {TOKENIZER_KEY}"


def _resumed(config: DictConfig, folder: Path) -> Iterator[str]:
    """Whether there is a checkpoint to go on from, and as many ranks as saved it."""
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return
    if trainer.resume_mode == "resume_path":
        key, step = "trainer.resume_from_path", folder / str(trainer.resume_from_path)
        if not step.is_dir() or not re.fullmatch(r"global_step_\d+", step.name):
            yield f"{key}: no checkpoint {trainer.resume_from_path}: give a folder global_step_N"
            return
    else:
        key = "trainer.default_local_dir"
        try:
            step = latest_step(folder / str(trainer.default_local_dir))
        except OSError as error:
            yield f"{key}: {error}"
            return
    if step is None:
        return
    yield from (f"{key}: {line}" for line in check_files(step))
    file = step / "actor/fsdp_config.json"
    if not file.is_file():
        if config.actor_rollout_ref.actor.strategy in ("fsdp", "fsdp2"):
            yield f"{key}: {step} is no whole checkpoint (no actor/{file.name}): give another, or trainer.resume_mode=disable"
        return
    try:
        saved = int(json.loads(file.read_text())["world_size"])
    except (ValueError, TypeError, KeyError, OSError) as error:
        yield f"{key}: {file} can't be read ({in_a_line(error, 160)}): take another checkpoint, or copy it again"
        return
    ranks = trainer.n_gpus_per_node * trainer.nnodes
    if saved != ranks:
        yield (
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, nnodes={trainer.nnodes}: {step} was saved by {saved} "
            f"ranks and can't be gone on from by {ranks}: run as many, or give another trainer.default_local_dir, or set "
            f"trainer.resume_mode=disable"
        )
    elif trainer.nnodes == 1:
        names = [f"model_world_size_{saved}_rank_{rank}.pt" for rank in range(saved)]
        if missing := [name for name in names if not (file.parent / name).is_file()]:
            yield f"{key}: {file.parent} lacks {missing[0]}: take another checkpoint, or copy it again"


def _prompts(config: DictConfig, bpo: BPOConfig, folder: Path) -> Iterator[str]:
    for key in ("train_files", "val_files"):
        files, rows, complete = config.data[key], 0, True
        names = list(files) if isinstance(files, ListConfig) else [files]
        if not names or not all(names):
            yield f"data.{key}={files} names no prompt file: {MAKE}"
            continue
        for name in names:
            if "://" in str(name):
                complete = False  # verl fetches it
                continue
            path = folder / Path(str(name)).expanduser()
            if path.is_dir():
                yield f"data.{key}: {name} is a folder: name its files"
                complete = False
                continue
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
