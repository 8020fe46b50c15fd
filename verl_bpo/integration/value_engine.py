"""verl's FSDP engine for an actor with a value readout: actor and critic of SAPO in one forward and one backward.

SAPO: Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842 (not verl's policy loss of the same name). Selected
by ``actor_rollout_ref.model.model_type=language_model_with_value_readout``, which ``algorithm.adv_estimator=sapo`` sets.

What the readout reads travels in verl's own channels, laid out like log-probs: ``model_output["state_values"]`` holds V_t
where the log-prob of action t's first token stands, ``model_output["action_values"]`` Q_t where that of its last token
stands, and 0 elsewhere. The heads run at these positions only.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_bpo.advantages.sapo import SAPO, TurnBoundaries, turn_boundaries
from verl_bpo.integration.prepare import FLOAT16
from verl_bpo.model.head_fit import FIT_RETURNS, HeadFit
from verl_bpo.model.value_readout import (
    IN_ROLLOUT,
    NAME,
    ValueReadout,
    attach_value_readout,
    boundary_positions,
    read_value_readout,
    save_value_readout,
)

MODEL_TYPE = "language_model_with_value_readout"
SETTINGS = "VERL_BPO_SAPO"
"""Environment variable with ``bpo.sapo`` as JSON: verl hands its own config sections to an engine, and no other."""
FIT_FILE = "value_fit.safetensors"
VALUE_STEP = 0.1
"""How far one step of Adam may move a value under the default learning rate of the heads."""


def read_turns(data: TensorDict) -> TurnBoundaries:
    """Turns of rows whose response fields are jagged: by ``turn_id``, 0 off the actions, or else by the response mask.

    ``turn_id`` is preferred, since a later correction may mask tokens out of the loss: that moves no boundary.
    """
    turn_id = data.get("turn_id", None)
    mask = turn_id if turn_id is not None else data["response_mask"]
    return turn_boundaries(mask.values(), None if turn_id is None else turn_id.values(), offsets=mask.offsets())


@EngineRegistry.register(model_type=MODEL_TYPE, backend=["fsdp", "fsdp2"], device=["cuda", "npu"])
class ValueReadoutEngine(FSDPEngineWithLMHead):
    """verl's language-model engine whose forward also gives V and Q. Without an optimizer (``forward_only``, as the
    reference policy) it is verl's own engine.

    Raises:
        ValueError: a setting under which the readout isn't supported.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.settings = SAPO(**json.loads(os.environ.get(SETTINGS, "{}")))
        self.readout: ValueReadout | None = None
        self._only_heads = False
        self._fit: HeadFit | None = None
        self._fitting = False
        self._head_gradients: list[torch.Tensor | None] = []
        if not engine_config.forward_only:
            refuse_unsupported(model_config, engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    # --- building ---------------------------------------------------------------------------------------------------

    def _build_module(self) -> torch.nn.Module:
        self.model_config.model_type = "language_model"  # verl's builder knows no other
        try:
            return super()._build_module()
        finally:
            self.model_config.model_type = MODEL_TYPE

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.engine_config.forward_only:
            return super()._build_fsdp_module(module)
        readout = attach_value_readout(module, self.settings.value_grad_scale)
        readout.measure_gradients = True
        if self.settings.head_fit == "ridge":
            width = readout.weight.shape[1]
            self._fit = HeadFit(width, self.settings.head_memory, self.settings.head_ridge)
            readout.keeps_hidden = True
        # A unit of its own, so that it computes in float32 whatever the rest does.
        fully_shard(
            readout,
            mesh=self.device_mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32),
            offload_policy=CPUOffloadPolicy(pin_memory=True) if self.engine_config.offload_policy else OffloadPolicy(),
        )
        module = super()._build_fsdp_module(module)
        readout.reset()  # verl loads all ranks from rank 0's state dict, which leaves the readout out
        self.readout = readout
        return module

    def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        if self.readout is None:
            return super()._build_optimizer(module)
        heads = list(self.readout.parameters())
        # A step of Adam moves each weight by lr, and a value by lr times the sum of the hidden state's magnitudes.
        lr = self.settings.head_lr or VALUE_STEP / self.readout.weight.shape[1]
        groups = [
            {"params": self._backbone_parameters(module)},  # first: verl logs the first group's learning rate
            {"params": heads, "lr": lr, "weight_decay": 0.0},
        ]
        optimizer = build_optimizer(groups, self.optimizer_config)
        optimizer.register_step_pre_hook(self._give_heads_their_gradients)
        return optimizer

    def _backbone_parameters(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        heads = {id(p) for p in self.readout.parameters()}
        return [p for p in module.parameters() if id(p) not in heads]

    # --- forward ----------------------------------------------------------------------------------------------------

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.readout is None:
            return inputs, output_args
        turns = read_turns(micro_batch)
        prompt_length = micro_batch["prompts"].offsets().diff()
        offsets = micro_batch["input_ids"].offsets()
        ids = inputs["input_ids"]
        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        row_start = offsets[:-1] if packed else torch.arange(len(ids), device=ids.device) * ids.shape[1]
        self.readout.begin(boundary_positions(turns, row_start, tokens=ids.numel(), prompt_length=prompt_length))
        first = (offsets[:-1] + prompt_length)[turns.row] - 1
        output_args["value_positions"] = (first + turns.start, first + turns.last)
        return inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: dict, micro_batch: TensorDict, *args: Any, **kw: Any
    ) -> dict:
        result = super().prepare_model_outputs(output, output_args, micro_batch, *args, **kw)
        if self.readout is None:
            return result
        values, offsets = self.readout.end(), micro_batch["input_ids"].offsets()
        if self._fitting:
            turns, returns = read_turns(micro_batch), micro_batch[FIT_RETURNS]
            self._fit.add(*values.hidden, returns.values()[returns.offsets()[turns.row] + turns.start])
        for key, at, read in zip(
            ("state_values", "action_values"), output_args["value_positions"], (values.state, values.action)
        ):
            spread = read.new_zeros(int(offsets[-1])).index_put((at,), read)
            result[key] = torch.nested.nested_tensor_from_jagged(spread, offsets)
        return result

    # --- training ---------------------------------------------------------------------------------------------------

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        if self.readout is not None and not forward_only:
            turns, weights = read_turns(data), data["action_weights"]
            targets = weights.values()[weights.offsets()[turns.row] + turns.start].sum()
            counts = torch.tensor([len(turns.row), round(float(targets))], device=get_device_id())
            torch.distributed.all_reduce(counts, group=self.get_data_parallel_group())
            turns, targets = counts.tolist()
            tu.assign_non_tensor(data, batch_num_turns=turns, batch_num_action_targets=targets)
        return super().forward_backward_batch(data, loss_function, forward_only)

    def train_batch(self, data: TensorDict, loss_function: Any) -> Any:
        if self.readout is None:
            return super().train_batch(data, loss_function)
        self._only_heads = bool(tu.get_non_tensor_data(data=data, key="value_warmup", default=False))
        self.readout.pop_gradient_squares()
        if self._fit is not None:
            self._fit.begin(tu.get_non_tensor_data(data=data, key="value_step", default=0))
        self._fitting = self._fit is not None
        try:
            outputs = super().train_batch(data, loss_function)
        finally:
            self._fitting = False
        squares = self.readout.pop_gradient_squares().to(get_device_id())
        torch.distributed.all_reduce(squares, group=self.get_data_parallel_group())
        # verl multiplies a rank's loss by their number, since FSDP averages gradients.
        policy, value = (squares.sqrt() / self.get_data_parallel_size()).tolist()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"].update({"sapo/gradient_policy": [policy], "sapo/gradient_value": [value]})
        if self._fit is not None:
            outputs["metrics"].update(self._solve_heads())
        return outputs

    def _solve_heads(self) -> dict[str, list[float]]:
        """Write the heads that fit all turns seen; what to log of it."""
        start = time.perf_counter()
        self.readout.load_own_state(
            self._fit.finish(lambda sums: torch.distributed.all_reduce(sums, group=self.get_data_parallel_group()))
        )
        if not self.is_mp_src_rank_with_outputs():
            return {}
        v, q = self._fit.ridge
        return {
            "sapo/head_ridge_v": [v],
            "sapo/head_ridge_q": [q],
            "sapo/head_fit_seconds": [time.perf_counter() - start],
        }

    def optimizer_step(self) -> float:
        """One step. The heads are clipped by their own norm: fresh heads have large gradients, which in a common norm would
        hold the policy back. Returns the backbone's norm, which other estimators' runs can be compared with."""
        if self.readout is None:
            return super().optimizer_step()
        heads = list(self.readout.parameters())
        norm = fsdp2_clip_grad_norm_(heads, max_norm=self.optimizer_config.clip_grad)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        stepped = torch.isfinite(norm) and self._fit is None
        self._head_gradients = [p.grad if stepped else None for p in heads]
        for parameter in heads:
            parameter.grad = None
        if self._only_heads:
            for parameter in self._backbone_parameters(self.module):
                parameter.grad = None  # no step, no weight decay, no memory of it in the optimizer
        return super().optimizer_step()

    def _give_heads_their_gradients(self, *args: Any) -> None:
        for parameter, gradient in zip(self.readout.parameters(), self._head_gradients):
            parameter.grad = gradient

    # --- rollout ----------------------------------------------------------------------------------------------------

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """verl's weights for the rollout engine; behind them the heads, for one that reads values (see ``IN_ROLLOUT``)."""
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)
        if self.readout is not None and os.environ.get(IN_ROLLOUT) == "1":
            heads = ((f"{NAME}.{name}", tensor) for name, tensor in self.readout.own_state().items())
            weights = itertools.chain(weights, heads)
        return weights, peft_config

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's checkpoint; the heads go to ``huggingface/value_readout.safetensors`` inside it, their optimizer state
        stays with the optimizer's."""
        super().save_checkpoint(local_path, *args, **kwargs)
        if self.readout is not None and local_path is not None:
            save_value_readout(self.readout, Path(local_path) / "huggingface", write=self.rank == 0)
            if self._fit is not None and self.rank == 0:
                save_file(self._fit.state(), Path(local_path) / FIT_FILE)
            torch.distributed.barrier()

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(local_path, *args, **kwargs)
        if self.readout is not None and local_path is not None:
            self.readout.load_own_state(self._of_rank_0(partial(read_value_readout, Path(local_path) / "huggingface")))
            file = Path(local_path) / FIT_FILE
            if self._fit is not None and self._of_rank_0(
                file.is_file
            ):  # not there if the run had been with adam until now
                self._fit.load_state(self._of_rank_0(partial(load_file, file)))

    def _of_rank_0(self, read: Callable[[], Any]) -> Any:
        """What rank 0 reads and wrote: others may be on machines that don't see its disk."""
        found: list[Any] = [None]
        if self.rank == 0:
            try:
                found = [read()]
            except (OSError, ValueError) as error:  # for all ranks, so that none waits for another
                found = [error]
        torch.distributed.broadcast_object_list(found, src=0)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]


def refuse_unsupported(model_config: Any, engine_config: Any) -> None:
    """Settings under which values would be wrong or nothing would run.

    Raises:
        ValueError: names the key and what to set instead.
    """
    why = "SAPO's value readout (Single-rollout Autoregressive Policy Optimization)"
    if engine_config.strategy != "fsdp2":
        raise ValueError(
            f"{why} needs actor_rollout_ref.actor.strategy=fsdp2 (is {engine_config.strategy}): under fsdp its float32 heads "
            f"would share a flat parameter with the backbone"
        )
    if engine_config.ulysses_sequence_parallel_size > 1:
        raise ValueError(
            f"{why} does not support sequence parallelism: set actor_rollout_ref.actor.fsdp_config."
            f"ulysses_sequence_parallel_size=1 (is {engine_config.ulysses_sequence_parallel_size})"
        )
    if str((engine_config.mixed_precision or {}).get("param_dtype")) in FLOAT16:
        raise ValueError(
            f"{why} does not support float16, whose gradients verl scales until after the heads' own are clipped: set "
            f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16"
        )
    for key in ("use_fused_kernels", "enable_activation_offload"):
        if getattr(model_config, key):
            raise ValueError(f"{why} does not support actor_rollout_ref.model.{key}=True: set it to False")
