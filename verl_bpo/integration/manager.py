"""verl's agent loop worker and manager, changed where a tree needs it."""

from __future__ import annotations

from typing import Any

import ray
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

# verl decorates the class, and Ray refuses to subclass an actor class; this is the plain class underneath.
_PlainWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class _KeepRewards(list):
    """Rows whose rewards stay their own. verl 0.9.1 copies the last output's reward over its siblings
    (``agent_loop_tq.py``: ``for output in outputs[:-1]``), which would erase what tells branches apart."""

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice) and item.stop == -1:
            return []
        return super().__getitem__(item)


class TreeWorkerBase(_PlainWorker):
    """Rolls trees; one per CPU share of a node."""

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        sampling_params = {**sampling_params, "_validate": trajectory["validate"]}
        sampling_params["_models"] = self.model_config.generation_config, self.model_config.hf_config
        return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ):
        if isinstance(output, list):
            output = _KeepRewards(output)
        return await super()._agent_loop_postprocess(output, validate, **kwargs)


TreeWorker = ray.remote(TreeWorkerBase)


class TreeManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` for tree rollouts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = TreeWorker
