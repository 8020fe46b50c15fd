"""A fixed number of optimizer steps a training step, whatever the number of rows, and where each row is trained."""

from __future__ import annotations

from itertools import islice
from typing import Any

import transfer_queue as tq
from omegaconf import open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_bpo.integration.queue_rows import session_of
from verl_bpo.model.packed_tree import place_rows


class FixedUpdates(PPOTrainerSync):
    """verl's synchronous trainer with ``bpo.updates_per_step`` optimizer steps a training step. verl's own number follows
    that of the rows, which varies with the trees."""

    bpo: Any
    """A ``BPOConfig``."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps a training step and epoch: rows vary with the trees, updates must not."""
        if self.bpo.updates_per_step is not None:
            return self.bpo.updates_per_step
        return max(1, self.config.data.train_batch_size // self.config.actor_rollout_ref.actor.ppo_mini_batch_size)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return dp_size * self.updates_per_step

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, **kwargs: Any) -> KVBatchMeta:
        if self.bpo.packed_tree.enable:
            return self._place_trees(batch, metrics)
        batch = super()._balance_batch(batch, metrics, **kwargs)
        ranks = self._ranks()
        size = len(batch) // ranks
        order: list[int] = []
        for rank in range(ranks):
            order += _spread_padding(batch.tags[rank * size : (rank + 1) * size], rank * size)
        batch.reorder(order)
        return batch

    def _ranks(self) -> int:
        found = self.actor_rollout_wg._dispatch_info
        if "actor" not in found:
            found["actor"] = self.actor_rollout_wg._query_dispatch_info("actor")
        return max(found["actor"]) + 1

    def _place_trees(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """For packed trees: a prompt's rows in one mini-batch of one rank as far as possible. Padding rows fill up the
        mini-batches; they are equal, so that packed they cost one of them."""
        ranks, rows = self._ranks(), len(batch)
        ids = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])[
            "input_ids"
        ]
        prompts = [session_of(session_of(key)) for key in batch.keys]
        cells = place_rows(ids, prompts, ranks * self.updates_per_step)
        size = max(map(len, cells))
        batch = upsample_batch_to_divisible_size(batch, size * len(cells), self.tokenizer.eos_token_id)
        padding = iter(range(rows, len(batch)))
        order = [i for cell in cells for i in (*cell, *islice(padding, size - len(cell)))]
        lengths = [tag["seq_len"] for tag in batch.tags]
        per_rank = [order[r * len(order) // ranks : (r + 1) * len(order) // ranks] for r in range(ranks)]
        metrics.update(log_seqlen_unbalance(lengths, per_rank, "global_seqlen"))
        batch.reorder(order)
        return batch

    def _mini_batches(self, batch: KVBatchMeta, section: Any, update: Any, metrics: dict) -> KVBatchMeta:
        """Run verl's ``update`` with mini-batches of ``rows / updates_per_step`` rows.

        verl multiplies ``ppo_mini_batch_size`` by ``rollout.n``, which says nothing about the rows of a tree.
        """
        rollout = self.config.actor_rollout_ref.rollout
        rows, (size, n) = len(batch) // self.updates_per_step, (section.ppo_mini_batch_size, rollout.n)
        with open_dict(self.config):
            section.ppo_mini_batch_size, rollout.n = rows, 1
        try:
            return update(batch, metrics)
        finally:
            with open_dict(self.config):
                section.ppo_mini_batch_size, rollout.n = size, n

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        actor = self.config.actor_rollout_ref.actor
        batch = self._mini_batches(batch, actor, super()._update_actor, metrics)
        _packed_metrics(metrics, self.updates_per_step * actor.ppo_epochs)
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return self._mini_batches(batch, self.config.critic, super()._update_critic, metrics)


def _packed_metrics(metrics: dict, updates: int) -> None:
    """``packed/*`` of a whole step; verl gives means over the mini-batches. Nothing without packed trees."""
    for key in [k for k in metrics if k.startswith("actor/packed/")]:
        metrics[key.removeprefix("actor/")] = float(metrics.pop(key) * updates)
    if "packed/total_tokens" in metrics:
        metrics["packed/compute_ratio"] = metrics["packed/unique_tokens"] / metrics["packed/total_tokens"]


def _spread_padding(tags: list[dict], start: int) -> list[int]:
    """Order of one rank's rows with its padding rows spread evenly, so that no mini-batch is padding alone."""
    padding = [start + i for i, tag in enumerate(tags) if tag.get("is_padding", False)]
    real = [start + i for i, tag in enumerate(tags) if not tag.get("is_padding", False)]
    order, taken = [], 0
    for slot in range(len(tags)):
        due = int((slot + 1) * len(padding) / len(tags))
        if due > taken:
            order.append(padding[taken])
            taken += 1
        else:
            order.append(real[slot - taken])
    return order
