"""The sandboxes of rollouts, by environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_bpo.config.worlds import EnvConfig
from verl_bpo.sandbox import SandboxPool
from verl_bpo.sandbox.loading import load_environment


class Pools:
    """One pool of ``spec.workers`` worlds for each environment that is asked for.

    Args:
        make_worker: makes the processes that worlds live in (see :class:`SandboxPool`); None: processes of this machine,
            whatever ``spec.placement`` says.
    """

    def __init__(self, spec: EnvConfig, make_worker: Callable[[], Any] | None = None) -> None:
        self.spec, self._make_worker = spec, make_worker
        self._pools: dict[str, SandboxPool] = {}

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
                place_timeout=spec.place_timeout,
                snapshot_bytes=spec.snapshot_mb << 20,
                memory_bytes=memory_bytes(spec),
                growth_bytes=spec.growth_mb << 20,
                worker_trees=spec.worker_trees,
                make_worker=self._make_worker,
            )
        return self._pools[env]

    def close(self) -> None:
        """End all their processes."""
        for pool in self._pools.values():
            pool.close()


def memory_bytes(spec: EnvConfig) -> int | None:
    """What a worker's process may allocate."""
    return None if spec.memory_mb is None else spec.memory_mb << 20


def environment_kwargs(env: str, spec: EnvConfig) -> dict[str, Any]:
    """The constructor's arguments: the user's, and for one that acts by shell commands the kind of shell."""
    if spec.execution == EnvConfig.model_fields["execution"].default or not load_environment(env).runs_commands:
        return spec.kwargs
    shell = {**spec.shell_options, **spec.kwargs.get("shell", {})}
    return {**spec.kwargs, "execution": spec.execution, "shell": shell}
