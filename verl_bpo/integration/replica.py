"""verl rollouts from :class:`ContinuousBatcher`: ``actor_rollout_ref.rollout.name=hf``.

One Ray actor per replica holds the model. The trainer worker pushes weights to it through :class:`ServerAdapter`.
Settings beyond verl's own, with ``+actor_rollout_ref.rollout.engine_kwargs.hf.<key>=<value>``: see :class:`HFOptions`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import ray
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer import normalize_token_ids
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator, get_max_position_embeddings

from verl_bpo.generation.generator import BatcherThread, Completion, ContinuousBatcher
from verl_bpo.generation.play import eos_ids
from verl_bpo.generation.sampling import SamplingParams
from verl_bpo.model.support import longest_sequence
from verl_bpo.model.value_readout import NAME as READOUT

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HFOptions:
    """``actor_rollout_ref.rollout.engine_kwargs.hf``."""

    prefix_cache_tokens: int = 65536
    """Tokens whose keys and values are kept for later prompts; off with ``rollout.enable_prefix_caching=False``."""
    threads: int | None = None
    """CPU threads of a replica. Default: ``VERL_BPO_THREADS``, else all cores divided by the replicas on the node,
    since trainer and rollout take turns."""

    @classmethod
    def from_config(cls, config: RolloutConfig) -> HFOptions:
        values = dict(config.engine_kwargs.get("hf") or {})
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"unknown rollout.engine_kwargs.hf key {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**values)

    def thread_count(self, replicas_on_node: int) -> int:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.threads or int(os.environ.get("VERL_BPO_THREADS", 0)) or max(1, cores // replicas_on_node)


class WeightLoader:
    """Copies a trainer's tensors into a model, bucket by bucket, and sees to it that none is missing."""

    def __init__(self, model: nn.Module) -> None:
        self._targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        self._ignored = set(self._targets) - set(model.state_dict())  # buffers that are derived from the config
        self._received: set[int] = set()

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Copy one bucket.

        Raises:
            ValueError: names the model has no tensor for, or shapes that differ; nothing of the bucket was copied.
        """
        tensors = list(tensors)
        wrong = [f"{name} (not in the model)" for name, _ in tensors if name not in self._targets]
        wrong += [
            f"{name} (shape {tuple(value.shape)}, the model's is {tuple(self._targets[name].shape)})"
            for name, value in tensors
            if name in self._targets and self._targets[name].shape != value.shape
        ]
        if wrong:
            raise ValueError(f"weights do not fit the rollout model: {_some(wrong)}")
        for name, value in tensors:
            # np.array copies: what Ray delivers is read-only, and torch warns of that.
            self._targets[name].copy_(torch.from_numpy(np.array(value)))
            self._received.add(id(self._targets[name]))

    def finish(self) -> None:
        """Check that every parameter and saved buffer came. Tied parameters are one tensor: one name is enough.

        Raises:
            ValueError: names those that did not.
        """
        missing = [
            name
            for name, tensor in self._targets.items()
            if id(tensor) not in self._received and name not in self._ignored
        ]
        self._received.clear()
        if missing:
            raise ValueError(f"the weight update did not bring {_some(missing)}")


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class TransformersServer:
    """The Ray actor: verl's rollout server calls on a :class:`ContinuousBatcher` in a thread of its own."""

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        rollout_mode: RolloutMode,
        replica_rank: int,
        replicas_on_node: int = 1,
    ) -> None:
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        options = HFOptions.from_config(self.config)
        most = get_max_position_embeddings(self.model_config.hf_config)
        self.max_model_len = self.config.max_model_len or min(
            most, longest_sequence(self.model_config.hf_config) or most
        )
        if self.max_model_len > most:
            raise ValueError(f"rollout.max_model_len={self.max_model_len} is more than the model's {most} positions")
        threads = options.thread_count(replicas_on_node)
        torch.set_num_threads(threads)
        self.model = self._load_model(rollout_mode)
        self.weights = WeightLoader(self.model)
        self._heads: dict[str, np.ndarray] = {}
        self.batcher = ContinuousBatcher(
            self.model,
            eos_ids(self.model_config.tokenizer, self.model_config.generation_config, self.model_config.hf_config),
            max_num_seqs=self.config.max_num_seqs,
            max_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            prefix_cache_tokens=options.prefix_cache_tokens if self.config.enable_prefix_caching else 0,
            seed=self.config.seed + replica_rank,
            tokenizer=self.model_config.tokenizer,
        )
        self.thread = BatcherThread(self.batcher, threads)
        self.global_steps: int | None = None
        self._gate = asyncio.Condition()
        self._admission = "open"
        """``open``; ``closed``: requests wait; ``rejecting``: they come back at once."""

    def _load_model(self, rollout_mode: RolloutMode) -> nn.Module:
        dtype = PrecisionType.to_dtype(self.config.dtype)
        if dtype != torch.float32:
            logger.warning(
                "rollout.dtype=%s is slow on most CPUs and samples from other probabilities than a float32 actor "
                "computes: set actor_rollout_ref.rollout.dtype=float32",
                self.config.dtype,
            )
        kwargs = {
            "dtype": dtype,
            "attn_implementation": "sdpa",
            "trust_remote_code": self.model_config.trust_remote_code,
        }
        # A server that shares no process with a trainer, such as a reward model's, gets no weights from one.
        if self.config.load_format == "dummy" and rollout_mode != RolloutMode.COLOCATED:
            return AutoModelForCausalLM.from_config(self.model_config.hf_config, **kwargs)
        return AutoModelForCausalLM.from_pretrained(self.model_config.local_path, **kwargs)

    async def ready(self) -> bool:
        return True

    async def _call(self, function, *args: Any) -> Any:
        return await asyncio.wrap_future(self.thread.call(function, *args))

    # --- generation -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Complete one prompt.

        ``extra_fields`` of the result: ``global_steps`` (the weights' version), ``num_cached_tokens``,
        ``num_prefill_tokens``, where log-probs are asked for ``token_entropy`` (exact, nats, one per token), and where the
        trainer sends its value readout ``state_value`` (V of the prompt).

        Raises:
            ValueError: a prompt that leaves no room for a token, images or videos, or a sampling parameter that is
                unknown or not allowed.
        """
        if image_data or video_data:
            raise ValueError("rollout.name=hf generates from text only: it got images or videos")
        prompt = normalize_token_ids(prompt_ids)
        params = dict(sampling_params)
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and leaves no room within the {self.max_model_len} tokens of "
                "rollout.max_model_len (or the model's max_position_embeddings)"
            )
        wanted = params.pop("max_tokens", None) or params.pop("max_new_tokens", None)
        if wanted is None:
            budget = self.config.prompt_length + self.config.response_length - len(prompt)
            wanted = min(self.config.response_length, budget)
        params.pop("max_new_tokens", None)
        params["max_tokens"] = max(1, min(wanted, room))
        params.setdefault("repetition_penalty", self.config.repetition_penalty)
        params.setdefault("ignore_eos", self.config.ignore_eos)
        checked = SamplingParams.from_dict(params)
        async with self._gate:
            await self._gate.wait_for(lambda: self._admission != "closed")
        if self._admission == "rejecting":
            return self._output(Completion(request_id, [], [], [], "aborted", 0, 0), checked)
        pending = await self._call(self.batcher.submit, prompt, checked, request_id)
        return self._output(await asyncio.wrap_future(pending), checked)

    def _output(self, completion: Completion, params: SamplingParams) -> TokenOutput:
        extra = {
            "global_steps": self.global_steps,
            "num_cached_tokens": completion.num_cached_tokens,
            "num_prefill_tokens": completion.num_prefill_tokens,
        }
        if params.logprobs:
            extra["token_entropy"] = completion.entropies
        if completion.state_value is not None:
            extra["state_value"] = completion.state_value
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.logprobs if params.logprobs else None,
            stop_reason="aborted" if completion.stop_reason == "aborted" else "completed",
            extra_fields=extra,
        )

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request; it returns what it has."""
        aborted = await self._call(self.batcher.abort, request_id)
        return {"aborted": bool(aborted), "request_id": request_id}

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all requests; they return what they have. Later ones wait for :meth:`resume_generation`, or with
        ``reject_request`` come back at once as aborted."""
        await self._set_admission("rejecting" if reject_request else "closed")
        aborted = await self._call(self.batcher.abort)
        return {"aborted_count": len(aborted), "request_ids": aborted}

    async def resume_generation(self) -> None:
        await self._set_admission("open")

    async def _set_admission(self, state: str) -> None:
        async with self._gate:
            self._admission = state
            self._gate.notify_all()

    # --- weights and memory -----------------------------------------------------------------------------------------

    async def load_weights(self, tensors: dict[str, np.ndarray], last: bool) -> None:
        """Take one bucket of weights, between two steps; the ``last`` one ends the update.

        Raises:
            ValueError: see :class:`WeightLoader`.
        """

        def load() -> None:
            heads = {name: tensors[name] for name in tensors if name.startswith(f"{READOUT}.")}
            self.weights.load((name, value) for name, value in tensors.items() if name not in heads)
            self._heads.update(heads)
            self.batcher.weights_changed()
            if last:
                self.weights.finish()
                if self._heads:  # row 0 of each is V's, row 1 Q's
                    weight, bias = (np.array(self._heads.pop(f"{READOUT}.{part}")[0]) for part in ("weight", "bias"))
                    self.batcher.value_head = torch.from_numpy(weight), torch.from_numpy(bias)

        await self._call(load)

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def clear_kv_cache(self) -> None:
        await self._call(self.batcher.prefixes.clear)

    async def release_kv_cache(self) -> None:
        await self._call(self.batcher.release_memory)

    async def resume_kv_cache(self) -> None:
        """Memory comes back when it is needed."""

    async def sleep(self) -> None:
        # Weights stay: they live in memory that the trainer does not need.
        await self._call(self.batcher.release_memory)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Memory comes back when it is needed."""

    async def start_profile(self, **kwargs: Any) -> None:
        """Not profiled."""

    async def stop_profile(self) -> None:
        """Not profiled."""


def _server_name(replica_rank: int, role: str = "", suffix: str = "") -> str:
    """The Ray job's id keeps two runs on one cluster, even in one namespace, from finding each other's servers."""
    return f"hf_server_{role}{replica_rank}{suffix}_{ray.get_runtime_context().get_job_id()}"


class TransformersReplica(RolloutReplica):
    """``rollout.name=hf``: one server per trainer rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.world_size != 1:
            raise ValueError(
                "rollout.name=hf runs a model in one process: set rollout.tensor_model_parallel_size, "
                f"data_parallel_size and pipeline_model_parallel_size to 1 (their product is {self.world_size})"
            )
        HFOptions.from_config(self.config)
        self._replicas = max(1, self.config.nnodes) * self.gpus_per_node

    async def init_hybrid(self, worker_group: RayWorkerGroup) -> None:
        self._replicas = worker_group.world_size
        await super().init_hybrid(worker_group)

    async def launch_servers(self) -> None:
        role = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        options: dict[str, Any] = {
            "name": _server_name(self.replica_rank, role, self.name_suffix),
            "num_cpus": 0,  # trainer and rollout take turns on the same cores
            "max_concurrency": self.max_concurrency,
            # Idle OpenMP threads sleep instead of spinning, or a busy core slows a step down tenfold and more.
            "runtime_env": {"env_vars": {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}},
        }
        if self.workers:
            node = await self.workers[0].__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
            options["scheduling_strategy"] = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, False)
        server = (
            ray.remote(TransformersServer)
            .options(**options)
            .remote(
                self.config,
                self.model_config,
                self.rollout_mode,
                self.replica_rank,
                replicas_on_node=min(self._replicas, self.gpus_per_node),
            )
        )
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = options["name"]


class ServerAdapter(BaseRollout):
    """In the trainer's worker: hands the actor's weights to its replica's server."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, device_mesh=None, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True  # every rank has a replica of its own
        self._server: ray.actor.ActorHandle | None = None

    @property
    def server(self) -> ray.actor.ActorHandle:
        if self._server is None:  # it is started after this worker
            self._server = ray.get_actor(_server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Send full tensors in buckets of ``checkpoint_engine.update_weights_bucket_megabytes``.

        Raises:
            ValueError: weights that do not fit or do not cover the model, LoRA adapters, or delta updates.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"rollout.name=hf takes full tensors, not {wire_format}: use another checkpoint engine")
        if peft_config is not None:
            raise ValueError("rollout.name=hf takes full weights, not LoRA adapters: set model.lora.merge=True")
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket: dict[str, np.ndarray] = {}
        size = 0
        async for name, tensor in ensure_async_iterator(weights):
            if size >= limit:
                await self.server.load_weights.remote(bucket, last=False)
                bucket, size = {}, 0
            # numpy has no bfloat16, and Ray delivers numpy arrays without a copy.
            bucket[name] = tensor.detach().to("cpu", torch.float32).numpy()
            size += bucket[name].nbytes
        await self.server.load_weights.remote(bucket, last=True)
        if global_steps is not None:
            await self.server.set_global_steps.remote(global_steps)
