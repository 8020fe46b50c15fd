"""verl's own advantage estimators where a trajectory is several rows (``window`` context)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

from verl_bpo.integration.queue_rows import plain_list
from verl_bpo.tree.trajectories import Trajectories


def joined_advantage(batch: KVBatchMeta, algorithm: Any, kl_ctrl: Any, metrics: dict) -> KVBatchMeta:
    """verl's ``_compute_advantage`` with the rows of a trajectory joined for the estimator."""
    names = ["uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    uids, lengths = plain_list(data.pop("uid")), data["response_mask"].offsets().diff().tolist()
    trajectories = Trajectories(batch.keys, lengths)
    rows = DataProto(batch=data.to_padded_tensor())
    # Every row of a trajectory carries its return; joined, it is paid once, at the end.
    ends = torch.zeros(len(batch), 1)
    ends[trajectories.last] = 1.0
    rows.batch["token_level_scores"] = rows.batch["token_level_rewards"] = rows.batch["rm_scores"] * ends
    if algorithm.use_kl_in_reward:
        rows, found = apply_kl_penalty(rows, kl_ctrl=kl_ctrl, kl_penalty=algorithm.kl_penalty)
        metrics.update(found)
    correction, fields = algorithm.get("rollout_correction", None), []
    if correction is not None and "rollout_log_probs" in rows.batch and not correction.get("bypass_mode", False):
        rows, found = compute_rollout_correction_and_add_to_batch(rows, correction)
        metrics.update(found)
        fields = [name for name in ("response_mask", "rollout_is_weights") if name in rows.batch]
    if algorithm.use_kl_in_reward:
        fields.append("token_level_rewards")
    result = trajectory_advantages(rows, trajectories, [uids[row] for row in trajectories.last], algorithm)
    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    values = {name: jagged([row[:n] for row, n in zip(rows.batch[name], lengths)]) for name in fields}
    values |= {name: jagged(tokens) for name, tokens in result.items()}
    return tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(values, batch_size=len(batch))
    )


def trajectory_advantages(
    rows: DataProto, trajectories: Trajectories, uids: list[str], algorithm: Any
) -> dict[str, list[torch.Tensor]]:
    """``advantages`` and ``returns`` of each row's tokens by verl's estimator, which sees whole trajectories.

    Args:
        rows: tensors [rows, tokens], of them ``response_mask`` and ``token_level_rewards``.
        uids: each trajectory's prompt.
    """
    shape = rows.batch["response_mask"].shape
    tensors = {name: trajectories.join(x) for name, x in rows.batch.items() if x.shape == shape}
    joined = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(uids, dtype=object)})
    joined = compute_advantage(
        joined,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    return {name: trajectories.split(joined.batch[name]) for name in ("advantages", "returns")}
