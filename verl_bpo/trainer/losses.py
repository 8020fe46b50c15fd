"""The actor's loss: verl's own, made safe for a mini-batch in which nothing is trained."""

from __future__ import annotations

from typing import Any

from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss


def policy_loss(config: Any, model_output: dict, data: Any, dp_group: Any = None) -> tuple[Any, dict]:
    """verl's ``ppo_loss``. verl divides by the number of trained tokens of the global mini-batch, which is 0 when all
    its turns are without siblings; then the loss is 0 instead of NaN."""
    if data["batch_num_tokens"] == 0:
        tu.assign_non_tensor(data, batch_num_tokens=1)
    return ppo_loss(config, model_output, data, dp_group)
