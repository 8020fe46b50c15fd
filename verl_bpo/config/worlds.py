"""``bpo.env``: the environment, and where its worlds live."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verl_bpo.options import ConfigError, Options
from verl_bpo.sandbox.loading import BACKENDS
from verl_bpo.shells.base import SHELLS
from verl_bpo.shells.container import ContainerConfig

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]


class PlacementConfig(Options):
    """Where the processes run that worlds live in."""

    where: Literal["local", "ray"] = "local"
    """``local``: beside the rollout worker. ``ray``: in Ray actors, for which Ray finds nodes by the keys below; sandboxes can
    so have CPU nodes to themselves. Tasks' files must then be at the same paths there."""
    worlds: Positive = 16
    """``ray``: most worlds of one actor. A rollout worker starts actors as its ``bpo.env.workers`` need them."""
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    """``ray``: CPUs that an actor reserves."""
    resources: dict[str, Any] = {}
    """``ray``: custom resources that an actor reserves: ``{sandbox: 1}`` for nodes that offer it (``ray start
    --resources='{"sandbox": 8}'``)."""
    strategy: Literal["SPREAD", "DEFAULT"] = "SPREAD"
    """``ray``: ``SPREAD`` puts actors on different nodes, ``DEFAULT`` fills one after the other."""
    start_timeout: Seconds = 120.0
    """``ray``: seconds to wait for a place. Where none is found the run ends with what was asked for and what there is."""

    @model_validator(mode="after")
    def _check(self) -> PlacementConfig:
        key = "bpo.env.placement"
        if self.num_cpus > 1 and self.num_cpus % 1:  # Ray's own rule
            raise ConfigError(f"{key}.num_cpus={self.num_cpus} must be whole if above 1")
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ConfigError(f"{key}.resources.{name} is no custom resource: CPUs are asked for by {key}.num_cpus")
            number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
            if not number or amount <= 0 or (amount > 1 and amount % 1):
                raise ConfigError(f"{key}.resources.{name}={amount!r} must be a number above 0, and whole if above 1")
        return self

    @property
    def asked(self) -> dict[str, float]:
        """What an actor asks Ray for."""
        return {"CPU": self.num_cpus, **self.resources} if self.num_cpus else dict(self.resources)


class EnvConfig(Options):
    name: str = ""
    """Environment of rows that name none: ``textworld``, ``alfworld``, ``package.module:Class`` or ``file.py:Class``, or
    somebody else's by an adapter, ``gymnasium:ID`` (docs/adapters.md).
    A row's ``extra_info.env`` wins."""
    kwargs: dict[str, Any] = {}
    """Passed to the environment's constructor."""
    max_turns: Positive = 20
    """Turns after which an episode is truncated."""
    max_action_tokens: Positive = 64
    """Longest action in tokens."""
    backend: str = "memory"
    """How a world is snapshot: ``memory`` (its own save/load or a copy), ``fork`` (its process), ``replay`` (its
    actions played again), or an own backend, ``file.py:Class``."""
    isolation: Literal["process", "none"] = "process"
    """``process``: worlds live in child processes that may crash or hang alone. ``none``: in the rollout worker."""
    workers: Positive = 2
    """Worlds open at once in one rollout worker; further trees wait."""
    step_timeout: Seconds = 60.0
    """Seconds an action may take; a snapshot; the forks of one; giving a tree back."""
    reset_timeout: Seconds = 300.0
    """Seconds opening a task may take; starting a process; playing all of a branch's actions again."""
    place_timeout: Seconds = 3600.0
    """Seconds a tree waits for a place among ``workers`` while none comes free. Then it is lost."""
    snapshot_mb: Positive = 4096
    """MiB that one tree's snapshots may take, as far as their size is known. Above it those used least recently are
    forgotten, and played again if a fork needs them."""
    memory_mb: Positive | None = None
    """MiB that a worker's process, and each that it starts, may allocate. What needs more loses its branch. None: any."""
    growth_mb: Positive = 512
    """MiB that a worker may grow by, with what it started, from its first tree on. Then it is renewed between two trees."""
    worker_trees: Positive | None = None
    """Trees after which a worker is renewed. None: any number."""
    execution: str = "local"
    """Where environments that act by shell commands (``swebench``, ``repair``) run them: ``local``, isolated on this machine,
    ``container``, on Podman or Docker, ``e2b``, on that service, or in an own kind of shell, ``file.py:Class``.
    ``kwargs.shell`` holds the options of the last two."""
    container: ContainerConfig = ContainerConfig()
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="after")
    def _check(self) -> EnvConfig:
        for key, registry in (("execution", SHELLS), ("backend", BACKENDS)):
            if not registry.knows(getattr(self, key)):
                raise ConfigError(f"bpo.env.{key}={getattr(self, key)!r} is not one of {registry.describe()}")
        if self.placement.where == "ray" and self.isolation == "none":
            raise ConfigError(
                "bpo.env.isolation=none keeps worlds in the rollout worker, bpo.env.placement.where=ray elsewhere: set "
                "isolation=process"
            )
        return self

    @property
    def shell_options(self) -> dict[str, Any]:
        """Options of the shells that have keys of their own."""
        return self.container.model_dump() if self.execution == "container" else {}
