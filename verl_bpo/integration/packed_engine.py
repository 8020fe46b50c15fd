"""verl's FSDP engine on packed trees: old log-probs, reference log-probs and updates compute each tree token once.

Chosen by ``bpo.packed_tree.enable=true``, which reaches the workers as ``VERL_ENGINE_VENDOR=packed_tree``: verl's engine
registry then takes it for language models and for actors with a value readout, and verl's own engines for all others.
Losses see what they always see, values on the original rows; where their mask hides them, log-probs and entropies are 0, and
no logits are computed. A tree beyond the token budget is cut between branches, or computed in chunks of tokens
(``bpo.packed_tree.chunked``).
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.utils.model import extract_multi_modal_inputs
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.utils import detach_tree

from verl_bpo.integration.value_engine import MODEL_TYPE, ValueReadoutEngine
from verl_bpo.model.packed_tree import (
    HiddenReads,
    PackedTree,
    PackedTreeUnsupported,
    RowOutputs,
    choose_backend,
    chunked_outputs,
    pack_rows,
    plan_micro_batches,
    row_outputs,
    tree_outputs,
    wanted_logits,
)
from verl_bpo.model.packed_tree.attach import attach, model_inputs
from verl_bpo.model.value_readout import ReadPositions, ReadValues

VENDOR = "packed_tree"
BACKEND = "VERL_BPO_PACKED_BACKEND"
"""Environment variable with the attention backend, ``auto`` when unset."""
CHUNKED = "VERL_BPO_PACKED_CHUNKED"
"""Environment variable with ``bpo.packed_tree.chunked``: ``auto`` when unset."""
CHUNKED_COST = {"auto": (4 / 3, 1.0), "true": (0.0, 0.0), "false": (None, None)}
"""By mode, what a token costs in chunks relative to one piece, for :func:`plan_micro_batches`: training and without
gradients. A forward more is a third of forward and backward; ``true`` makes chunks always the cheaper choice."""
_CHUNKS = "packed_tree_chunks"
"""Key of a micro-batch: in how many chunks it is computed."""
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
        self.chunked = os.environ.get(CHUNKED, "auto")
        super().__init__(model_config, engine_config, *args, **kwargs)
        self._tree: PackedTree | None = None
        self._wanted: torch.Tensor | None = None
        """Packed tokens of the micro-batch whose logits are computed; None: all."""
        self._last_micro_batch = True
        self._pack_seconds = 0.0

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        attach(base)  # before sharding, so that an unsupported model stops here
        self._picks_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
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
        learned = _learned(micro_batch) if self._picks_logits else None
        self._wanted = None if learned is None else wanted_logits(tree, learned)
        return model_inputs(tree, self.backend, wanted=self._wanted), {}

    def prepare_model_outputs(
        self, output: Any, output_args: dict, micro_batch: TensorDict, *args: Any, **kw: Any
    ) -> dict:
        offsets = micro_batch["input_ids"].offsets()
        values = output if isinstance(output, RowOutputs) else self._row_outputs(output.logits[0], micro_batch)
        result = {"log_probs": torch.nested.nested_tensor_from_jagged(values.log_probs, offsets)}
        if values.entropy is not None:
            result["entropy"] = torch.nested.nested_tensor_from_jagged(values.entropy, offsets)
        return result

    def _row_outputs(self, logits: torch.Tensor, micro_batch: TensorDict) -> RowOutputs:
        outputs = tree_outputs(logits, self._tree, wanted=self._wanted, **self._asked(micro_batch))
        return row_outputs(*outputs, self._tree)

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        chunks = tu.get_non_tensor_data(data=micro_batch, key=_CHUNKS, default=1)
        if chunks > 1:
            loss, output = self._chunked_step(micro_batch, loss_function, chunks)
        else:
            loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if not forward_only:
            found = {
                "packed/unique_tokens": self._tree.unique_tokens,
                "packed/total_tokens": self._tree.total_tokens,
                "packed/chunked_tokens": self._tree.unique_tokens if chunks > 1 else 0,
                "packed/build_seconds": self._pack_seconds,
            }
            # verl adds over micro-batches and takes the mean over ranks, where a total is meant.
            ranks = self.get_data_parallel_size()
            totals = Metric.from_dict({k: v * ranks for k, v in found.items()}, AggregationType.SUM)
            output["metrics"] = {**output["metrics"], **totals}
        self._tree = self._wanted = None
        return loss, output

    def _chunked_step(self, micro_batch: TensorDict, loss_function: Any, chunks: int) -> Any:
        """verl's ``forward_step`` with a model that runs on one chunk of tokens after another, as often on every rank."""
        micro_batch = micro_batch.to(get_device_id())
        _, output_args = self.prepare_model_inputs(micro_batch)
        half = self._autocast_dtype != torch.float32
        with torch.autocast(get_device_name(), self._autocast_dtype) if half else nullcontext():
            outputs = chunked_outputs(
                self.module,
                self._tree,
                **self._asked(micro_batch),
                wanted=self._wanted,
                chunks=chunks,
                backend=self.backend,
                reads=self._reads(),
                sync=self._chunk_sync,
            )
            model_output = self.prepare_model_outputs(outputs, output_args, micro_batch, loss_function)
            loss, metrics = torch.tensor(1.0, device=get_device_name()), {}
            if loss_function is not None:
                group = self.get_data_parallel_group()
                loss, metrics = loss_function(model_output=model_output, data=micro_batch, dp_group=group)
        output = {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}
        return loss, output

    def _asked(self, micro_batch: TensorDict) -> dict[str, Any]:
        """Both of verl's ways to spare memory on entropies are always on here: they are computed in blocks of tokens, and
        once more for the backward. verl's chunk size is the block's, where its chunking is on."""
        engine = self.engine_config
        return {
            "temperature": _one_temperature(micro_batch["temperature"]),
            "entropy": tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False),
            "block": engine.entropy_from_logits_chunk_size if engine.entropy_from_logits_with_chunking else None,
        }

    def _reads(self) -> HiddenReads | None:
        """What is read in the model's forward beside its logits."""
        return None

    # --- gradients of ranks -----------------------------------------------------------------------------------------

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        self._last_micro_batch = is_last_micro_batch
        with super()._gradient_sync_context(is_last_micro_batch=is_last_micro_batch):
            yield

    def _chunk_sync(self, last: bool) -> AbstractContextManager:
        """Inside a micro-batch whose gradients wait for a later one, nothing is to be done; else they wait for its last
        chunk."""
        if not self._last_micro_batch:
            return nullcontext()
        return super()._gradient_sync_context(is_last_micro_batch=last)

    # --- micro-batches ----------------------------------------------------------------------------------------------

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        chunked_cost = CHUNKED_COST[self.chunked][forward_only]
        with _tree_micro_batches(chunked_cost):
            return super().forward_backward_batch(data, loss_function, forward_only)


