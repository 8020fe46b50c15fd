"""What is so in this process: what of ours verl knows, and whether it runs without an accelerator. Light to import."""

from __future__ import annotations

import os

REGISTERED: list[str] = []
"""What has been registered in this process, in order."""
ERRORS: list[str] = []
"""What failed to register in this process."""


def on_cpu() -> bool:
    """Whether verl runs without an accelerator in this process."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def registrations() -> dict[str, bool]:
    """Whether verl's tables hold our names, by what each stands for. Imports what a trainer imports, which registers them."""
    import verl.experimental.agent_loop
    import verl.trainer.ppo.v1
    import verl.utils.config
    import verl.workers.rollout.base  # noqa: F401
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    return {
        "advantage estimator bpo": "bpo" in ADV_ESTIMATOR_REGISTRY,
        "trainer mode bpo_sync": "bpo_sync" in TRAINER_REGISTRY,
        "trainer mode sapo_sync": "sapo_sync" in TRAINER_REGISTRY,
        "agent loop tree_agent": "tree_agent" in _agent_loop_registry,
        "rollout replica hf": "hf" in RolloutReplicaRegistry._registry,
    }
