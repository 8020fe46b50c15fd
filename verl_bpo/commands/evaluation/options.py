"""What an evaluation's numbers depend on, beside model and panel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from verl_bpo.config.schema import merge
from verl_bpo.generation.play import Play
from verl_bpo.options import ConfigError

DATA_KEYS = ("max_prompt_length", "max_response_length", "apply_chat_template_kwargs")


@dataclass(frozen=True)
class EvalOptions(Play):
    """The settings under which a model is evaluated."""

    episodes: int = 1
    """Of each task."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise ValueError(f"--episodes={self.episodes} must be at least 1")
        if self.temperature == 0 and self.episodes > 1:
            raise ValueError(
                f"greedy, every episode of a task is played alike: leave out --episodes {self.episodes}, or give a "
                "--temperature"
            )


def options_from(model: Path, overrides: Sequence[str], config_file: Path | None = None, **chosen: Any) -> EvalOptions:
    """Options from ``KEY=VALUE`` overrides of ``bpo.env.*``, ``bpo.prompt.*``, ``data.max_*_length`` and
    ``data.apply_chat_template_kwargs.*``. A warm start brings the prompts that it was taught with; ``config_file``, a run's
    resolved config, brings all of these keys, and how the run's validation samples. A checkpoint that has its run's config
    with it needs none.

    Args:
        chosen: other fields of :class:`EvalOptions`; None stands for what is not chosen.

    Raises:
        ConfigError: an unknown key or a wrong value.
    """
    from omegaconf import OmegaConf

    from verl_bpo.model.checkpoint import run_config

    given = OmegaConf.to_container(OmegaConf.from_dotlist([word.lstrip("+") for word in overrides]))
    bpo, data = dict(given.pop("bpo", {})), given.pop("data", {})
    unknown = [
        *given,
        *(f"data.{k}" for k in data if k not in DATA_KEYS),
        *(f"bpo.{k}" for k in bpo if k not in ("env", "prompt")),
    ]
    if unknown:
        raise ConfigError(
            f"{unknown[0]} doesn't bear on an evaluation: give bpo.env.*, bpo.prompt.*, data.max_*_length, "
            f"data.apply_chat_template_kwargs.*"
        )
    record = model / "warmstart.json"
    settings: dict[str, Any] = {"bpo": {"env": {}, "prompt": {}}, "data": _defaults()}
    found = None if config_file else run_config(model)
    if config_file or found:
        run = OmegaConf.to_container(OmegaConf.load(config_file or found), resolve=config_file is not None)
        settings = merge(settings, run)
        if found:
            _refuse_code(run, bpo, found)
    elif record.is_file():
        settings["bpo"]["prompt"] = json.loads(record.read_text())["options"]["prompt"]
    play = Play.of_run(merge(settings, {"bpo": bpo, "data": data}))
    chosen = {key: value for key, value in chosen.items() if value is not None}
    return EvalOptions(**{item.name: getattr(play, item.name) for item in fields(Play)} | chosen)


def _refuse_code(run: dict[str, Any], chosen: dict[str, Any], file: Path) -> None:
    """See that a config which came with a checkpoint names no code to load: a checkpoint is data.

    Raises:
        ConfigError: it does, and no override takes its place.
    """
    named, chosen = run.get("bpo", {}).get("env") or {}, chosen.get("env") or {}
    for key in ("name", "backend", "execution"):
        value = str(named.get(key) or "")
        if ":" in value and key not in chosen:
            raise ConfigError(
                f"{file}, which came with the checkpoint, names code of its own (bpo.env.{key}={value}): if you trust it, "
                f"say so with --config {file}, or give bpo.env.{key}"
            )


def _defaults() -> dict[str, Any]:
    lengths = {item.name: item.default for item in fields(Play)}
    return {
        "max_prompt_length": lengths["max_prompt_tokens"],
        "max_response_length": lengths["max_response_tokens"],
    }