@EngineRegistry.register(model_type=MODEL_TYPE, **_KEYS)
class PackedReadoutEngine(ValueReadoutEngine, PackedTreeEngine):
    """The same for an actor with a value readout, which reads where the tree holds the rows' boundaries."""

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        tu.assign_non_tensor(micro_batch, use_remove_padding=True)  # the readout's positions then count row tokens
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.readout is not None:
            at, index = self.readout.positions, self._tree.row_index
            state, action = self._read_at = index[at.state], index[at.action]
            count = self._tree.unique_tokens
            if self._wanted is not None:  # the readout sees the hidden states that logits are computed of
                self._wanted = inputs["logits_to_keep"] = torch.unique(torch.cat([self._wanted, state, action]))
                state, action = torch.searchsorted(self._wanted, state), torch.searchsorted(self._wanted, action)
                count = len(self._wanted)
            self.readout.begin(ReadPositions(state, action, count))
        return inputs, output_args

    def _reads(self) -> HiddenReads | None:
        if self.readout is None:
            return None

        def end() -> tuple[torch.Tensor, torch.Tensor]:
            values = self.readout.end()
            return values.state, values.action

        return HiddenReads(self._read_at, lambda at, n: self.readout.begin(ReadPositions(*at, n)), end)

    def prepare_model_outputs(
        self, output: Any, output_args: dict, micro_batch: TensorDict, *args: Any, **kw: Any
    ) -> dict:
        if self.readout is not None and isinstance(output, RowOutputs):
            self.readout.values = ReadValues(*output.reads)  # as if the readout had seen all tokens at once
        return super().prepare_model_outputs(output, output_args, micro_batch, *args, **kw)


@contextmanager
def _tree_micro_batches(chunked_cost: float | None) -> Iterator[None]:
    """verl 0.9.1's engine cuts micro-batches by a function of its module, for which it has no override."""
    stock = transformer_impl.prepare_micro_batches

    def prepare(data: TensorDict, dp_group: Any = None, same_micro_num_in_dp: bool = True, **kwargs: Any) -> Any:
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            return stock(data=data, dp_group=dp_group, same_micro_num_in_dp=same_micro_num_in_dp, **kwargs)
        group = dp_group if same_micro_num_in_dp else None
        plan = plan_micro_batches(
            data["input_ids"],
            _tree_keys(data),
            int(data["max_token_len_per_gpu"]),
            group,
            get_device_name(),
            chunked_cost,
        )
        micro_batches = [tu.index_select_tensor_dict(data, part.rows) for part in plan]
        for micro_batch, part in zip(micro_batches, plan):
            tu.assign_non_tensor(micro_batch, **{_CHUNKS: part.chunks})
        return micro_batches, [part.rows for part in plan]

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


def _learned(micro_batch: TensorDict) -> torch.Tensor | None:
    """(T,) bool on row tokens: what a loss can see, all of it at its row's end. None where the rows don't say."""
    mask = micro_batch.get("loss_mask", None)
    if mask is None or not mask.is_nested:
        return None
    bounds, own = micro_batch["input_ids"].offsets(), mask.offsets()
    seen = mask.values().bool()
    at = torch.arange(len(seen), device=seen.device) + (bounds[1:] - own[1:]).repeat_interleave(own.diff())
    return seen.new_zeros(int(bounds[-1])).index_put((at,), seen)


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
