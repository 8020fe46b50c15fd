"""The actor's loss: verl's own, made safe for a mini-batch in which nothing is trained, and with SAPO's value losses."""

from __future__ import annotations

from typing import Any

from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from verl_bpo.advantages.sapo import SAPO
from verl_bpo.advantages.sapo_losses import sapo_value_loss


def policy_loss(config: Any, model_output: dict, data: Any, dp_group: Any = None) -> tuple[Any, dict]:
    """verl's ``ppo_loss``. verl divides by the number of trained tokens of the global mini-batch, which is 0 when all
    its turns are without siblings; then the loss is 0 instead of NaN."""
    if data["batch_num_tokens"] == 0:
        tu.assign_non_tensor(data, batch_num_tokens=1)
    return ppo_loss(config, model_output, data, dp_group)


SAPO_FIELDS = ("returns", "action_targets", "old_state_values", "old_action_values", "action_weights")
"""Per-turn constants of the value losses, each on all tokens of its turn: G, y, V and Q of the sampling policy, and whether
y is a target."""


def sapo_loss(config: Any, sapo: SAPO, model_output: dict, data: Any, dp_group: Any = None) -> tuple[Any, dict]:
    """``policy_loss`` plus the value losses of SAPO (Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842;
    not verl's loss mode ``sapo``): one loss for one backward.

    The means are over the turns of the global mini-batch, as verl's token mean is over its tokens: however it is cut into
    micro-batches and ranks, the gradient is the same.
    """
    from verl_bpo.integration.value_engine import read_turns

    loss, metrics = policy_loss(config, model_output, data, dp_group)
    turns = read_turns(data)
    v = no_padding_2_padding(model_output["state_values"], data)[turns.row, turns.start]
    q = no_padding_2_padding(model_output["action_values"], data)[turns.row, turns.last]
    fields = data.select(*SAPO_FIELDS).to_padded_tensor()
    v_target, q_target, v_old, q_old, q_weight = (fields[key][turns.row, turns.start] for key in SAPO_FIELDS)
    value = sapo_value_loss(
        v,
        q,
        v_target,
        q_target,
        turns=data["batch_num_turns"],
        q_weight=q_weight,
        q_turns=data["batch_num_action_targets"],
        v_coef=sapo.v_coef,
        q_coef=sapo.q_coef,
        v_old=v_old,
        q_old=q_old,
        clip=sapo.value_clip,
    )
    ranks = data["dp_size"]  # FSDP averages gradients over them
    for key in ("v_loss", "q_loss", "v_clipped", "q_clipped"):
        metrics[f"sapo/{key}"] = Metric(value=getattr(value, key) * ranks, aggregation=AggregationType.SUM)
    return loss + value.loss * ranks, metrics
