"""``verl-bpo train --dry-run``: what a run would do, checked without starting anything.

A recipe is a shell script that ends in ``verl-bpo train OVERRIDES``. It is run with ``VERL_BPO_DRY_RUN=1``, upon which it
prints its overrides instead (see ``recipes/common.sh``), so that what is checked is what would run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import verl_bpo.config
from verl_bpo.commands.estimate import Compute, Memory, estimate_compute, estimate_memory, model_shape
from verl_bpo.config.schema import BPOConfig
from verl_bpo.options import ConfigError
from verl_bpo.sandbox.errors import in_a_line

CONFIG_FOLDER = Path(verl_bpo.config.__file__).parent
OPEN = ("override_config", "engine_kwargs", "sampler_kwargs", "kwargs", "env_vars", "ray_init", "runtime_env")
"""Keys whose content is passed on to something else, so that any key may stand in them."""


@dataclass
class Report:
    """What a dry run found. ``problems`` stop a run, ``missing`` is data that isn't there yet."""

    config: DictConfig | None = None
    bpo: BPOConfig | None = None
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    memory: Memory | None = None
    most: Compute | None = None
    usual: Compute | None = None


def recipe_arguments(recipe: str, overrides: Sequence[str] = ()) -> list[str]:
    """Arguments that a recipe's script gives to ``verl-bpo train``.

    Raises:
        ConfigError: it doesn't end in one.
    """
    environment = {**os.environ, "VERL_BPO_DRY_RUN": "1"}
    done = subprocess.run(["bash", recipe, *overrides], env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode or "\0" not in done.stdout:
        reason = done.stderr.strip().splitlines()[-1:] or ["it printed no overrides"]
        raise ConfigError(f"{recipe} is no recipe that can be read: {reason[0]}")
    return done.stdout.rstrip("\0").split("\0")


def dry_run(arguments: Sequence[str], gpu_gib: float = 80.0, folder: Path | None = None) -> Report:
    """Check the arguments of ``verl-bpo train``.

    Args:
        arguments: overrides, ``--config-dir`` and ``--config-name``.
        gpu_gib: memory of a GPU, for the estimate.
        folder: what relative paths start from; None: the working directory.
    """
    report, folder = Report(), folder or Path.cwd()
    try:
        report.config, reference = _compose(arguments, folder)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # Hydra's own are of all three kinds
        report.problems.append(_one_line(error))
        return report
    report.problems += unknown_keys(report.config, reference)
    if report.problems:
        return report
    report.problems += _validate(report)
    if report.bpo is None:
        return report
    from verl_bpo.integration.checks import missing_inputs

    report.missing += missing_inputs(report.config, report.bpo, folder)
    _estimate(report, gpu_gib)
    return report


def _compose(arguments: Sequence[str], folder: Path) -> tuple[DictConfig, DictConfig]:
    parser = argparse.ArgumentParser(prog="verl-bpo train", add_help=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="bpo_trainer")
    known, overrides = parser.parse_known_args(list(arguments))
    own = folder / known.config_dir if known.config_dir else CONFIG_FOLDER
    with initialize_config_dir(str(own.resolve()), version_base=None):
        config = compose(known.config_name, overrides)
    return config, _reference()


@lru_cache(maxsize=1)
def _reference() -> DictConfig:
    """All keys of verl's yaml files and ours."""
    with initialize_config_dir(str(CONFIG_FOLDER), version_base=None):
        return compose("bpo_trainer")


def unknown_keys(config: DictConfig, reference: DictConfig) -> list[str]:
    """Keys that neither verl's and our yaml files nor the dataclass of their section have.

    Hydra refuses an unknown key on the command line, but neither one in a yaml file nor one with a plus sign. A plain
    value at the top level is the config's own business, such as ``root``, unless it reads like a section's name.
    """
    problems = []
    for path, name, value, known in _strays(_plain(config), _plain(reference), ""):
        near = difflib.get_close_matches(name, known, 1, 0.7)
        if path or near or isinstance(value, dict):
            problems.append(f"unknown key {path}{name}" + (f": did you mean {path}{near[0]}?" if near else ""))
    return problems


def _plain(config: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=False)


def _strays(config: dict, reference: dict, path: str) -> Iterator[tuple[str, str, Any, list[str]]]:
    known = [*map(str, reference), *_fields(config.get("_target_"))]
    for name, value in config.items():
        inner = reference.get(name)
        if name not in known:
            yield path, name, value, known
        elif isinstance(value, dict) and isinstance(inner, dict) and inner and name not in OPEN:
            yield from _strays(value, inner, f"{path}{name}.")


def _fields(target: str | None) -> list[str]:
    if target is None:
        return []
    from hydra.utils import get_class

    cls = get_class(target)
    return ["_target_", *(f.name for f in dataclasses.fields(cls))] if dataclasses.is_dataclass(cls) else ["_target_"]


def _validate(report: Report) -> list[str]:
    """verl's own checks and ours, on a copy completed as for a machine with GPUs."""
    from verl_bpo.integration.prepare import check_by_verl, prepare

    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            report.bpo = prepare(report.config, cpu=False)
            warnings.simplefilter("ignore")
            check_by_verl(report.config)
    except Exception as error:  # verl's checks raise anything from AssertionError to Hydra's own
        return [_one_line(error)]
    return []


def _estimate(report: Report, gpu_gib: float) -> None:
    model = model_shape(report.config.actor_rollout_ref.model.path)
    if model is None:
        return
    report.memory = estimate_memory(report.config, model, gpu_gib)
    report.most = estimate_compute(report.config, report.bpo, model, usual=False)
    report.usual = estimate_compute(report.config, report.bpo, model, usual=True)


def render(report: Report, gpu_gib: float = 80.0) -> str:
    """The report as text: resolved config, estimates, what is wrong."""
    lines = []
    if report.config is not None and report.bpo is not None:
        lines += [OmegaConf.to_yaml(report.config), f"-- estimate, measured on no GPU (GPUs of {gpu_gib:g} GiB)"]
        lines += _estimate_lines(report, gpu_gib)
    lines += [f"missing: {text}" for text in report.missing]
    lines += [f"problem: {text}" for text in report.problems]
    if not report.problems and not report.missing:
        lines.append("ready")
    return "\n".join(lines)


def _estimate_lines(report: Report, gpu_gib: float) -> list[str]:
    if report.memory is None:
        return [f"none: the shape of model {report.config.actor_rollout_ref.model.path} isn't known here"]
    memory, config = report.memory, report.config
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    verdict = "fits" if memory.peak <= gpu_gib else f"{memory.peak - gpu_gib:.0f} GiB too much"
    longest = config.data.max_prompt_length + config.data.max_response_length
    lines = [
        f"{gpus} GPUs: {memory.update:.0f} GiB in an update, {memory.rollout:.0f} GiB in a rollout, {memory.resident:.0f}"
        f" GiB all the time: {verdict}",
        f"key-value cache of a replica: {memory.kv_tokens:,} tokens, {memory.kv_tokens // longest} longest requests",
    ]
    for name, cost in (("at most", report.most), ("usually", report.usual)):
        lines.append(
            f"a step {name}: {cost.trajectories} trajectories, {cost.env_steps:,.0f} environment steps, "
            f"{cost.generated_tokens / 1e6:.2f}M tokens generated, {cost.trained_tokens / 1e6:.1f}M trained, "
            f"{cost.flops / 1e15:.1f} PFLOP: {(cost.update_seconds + cost.decode_seconds) / 60:.1f} min on H100"
        )
    limit = report.bpo.max_env_steps
    if limit:
        steps = limit / report.usual.env_steps
        seconds = steps * (report.usual.update_seconds + report.usual.decode_seconds)
        lines.append(
            f"the run: {limit:,} environment steps, usually {steps:.0f} training steps, {seconds / 3600:.1f} h"
        )
    return lines


def _one_line(error: Exception) -> str:
    text = in_a_line(error)
    return text if len(text) < 400 else f"{text[:400]}..."


def main(arguments: Sequence[str], gpu_gib: float) -> int:
    """Print the reports of recipes (``*.sh``, each with the overrides), or of plain arguments. 0: all are ready."""
    recipes = [argument for argument in arguments if argument.endswith(".sh")]
    rest = [argument for argument in arguments if argument not in recipes]
    failed = 0
    for recipe in recipes or [None]:
        folder = None
        if recipe is not None:
            print(f"== {recipe}")
            folder = _repository(Path(recipe))
        report = dry_run(recipe_arguments(recipe, rest) if recipe else rest, gpu_gib, folder)
        print(render(report, gpu_gib))
        failed += bool(report.problems or report.missing)
        sys.stdout.flush()
    return 1 if failed else 0


def _repository(recipe: Path) -> Path:
    """The folder that a recipe changes to: the one that holds ``recipes``."""
    parents = recipe.resolve().parents
    return next((parent.parent for parent in parents if parent.name == "recipes"), Path.cwd())
