"""What an evaluation's numbers depend on, beside model and panel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_bpo.config.schema import BPOConfig, build
from verl_bpo.options import ConfigError

DATA_KEYS = {"max_prompt_length": 2048, "max_response_length": 4096}


@dataclass(frozen=True)
class EvalOptions:
    """The settings under which a model is evaluated."""

    config: BPOConfig
    max_prompt_tokens: int
    max_response_tokens: int
    episodes: int = 1
    """Of each task."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
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
    """Options from ``KEY=VALUE`` overrides of ``bpo.env.*``, ``bpo.prompt.*`` and ``data.max_*_length``. A warm start
    brings the prompts that it was taught with; ``config_file``, a run's resolved config, brings all of these keys, and how the
    run's validation samples. A checkpoint that has its run's config with it needs none.

    Args:
        chosen: other fields of :class:`EvalOptions`; None stands for what is not chosen.

    Raises:
        ConfigError: an unknown key or a wrong value.
    """
    from omegaconf import OmegaConf

    from verl_bpo.model.checkpoint import run_config

    given = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    bpo, data = dict(given.pop("bpo", {})), given.pop("data", {})
    unknown = [
        *given,
        *(f"data.{k}" for k in data if k not in DATA_KEYS),
        *(f"bpo.{k}" for k in bpo if k not in ("env", "prompt")),
    ]
    if unknown:
        raise ConfigError(
            f"{unknown[0]} doesn't bear on an evaluation: give bpo.env.*, bpo.prompt.*, data.max_*_length"
        )
    record = model / "warmstart.json"
    base: dict[str, Any] = {"env": {}, "prompt": {}}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    config_file = config_file or run_config(model)
    if config_file is not None:
        run = OmegaConf.load(config_file)
        base = {key: OmegaConf.to_container(run.bpo[key]) for key in base}
        data = {key: run.data[key] for key in DATA_KEYS} | data
        sampling = OmegaConf.select(run, "actor_rollout_ref.rollout.val_kwargs")
        if sampling is not None:
            temperature = float(sampling.temperature) if sampling.do_sample else 0.0
            chosen = {"temperature": temperature, "top_p": float(sampling.top_p)} | chosen
    elif record.is_file():
        base["prompt"] = json.loads(record.read_text())["options"]["prompt"]
    bpo = {key: base[key] | bpo.get(key, {}) for key in base}
    lengths = DATA_KEYS | data
    config = build(bpo, "plain")
    return EvalOptions(config, lengths["max_prompt_length"], lengths["max_response_length"], **chosen)
