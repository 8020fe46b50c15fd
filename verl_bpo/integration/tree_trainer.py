"""``trainer.v1.trainer_mode=bpo_sync``: verl's synchronous trainer, for rows that belong to trees."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.config import omega_conf_to_dataclass

from verl_bpo.advantages.estimator import Estimate, Values
from verl_bpo.config.schema import RunError, build, find_estimator
from verl_bpo.generation.play import prompter_for
from verl_bpo.integration import tool_parsers
from verl_bpo.integration.faults import LostShare
from verl_bpo.integration.losses import policy_loss
from verl_bpo.integration.queue_rows import plain_list, session_of
from verl_bpo.integration.stock_advantages import joined_advantage
from verl_bpo.integration.tracking import go_on_after
from verl_bpo.integration.updates import FixedUpdates
from verl_bpo.model.checkpoint import CONFIG_FILE
from verl_bpo.model.tensor_files import check_files
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.metrics import (
    BLIND,
    COMPUTE_COUNTERS,
    blind_entropy,
    lost_shares,
    success_by_type,
    tree_metrics,
    without_lost,
)
from verl_bpo.tree.prompting import PromptConfig
from verl_bpo.tree.record import dump_advantages, set_aside
from verl_bpo.tree.rows import BRANCH_LESSON, LOST, RowSpans
from verl_bpo.tree.selectors import Choosing
from verl_bpo.tree.topology import Tree

STATE_FILE = "verl_bpo.json"


@register_trainer("bpo_sync")
class TreeTrainer(FixedUpdates):
    """Adds to verl's synchronous trainer: advantages over trees, and compute counters for every algorithm."""

    def __init__(self, config: Any) -> None:
        with open_dict(config):
            # verl compares the mode with "sync" to choose the replay buffer and the checkpoint's content.
            config.trainer.v1.trainer_mode = "sync"
        self.bpo = build(OmegaConf.to_container(config.bpo, resolve=True), "plain")
        self.estimator = find_estimator(self.bpo, config.algorithm.adv_estimator)
        self.totals: Counter[str] = Counter()
        selector = self.bpo.branch.selector
        self.memory = selector.memory() if isinstance(selector, Choosing) else None
        self._told_blind = False
        self.lost_share = LostShare(self.bpo.faults)
        self._lost_keys: set[str] = set()
        """Rows of the step that stand for a tree all of whose trajectories were lost."""
        super().__init__(config)

    # --- set-up -----------------------------------------------------------------------------------------------------

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = self.bpo.poll_interval
        sample = buffer.sample

        def checked(*args: Any, **kwargs: Any) -> Any:
            batch, found = sample(*args, **kwargs)
            self._stop_if_hopeless(batch)
            return batch, found

        buffer.sample = checked
        clear = buffer._clear_groups

        def counted(partition_id: str, uids: set[str]) -> None:
            if partition_id == "train":
                self._count_evicted([key for key in buffer.partitions[partition_id] if key.split("_")[0] in uids])
            clear(partition_id, uids)

        buffer._clear_groups = counted
        return buffer

    def _count_evicted(self, keys: list[str]) -> None:
        """What groups cost that are thrown away before a batch is made of the others (``algorithm.filter_groups``)."""
        if not keys:
            return
        data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["extra_fields"])
        trees = [Tree.from_dict(extra["tree"]) for extra in plain_list(data["extra_fields"]) if extra.get("tree")]
        self._add_costs(trees)
        self.totals["evicted_trees"] += len(trees)

    def _add_costs(self, trees: Iterable[Tree]) -> None:
        for tree in trees:
            for key in COMPUTE_COUNTERS:
                self.totals[key] += int(tree.counters.get(key, 0))
            self.totals["env_steps"] += int(tree.counters.get("replayed_steps", 0))  # they were executed, too

    def _stop_if_hopeless(self, batch: KVBatchMeta) -> None:
        """Stop where a rollout met what no other one would fare better with."""
        if not len(batch):
            raise RunError(f"step {self.global_steps} has no rollouts: see the rollout workers' errors above")
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        for extra in plain_list(data["extra_fields"]):
            if extra.get("tree") and (fatal := Tree.from_dict(extra["tree"]).fatal):
                raise RunError(fatal)

    def _init_tokenizer(self) -> None:
        model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        self.tokenizer, self.processor = model.tokenizer, model.processor
        check_policy(
            model.hf_config, self.tokenizer, self.bpo.prompt, self.config.data.get("apply_chat_template_kwargs")
        )

    def _setup(self) -> None:
        super()._setup()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(partial(policy_loss, config=actor))

    def fit(self, agent_loop_manager: Any) -> None:
        if self.bpo.dump_dir is not None and not self.config.trainer.get("val_only", False):
            set_aside(self.bpo.dump_dir, after=self.global_steps)
        go_on_after(self.global_steps)
        super().fit(agent_loop_manager)

    def on_step_begin(self) -> None:
        super().on_step_begin()
        self._steps_before = self.totals["env_steps"]

    def on_step_end(self) -> None:
        super().on_step_end()
        # verl decides before a step whether it is the last, which is validated: so look ahead by one step.
        if self.bpo.max_env_steps is not None:
            taken = self.totals["env_steps"] - self._steps_before
            left = self.bpo.max_env_steps - self.totals["env_steps"]
            if left < 1.5 * taken:
                self.total_training_steps = min(self.total_training_steps, self.global_steps + 1)

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        lesson = None if self.memory is None else self.bpo.branch.selector.taught(self.memory)
        if lesson is not None:
            tu.assign_non_tensor_data(batch, BRANCH_LESSON, lesson)
        return super()._submit_batch_to_rollout(batch)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._update_actor(batch, metrics)
        actor = self.config.actor_rollout_ref.actor
        self.totals["updates"] += self.updates_per_step * actor.ppo_epochs
        metrics["compute/updates"] = float(self.totals["updates"])
        return batch

    # --- advantages -------------------------------------------------------------------------------------------------

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        padding = np.array([bool(tag.get("is_padding", False)) for tag in batch.tags])
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["uid", "response_mask", "extra_fields"]
        )
        uids, extras = plain_list(data["uid"]), plain_list(data["extra_fields"])
        trees = self._trees(batch.keys, uids, extras, padding)
        self._lost_keys = {key for key, extra, pad in zip(batch.keys, extras, padding) if not pad and _is_lost(extra)}
        self._count(trees, metrics)
        metrics["tree/rows"], metrics["tree/padding_rows"] = float((~padding).sum()), float(padding.sum())
        if self.estimator is None:
            return self._stock_advantage(batch, uids, extras, metrics)
        rows = [
            RowSpans.none(len(mask)) if pad
            else RowSpans.from_dict(extra["row"]).shifted(trees.turns[session_of(key)].start)
            for key, mask, extra, pad in zip(batch.keys, data["response_mask"].unbind(), extras, padding)
        ]  # fmt: skip
        return self._turn_advantage(batch, trees, rows, uids, metrics)

    def _turn_advantage(
        self, batch: KVBatchMeta, trees: Forest, rows: list[RowSpans], uids: list, metrics: dict
    ) -> KVBatchMeta:
        """The estimator's numbers of every turn, on the tokens of the row that trains it."""
        values, fields = self._read_values(trees, rows, metrics)
        estimate = self.estimator(trees, values)
        metrics.update(estimate.metrics)
        if estimate.degenerate:
            print(
                f"verl_bpo: WARNING: all advantages of step {self.global_steps} are equal (or there is one turn): the policy "
                f"learns nothing from it"
            )
        self._dump_advantages(trees, uids, batch.keys, estimate)
        advantages = [row.spread(estimate.advantage * estimate.weight) for row in rows]
        masks = [row.spread(estimate.valid.long()) for row in rows]
        return self._put(batch, masks, metrics, **{"advantages": advantages, "returns": advantages, **fields})

    def _read_values(
        self, trees: Forest, rows: list[RowSpans], metrics: dict
    ) -> tuple[Values | None, dict[str, list[torch.Tensor]]]:
        """What the readout said of the turns, and the per-token fields that its loss needs; nothing without one."""
        return None, {}

    def _put(self, batch: KVBatchMeta, masks: list, metrics: dict, **values: list) -> KVBatchMeta:
        """Write the masks of what is trained and per-token ``values``; then verl's rollout correction, if it is on."""
        jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        fields = {key: jagged([x.float() for x in rows]) for key, rows in values.items()}
        fields.update(response_mask=jagged(masks), loss_mask=jagged(masks))
        metrics["bpo/trained_tokens"] = float(sum(int(m.sum()) for m in masks))
        correction = self.config.algorithm.get("rollout_correction", None)
        if correction is not None and not correction.get("bypass_mode", False):
            fields.update(self._rollout_correction(batch, fields, correction, metrics))
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch))
        )

    @staticmethod
    def _rollout_correction(batch: KVBatchMeta, fields: dict, correction: Any, metrics: dict) -> dict:
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["rollout_log_probs", "old_log_probs"]
        )
        data["response_mask"] = fields["response_mask"]
        lengths = fields["response_mask"].offsets().diff().tolist()
        proto = DataProto(batch=data.to_padded_tensor())
        proto, extra = compute_rollout_correction_and_add_to_batch(proto, correction)
        metrics.update(extra)
        out = {}
        for key in ("response_mask", "rollout_is_weights"):
            if key in proto.batch:
                rows = [row[:n] for row, n in zip(proto.batch[key], lengths)]
                out[key] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        out["loss_mask"] = out["response_mask"]
        return out

    def _stock_advantage(self, batch: KVBatchMeta, uids: list, extras: list, metrics: dict) -> KVBatchMeta:
        """verl's own estimator, unchanged, on trajectories; a row that stands for a lost tree leaves its prompt's group."""
        lost = [i for i, extra in enumerate(extras) if _is_lost(extra)]
        if lost:
            renamed = list(uids)
            for i in lost:
                renamed[i] = f"{uids[i]}-lost-{i}"
            fields = TensorDict({}, batch_size=len(batch))
            fields["uid"] = np.array(renamed, dtype=object)
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        if self.bpo.prompt.context == "full":
            return super()._compute_advantage(batch, metrics)
        return joined_advantage(batch, self.config.algorithm, self.kl_ctrl_in_reward, metrics)

    @staticmethod
    def _trees(keys: list[str], uids: list, extras: list, padding: np.ndarray) -> Forest:
        trees, prompts = {}, {}
        for key, uid, extra, pad in zip(keys, uids, extras, padding):
            if not pad and extra.get("tree") is not None:
                trees[session_of(key)] = Tree.from_dict(extra["tree"])
                prompts[session_of(key)] = uid
        return Forest.of(trees, prompts)

    # --- counting ---------------------------------------------------------------------------------------------------

    def _count(self, trees: Forest, metrics: dict) -> None:
        if trees.failures and not bool(trees.usable.any()):
            raise RunError(
                f"every trajectory of step {self.global_steps} was lost to its environment; the first: {trees.failures[0]}"
            )
        self._add_costs(trees.trees.values())
        metrics.update({f"compute/{key}": float(self.totals[key]) for key in COMPUTE_COUNTERS})
        metrics["compute/evicted_trees"] = float(self.totals["evicted_trees"])
        metrics.update(tree_metrics(trees))
        if trees.failures:
            self.lost_share.step(self.global_steps, lost_shares(trees.trees.values()), trees.failures[0])
        branch = self.bpo.branch
        if self.memory is not None:
            self.memory.add(trees.lessons)
        if (
            not self._told_blind
            and branch.needs_entropy
            and branch.entropy_tokens == "first"
            and blind_entropy(trees.score)
        ):
            self._told_blind = True
            print(
                f"verl_bpo: WARNING: in 19 of 20 answers the first token has an entropy below {BLIND} nats, which can't say "
                "where to branch: if they all begin alike, set bpo.branch.entropy_tokens=open"
            )

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        kept = [(key, tag) for key, tag in zip(batch.keys, batch.tags) if key not in self._lost_keys]
        keys, tags = map(list, zip(*kept))
        played = KVBatchMeta(partition_id=batch.partition_id, keys=keys, tags=tags)
        super()._compute_metrics(played, metrics, *args, **kwargs)

    def _dump_advantages(self, trees: Forest, uids: list, keys: list[str], estimate: Estimate) -> None:
        if self.bpo.dump_dir is None:
            return
        prompt_of = {session_of(k): u for k, u in zip(keys, uids)}
        records = [
            estimate.record(
                turns,
                self.global_steps,
                prompt_of[session],
                int(session.rsplit("_", 1)[1]),
                self.estimator.model_dump(),
                self.config.algorithm.adv_estimator,
            )
            for session, turns in trees.turns.items()
        ]
        dump_advantages(self.bpo.dump_dir, self.global_steps, records)

    # --- validation -------------------------------------------------------------------------------------------------

    def _val_metrics_update(
        self, data_sources: list, sample_uids: list, infos: dict, sample_turns: list, *args: Any, **kwargs: Any
    ) -> dict:
        """verl's, of the episodes that were played to an end; how many were lost is said beside them."""
        causes = infos.get("lost", [""] * len(data_sources))
        lost_to = infos.get("lost_to", [])
        played = [i for i, cause in enumerate(causes) if not cause]

        def of_played(values: Sequence) -> list:
            return [values[i] for i in played]

        sources, uids, turns = map(of_played, (data_sources, sample_uids, sample_turns))
        infos = {key: of_played(values) for key, values in infos.items() if key not in ("lost", "lost_to")}
        metrics = super()._val_metrics_update(sources, uids, infos, turns, *args, **kwargs)
        metrics |= success_by_type(sources, infos)
        metrics |= {"val-lost/episodes": float(len(causes) - len(played)), "val-lost/share": 0.0}
        if len(played) == len(causes):
            return metrics
        shares = {cause: n / len(causes) for cause, n in Counter(filter(None, causes)).most_common()}
        told = next(text for cause, text in zip(causes, lost_to) if cause)
        self.lost_share.see(f"validation at step {self.global_steps}", shares, told)
        episodes = self.config.actor_rollout_ref.rollout.val_kwargs.n
        return without_lost(metrics, sources, uids, infos, episodes) | {"val-lost/share": sum(shares.values())}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        partial_file = folder / f".{STATE_FILE}.partial"
        state = {"totals": dict(self.totals), "scores": [] if self.memory is None else list(self.memory.steps)}
        partial_file.write_text(json.dumps(state))
        os.replace(partial_file, folder / STATE_FILE)
        OmegaConf.save(self.config, folder / CONFIG_FILE, resolve=True)  # verl-bpo eval goes by it
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        """verl unpickles a checkpoint's files, so they are looked at first.

        Raises:
            RunError: one holds more than data, or is cut.
        """
        folder = self._checkpoint()
        if folder is not None and (wrong := check_files(folder)):
            raise RunError(wrong[0])
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        file = folder / STATE_FILE
        if file.exists():
            state = json.loads(file.read_text())
            self.totals.update(state["totals"])
            if self.memory is not None:
                self.memory.steps.extend(state.get("scores", []))

    def _checkpoint(self) -> Path | None:
        """The folder that verl goes on from, if any."""
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path":
            return Path(trainer.resume_from_path)
        if trainer.resume_mode == "auto":
            found = find_latest_ckpt_path(os.path.abspath(trainer.default_local_dir))
            return None if found is None else Path(found)
        return None


def _is_lost(extra: dict) -> bool:
    """Whether a row stands for a tree all of whose trajectories were lost."""
    return RowSpans.from_dict(extra["row"]).trajectory == LOST


def check_policy(model: Any, tokenizer: Any, prompt: PromptConfig, template_kwargs: dict | None = None) -> None:
    """See that model, tokenizer and prompt style go together, before anything is loaded.

    Raises:
        RunError: they don't.
    """
    try:
        prompter_for(tokenizer, prompt, template_kwargs or {}, find_parser=tool_parsers.find_parser)
    except ValueError as error:
        raise RunError(str(error)) from error
    rows = model.get_text_config().vocab_size
    if len(tokenizer) > rows:
        raise RunError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeds only {rows}: "
            f"actor_rollout_ref.model.tokenizer_path and actor_rollout_ref.model.path do not belong together"
        )
