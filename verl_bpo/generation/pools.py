"""The sandboxes of rollouts, by environment."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verl_bpo.config.schema import EnvConfig
from verl_bpo.sandbox import SandboxPool
from verl_bpo.sandbox.loading import load_environment

if TYPE_CHECKING:
    from verl_bpo.integration.ray_workers import RayWorkers


class Pools:
    """One pool of ``spec.workers`` worlds for each environment that is asked for, where ``spec.placement`` says."""

    def __init__(self, spec: EnvConfig) -> None:
        self.spec = spec
        self._pools: dict[str, SandboxPool] = {}
        self._make_worker: RayWorkers | None = None
        if spec.placement.where == "ray":
            from verl_bpo.integration.ray_workers import RayWorkers

            self._make_worker = RayWorkers(spec.placement)

    def __getitem__(self, env: str) -> SandboxPool:
        if env not in self._pools:
            spec = self.spec
            self._pools[env] = SandboxPool(
                env,
                environment_kwargs(env, spec),
                backend=spec.backend,
                size=spec.workers,
                step_timeout=spec.step_timeout,
                reset_timeout=spec.reset_timeout,
                isolation=spec.isolation,
                snapshot_bytes=spec.snapshot_mb << 20,
                make_worker=self._make_worker,
            )
        return self._pools[env]

    def close(self) -> None:
        """End all their processes."""
        for pool in self._pools.values():
            pool.close()
        if self._make_worker is not None:
            self._make_worker.close()


def environment_kwargs(env: str, spec: EnvConfig) -> dict[str, Any]:
    """The constructor's arguments: the user's, and for one that acts by shell commands the containers that it is to use."""
    if spec.execution == "container" and load_environment(env).runs_commands:
        return {**spec.kwargs, "container": asdict(spec.container)}
    return spec.kwargs
