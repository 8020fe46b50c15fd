"""``trainer.v1.trainer_mode=sapo_sync``: SAPO (Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842; not
verl's loss mode ``sapo``). Actor and critic are one model; there is no critic worker."""

from __future__ import annotations

from functools import partial

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_from_nested

from verl_bpo.advantages.bpo import tree_means
from verl_bpo.advantages.estimator import Values
from verl_bpo.advantages.sapo_turns import sapo_targets
from verl_bpo.integration.losses import sapo_loss
from verl_bpo.integration.queue_rows import plain_list
from verl_bpo.integration.tree_trainer import TreeTrainer
from verl_bpo.model.head_fit import FIT_RETURNS
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.rows import RowSpans


@register_trainer("sapo_sync")
class SAPOTrainer(TreeTrainer):
    """Reads V and Q in the forward that computes old log-probs, and trains both with the policy: for an estimator that needs
    values, or for a selector, to say where to branch.

    Works on single trajectories (``rollout.n=1``, the paper's case), on several of a prompt, and on the rows of a BPO tree:
    each turn is trained by one row, so it counts once in the losses and in the normalisation.
    """

    def _setup(self) -> None:
        super()._setup()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(partial(sapo_loss, actor, self.bpo.sapo))

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        fetch = partial(tq.kv_batch_get, keys=batch.keys, partition_id=batch.partition_id)
        data = fetch(select_fields=["response_mask", "extra_fields"])
        mask = data["response_mask"]
        turn_id = [
            _turn_ids(RowSpans.none(len(row)) if tag.get("is_padding", False) else RowSpans.from_dict(extra["row"]))
            for extra, row, tag in zip(plain_list(data["extra_fields"]), mask.unbind(), batch.tags)
        ]
        fields = TensorDict({"turn_id": torch.nested.as_nested_tensor(turn_id, layout=torch.jagged)}, len(batch))
        batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        batch = super()._compute_old_log_prob(batch, metrics)
        # At once: a reference policy with the adapter off would write its own values over these.
        data = fetch(select_fields=["state_values", "action_values"])
        self._read = [response_from_nested(data[key], mask).unbind() for key in ("state_values", "action_values")]
        return batch

    def _read_values(
        self, trees: Forest, rows: list[RowSpans], metrics: dict
    ) -> tuple[Values, dict[str, list[torch.Tensor]]]:
        v, q = (torch.full_like(trees.reward, float("nan")) for _ in range(2))
        for row, row_v, row_q in zip(rows, *self._read):
            v[row.nodes] = row_v[row.starts].to(v)
            q[row.nodes] = row_q[[end - 1 for end in row.ends]].to(q)
        values, found = sapo_targets(trees, v, q, self.bpo.sapo)
        metrics.update(found)
        read = ~trees.state_value.isnan() & ~v.isnan()
        if bool(read.any()):  # the rollout's V of the same state by the same weights
            metrics["sapo/rollout_value_diff"] = float((trees.state_value[read] - v[read]).abs().max())
        learnt = values.for_loss()
        if self.bpo.sapo.head_fit == "ridge":
            returns = tree_means(trees, torch.ones_like(trees.fair)) - trees.earned_before
            learnt[FIT_RETURNS] = returns.masked_fill(~trees.usable[trees.trajectory], 0)
        return values, {key: [row.spread(x) for row in rows] for key, x in learnt.items()}

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch.extra_info["value_step"] = self.global_steps
        batch.extra_info["value_warmup"] = self.global_steps <= self.bpo.sapo.warmup_steps
        batch = super()._update_actor(batch, metrics)
        for key in [k for k in metrics if k.startswith("actor/sapo/")]:
            metrics[key.removeprefix("actor/")] = metrics.pop(key)
        return batch


def _turn_ids(row: RowSpans) -> torch.Tensor:
    """int64 [length]: number of the turn in its row, from 1, on the turn's action tokens; 0 elsewhere."""
    return row.numbered().spread(torch.arange(1, len(row.nodes) + 1))
