"""verl's FSDP engine on packed trees: old log-probs, reference log-probs and updates compute each tree token once.

Chosen by ``bpo.packed_tree.enable=true``, which reaches the workers as ``VERL_ENGINE_VENDOR=packed_tree``: verl's engine
registry then takes it for language models and for actors with a value readout, and verl's own engines for all others.
Losses see what they always see, values on the original rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.utils.model import extract_multi_modal_inputs
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from verl_bpo.model.engine import MODEL_TYPE, ValueReadoutEngine
from verl_bpo.model.packed_tree import (
    PackedTree,
    PackedTreeUnsupported,
    choose_backend,
    pack_rows,
    plan_micro_batches,
    row_outputs,
    tree_outputs,
)
from verl_bpo.model.packed_tree.attention import attach
from verl_bpo.model.packed_tree.forward import model_inputs
from verl_bpo.model.value_readout import ReadPositions

VENDOR = "packed_tree"
BACKEND = "VERL_BPO_PACKED_BACKEND"
"""Environment variable with the attention backend, ``auto`` when unset."""
_KEYS: dict[str, Any] = {"backend": ["fsdp", "fsdp2"], "device": ["cuda"], "vendor": VENDOR}


@EngineRegistry.register(model_type="language_model", **_KEYS)
class PackedTreeEngine(transformer_impl.FSDPEngineWithLMHead):
    """verl's language-model engine whose forward packs the rows of its micro-batch.

    Raises:
        PackedTreeUnsupported: a setting or a model under which packed trees would be wrong or useless.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unsupported(model_config, engine_config)
        self.backend = os.environ.get(BACKEND, "auto")
        super().__init__(model_config, engine_config, *args, **kwargs)
        self._tree: PackedTree | None = None
        self._pack_seconds = 0.0

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        attach(base)  # before sharding, so that an unsupported model stops here
        module = super()._build_fsdp_module(module)
        name = get_device_name()
        chosen = choose_backend(torch.device(name), self._autocast_dtype, self.backend)
        if self.rank == 0:
            role = "reference" if self.engine_config.forward_only else "actor"
            print(f"verl_bpo: {role} on packed trees, attention {chosen} (bpo.packed_tree.backend={self.backend})")
        return module

    # --- forward ----------------------------------------------------------------------------------------------------

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        _refuse_batch(micro_batch)
        input_ids = micro_batch["input_ids"]
        start = time.perf_counter()
        tree = pack_rows(input_ids).to(input_ids.device)
        self._pack_seconds = time.perf_counter() - start
        if not torch.equal(micro_batch["position_ids"].values(), tree.to_rows(tree.position_ids)):
            raise PackedTreeUnsupported("packed trees need rows whose position ids count from 0")
        self._tree = tree
        return model_inputs(tree, self.backend), {}

    def prepare_model_outputs(
        self, output: Any, output_args: dict, micro_batch: TensorDict, *args: Any, **kw: Any
    ) -> dict:
        tree, offsets = self._tree, micro_batch["input_ids"].offsets()
        wants_entropy = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
        temperature = _one_temperature(micro_batch["temperature"])
        values = row_outputs(*tree_outputs(output.logits[0], tree, temperature, wants_entropy), tree)
        result = {"log_probs": torch.nested.nested_tensor_from_jagged(values.log_probs, offsets)}
        if wants_entropy:
            result["entropy"] = torch.nested.nested_tensor_from_jagged(values.entropy, offsets)
        return result

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if not forward_only:
            found = {
                "packed/unique_tokens": self._tree.unique_tokens,
                "packed/total_tokens": self._tree.total_tokens,
                "packed/build_seconds": self._pack_seconds,
            }
            # verl adds over micro-batches and takes the mean over ranks, where a total is meant.
            ranks = self.get_data_parallel_size()
            totals = Metric.from_dict({k: v * ranks for k, v in found.items()}, AggregationType.SUM)
            output["metrics"] = {**output["metrics"], **totals}
        self._tree = None
        return loss, output

    # --- micro-batches ----------------------------------------------------------------------------------------------

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        with _tree_micro_batches():
            return super().forward_backward_batch(data, loss_function, forward_only)


@EngineRegistry.register(model_type=MODEL_TYPE, **_KEYS)
class PackedReadoutEngine(ValueReadoutEngine, PackedTreeEngine):
    """The same for an actor with a value readout, which reads where the tree holds the rows' boundaries."""

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        tu.assign_non_tensor(micro_batch, use_remove_padding=True)  # the readout's positions then count row tokens
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.readout is not None:
            at, index = self.readout._positions, self._tree.row_index
            self.readout.begin(ReadPositions(index[at.state], index[at.action], self._tree.unique_tokens))
        return inputs, output_args


@contextmanager
def _tree_micro_batches() -> Iterator[None]:
    """verl 0.9.1's engine cuts micro-batches by a function of its module, for which it has no override."""
    stock = transformer_impl.prepare_micro_batches

    def prepare(data: TensorDict, dp_group: Any = None, same_micro_num_in_dp: bool = True, **kwargs: Any) -> Any:
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            return stock(data=data, dp_group=dp_group, same_micro_num_in_dp=same_micro_num_in_dp, **kwargs)
        group = dp_group if same_micro_num_in_dp else None
        plan = plan_micro_batches(
            data["input_ids"], _tree_keys(data), int(data["max_token_len_per_gpu"]), group, get_device_name()
        )
        return [tu.index_select_tensor_dict(data, rows) for rows in plan], plan

    transformer_impl.prepare_micro_batches = prepare
    try:
        yield
    finally:
        transformer_impl.prepare_micro_batches = stock


def _tree_keys(data: TensorDict) -> list[Any]:
    """Rows of one tree, and those of other trees of its prompt row, which share the prompt, carry the row's ``uid``."""
    uids = data.get("uid", None)
    if uids is not None:
        return [getattr(uid, "data", uid) for uid in uids]
    if data.get("prompts", None) is None:
        return list(range(len(data)))
    return [tuple(prompt.tolist()) for prompt in data["prompts"].unbind()]


def _one_temperature(temperature: Any) -> float:
    if not isinstance(temperature, torch.Tensor):
        return max(float(temperature), 1e-8)
    if (temperature != temperature.flatten()[0]).any():
        raise PackedTreeUnsupported("packed trees need one sampling temperature for all rows of a micro-batch")
    return max(float(temperature.flatten()[0]), 1e-8)


def _refuse_batch(micro_batch: TensorDict) -> None:
    for key in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "use_fused_kernels"):
        if tu.get_non_tensor_data(data=micro_batch, key=key, default=False):
            raise PackedTreeUnsupported(f"packed trees don't support {key}: turn it off, or packed trees")
    if extract_multi_modal_inputs(micro_batch.get("multi_modal_inputs", [])):
        raise PackedTreeUnsupported("packed trees don't support images or other multi-modal inputs")


def refuse_unsupported(model_config: Any, engine_config: Any) -> None:
    """Settings that packed trees can't be combined with.

    Raises:
        PackedTreeUnsupported: names the key and what to set instead.
    """
    if engine_config.ulysses_sequence_parallel_size > 1:
        raise PackedTreeUnsupported(
            "packed trees don't support sequence parallelism: set actor_rollout_ref.actor.fsdp_config."
            f"ulysses_sequence_parallel_size=1 (is {engine_config.ulysses_sequence_parallel_size})"
        )
    for key in ("use_fused_kernels", "enable_activation_offload"):
        if getattr(model_config, key, False):
            raise PackedTreeUnsupported(
                f"packed trees don't support actor_rollout_ref.model.{key}=True: set it to False"
            )
