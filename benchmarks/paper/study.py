"""A study file: which methods, environments, models and seeds are compared, and how their runs are started."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

LAUNCHERS = ("quickstart", "recipes")


@dataclass(frozen=True)
class Run:
    """One training run. ``folder`` is relative to the output folder and names all of it."""

    study: str
    launcher: str
    environment: str
    model: str
    method: str
    seed: int
    recipe: str | None
    overrides: tuple[str, ...]
    env_steps: int | None
    eval_episodes: int

    @property
    def folder(self) -> Path:
        return Path(slug(self.environment), slug(self.model), slug(self.method), f"seed-{self.seed}")

    @property
    def title(self) -> str:
        return f"{self.environment} {self.model} {self.method} seed {self.seed}"


@dataclass
class Study:
    """Raises ValueError for what a user can mend; the message names the file's key."""

    name: str
    launcher: str
    seeds: list[int]
    environments: dict[str, dict[str, Any]]
    """``quickstart``: options of ``verl-bpo make-games``, in place of dashes underscores; or ``env`` with the name of an
    environment whose data is there, and how many of its ``train`` and ``valid`` tasks are drawn."""
    models: dict[str, dict[str, Any]]
    """``quickstart``: options of ``recipes/imitation/train.py``. ``recipes``: the ends of the scripts' names."""
    methods: dict[str, dict[str, Any]]
    """``overrides`` of ``verl-bpo train``, ``seeds`` in place of the study's and, for ``recipes``, ``recipe``'s folder."""
    env_steps: int | None = None
    """At which a run ends. Null: where its config says."""
    eval_episodes: int = 0
    """``quickstart``: episodes of each held-out game that the last checkpoint plays; 0: none."""
    overrides: list[str] = field(default_factory=list)
    """Of every run."""
    quick: dict[str, Any] = field(default_factory=dict)
    """Values of other keys under ``--quick``; ``methods`` as a list of names."""

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise ValueError(f"launcher={self.launcher!r} is not one of {', '.join(LAUNCHERS)}")
        for name, method in self.methods.items():
            if unknown := set(method) - {"overrides", "recipe", "seeds"}:
                raise ValueError(f"methods.{name}: unknown key {sorted(unknown)[0]}")
            if (self.launcher == "recipes") != ("recipe" in method):
                raise ValueError(f"methods.{name}: recipe goes with launcher=recipes, and with no other")
        for name, games in self.environments.items():
            if "env" in games and set(games) != {"env", "train", "valid"}:
                raise ValueError(
                    f"environments.{name}: with env go train and valid, the numbers of tasks, and nothing else"
                )
        names = [slug(m) for m in self.methods]
        if len(set(names)) < len(names):
            raise ValueError("methods: two names make the same folder")

    def quickly(self) -> Study:
        """The ``--quick`` version of itself."""
        changes = dict(self.quick)
        if "methods" in changes:
            if unknown := [m for m in changes["methods"] if m not in self.methods]:
                raise ValueError(f"quick.methods: {unknown[0]!r} is no method")
            changes["methods"] = {m: self.methods[m] for m in changes["methods"]}
        if "seeds" in changes:  # of every method
            methods = changes.get("methods", self.methods)
            changes["methods"] = {m: {k: v for k, v in how.items() if k != "seeds"} for m, how in methods.items()}
        return _build({**vars(self), **changes})

    def runs(self) -> list[Run]:
        """Seeds are the outer loop, so that what is there after any time compares all methods."""
        return [
            Run(
                study=self.name,
                launcher=self.launcher,
                environment=environment,
                model=model,
                method=method,
                seed=seed,
                recipe=how.get("recipe"),
                overrides=(*self.overrides, *how.get("overrides", ())),
                env_steps=self.env_steps,
                eval_episodes=self.eval_episodes,
            )
            for seed in sorted({*self.seeds, *(s for m in self.methods.values() for s in m.get("seeds", ()))})
            for environment in self.environments
            for model in self.models
            for method, how in self.methods.items()
            if seed in how.get("seeds", self.seeds)
        ]


def read_study(file: str | Path) -> Study:
    """Raises ValueError or FileNotFoundError; the message names the file."""
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"no study {file}")
    try:
        return _build(yaml.safe_load(file.read_text()))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: {error}") from None


def _build(values: Any) -> Study:
    if not isinstance(values, dict):
        raise ValueError("is no table of keys")
    known = {f.name: f for f in fields(Study)}
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"unknown key {unknown[0]}; known: {', '.join(known)}")
    needed = ("name", "launcher", "seeds", "environments", "models", "methods")
    if missing := [k for k in needed if not values.get(k)]:
        raise ValueError(f"{missing[0]} is missing")
    return Study(**values)


def slug(name: str) -> str:
    """A name as a folder's."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
