"""What a run will need, worked out from its config: GPU memory and computation. Estimates, measured on no GPU yet.

Every term is one line below with its reason, so that a reader can check it, and a measurement can replace it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_bpo.config.schema import BPOConfig

GIB = 2**30

BF16, FP32 = 2, 4
"""Bytes a number. verl's FSDP engine keeps parameters in float32 and computes in bfloat16."""
TRAINED = 4 * FP32
"""Bytes a trained parameter costs: the parameter, its gradient and Adam's two moments, all float32."""
LOGIT = BF16 + FP32
"""Bytes a logit costs in an update: the bfloat16 value and its gradient's float32 working copy."""
SLEEPING_ENGINE = 2.0
"""GiB that CUDA, NCCL and a sleeping vLLM hold on each GPU."""
PEAK_FLOPS, PEAK_BYTES = 989e12, 3.35e12
"""Dense bfloat16 operations and memory traffic a second of an H100 SXM (NVIDIA's data sheet)."""
TRAIN_SHARE, DECODE_SHARE = 0.35, 0.5
"""Shares of those peaks that training and decoding are taken to reach. Assumed."""
USUAL = {"turns": 0.5, "prompt": 0.25, "action": 0.25}
"""Assumed mean of what the config limits, as a share of the limit. Prompts of the recipes were 1,441 (ALFWorld) and 2,003
bytes long (WebShop) on average in half expert, half random play, which at 4 bytes a token is 18% and 24% of 2,048."""


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a Qwen2 or Llama model that its costs follow from."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool
    """Input and output embedding are one matrix."""
    attention_bias: bool
    """Queries, keys and values have biases (Qwen2)."""

    @property
    def parameters(self) -> int:
        head = self.hidden // self.heads
        kv = self.kv_heads * head
        attention = 2 * self.hidden**2 + 2 * self.hidden * kv + self.attention_bias * (self.hidden + 2 * kv)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    @property
    def kv_bytes(self) -> int:
        """Key and value of one token in all layers, bfloat16."""
        return 2 * BF16 * self.layers * self.kv_heads * (self.hidden // self.heads)


KNOWN = {
    "Qwen2.5-1.5B": ModelShape(1536, 28, 12, 2, 8960, 151936, True, True),
    "Qwen2.5-3B": ModelShape(2048, 36, 16, 2, 11008, 151936, True, True),
    "Qwen2.5-7B": ModelShape(3584, 28, 28, 4, 18944, 152064, False, True),
    "Llama-3.1-8B": ModelShape(4096, 32, 32, 8, 14336, 128256, False, False),
}
"""From the models' own config.json, so that no download is needed to plan a run."""


def model_shape(path: str) -> ModelShape | None:
    """Shape of a model folder, or of a known model's name; None for others."""
    file = Path(path).expanduser() / "config.json"
    if file.is_file():
        config = json.loads(file.read_text())
        if config.get("model_type") not in ("qwen2", "llama") or "hidden_size" not in config:
            return None
        return ModelShape(
            config["hidden_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config.get("num_key_value_heads", config["num_attention_heads"]),
            config["intermediate_size"],
            config["vocab_size"],
            config.get("tie_word_embeddings", False),
            config["model_type"] == "qwen2",
        )
    name = path.rstrip("/").rsplit("/", 1)[-1]
    return KNOWN.get(name.removesuffix("-Instruct"))


@dataclass(frozen=True)
class Memory:
    """GiB on each GPU."""

    resident: float
    """Sharded states that stay there all the time."""
    update: float
    """Most during an update of the policy or of the critic."""
    rollout: float
    """Most while vLLM generates."""
    kv_tokens: int
    """Tokens that one rollout replica's key-value cache holds."""

    @property
    def peak(self) -> float:
        return max(self.update, self.rollout)


def estimate_memory(config: DictConfig, model: ModelShape, gpu_gib: float) -> Memory:
    """GPU memory of a run with FSDP2 and vLLM on the same GPUs, each of ``gpu_gib`` GiB."""
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    states = {"actor": TRAINED * model.parameters / gpus}
    offloaded = {"actor": config.actor_rollout_ref.actor.fsdp_config}
    if _has_critic(config):
        states["critic"] = TRAINED * model.parameters / gpus
        offloaded["critic"] = config.critic.fsdp
    kept = {name: size * _kept_share(offloaded[name]) for name, size in states.items()}
    reference = 0.0
    if config.actor_rollout_ref.actor.use_kl_loss and not config.actor_rollout_ref.ref.fsdp_config.param_offload:
        reference = FP32 * model.parameters / gpus
    resident = sum(kept.values()) + reference + SLEEPING_ENGINE * GIB
    update = max(
        resident - kept[name] + states[name] + _update_working_set(section, model, name == "actor")
        for name, section in (("actor", config.actor_rollout_ref.actor), ("critic", config.critic))
        if name in states
    )
    rollout = config.actor_rollout_ref.rollout
    engine = rollout.gpu_memory_utilization * gpu_gib * GIB
    weights = BF16 * model.parameters / rollout.tensor_model_parallel_size
    cache = max(0.0, engine - weights - SLEEPING_ENGINE * GIB)
    return Memory(
        resident / GIB,
        update / GIB,
        (resident + engine) / GIB,
        int(cache * rollout.tensor_model_parallel_size / model.kv_bytes),
    )


def _kept_share(fsdp: DictConfig) -> float:
    """Share of a trained model's states that stays on the GPU between its updates: no gradient does."""
    parameter, moments = FP32 / TRAINED, 2 * FP32 / TRAINED
    return parameter * (not fsdp.param_offload) + moments * (not fsdp.optimizer_offload)


def _update_working_set(section: DictConfig, model: ModelShape, has_logits: bool) -> float:
    """Bytes that the forward and backward of one micro-batch need beside the states."""
    tokens = section.ppo_max_token_len_per_gpu
    # FSDP gathers one unit while the next is on its way, and the embeddings with the root.
    layer = (model.parameters - (1 if model.tied else 2) * model.vocab * model.hidden) / model.layers
    gathered = BF16 * (2 * layer + (1 if model.tied else 2) * model.vocab * model.hidden)
    # Gradient checkpointing keeps each layer's input, and one layer's inner values while it is done again.
    kept = BF16 * tokens * model.hidden * model.layers
    inner = BF16 * tokens * (8 * model.hidden + 4 * model.intermediate)
    logits = LOGIT * tokens * model.vocab if has_logits else 0
    return gathered + kept + inner + logits


@dataclass(frozen=True)
class Compute:
    """What one training step costs."""

    trajectories: int
    env_steps: float
    generated_tokens: float
    trained_tokens: float
    """Tokens that go through the model in an update, prompts included."""
    flops: float
    update_seconds: float
    decode_seconds: float


def estimate_compute(config: DictConfig, bpo: BPOConfig, model: ModelShape, usual: bool) -> Compute:
    """Costs of a training step: the most that the config allows, or (``usual``) at the assumed means :data:`USUAL`.

    A forward costs 2 operations a parameter and token, a backward 4, and gradient checkpointing does the forward again
    (attention over the sequence is left out: below 10% at these lengths). Nothing is assumed to be cached.
    """
    share = USUAL if usual else dict.fromkeys(USUAL, 1.0)
    trees = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    turns, action = bpo.env.max_turns * share["turns"], bpo.env.max_action_tokens * share["action"]
    if bpo.budget.unit == "leaves":
        trajectories = trees * bpo.budget.limit
    else:
        length = turns if bpo.budget.unit == "env_steps" else turns * action
        trajectories = int(trees * bpo.budget.limit / length)
    steps = trajectories * turns
    prompt = config.data.max_prompt_length * share["prompt"]
    if bpo.prompt.context == "window":  # a row per turn, each with its own prompt
        seen = steps * (prompt + action)
    else:
        seen = trajectories * (prompt + min(config.data.max_response_length, turns * (action + prompt)))
    actor = config.actor_rollout_ref.actor
    passes = 2 + 2 + 2 * actor.use_kl_loss + 8 * actor.ppo_epochs  # generation, old log-probs, reference, update
    if _has_critic(config):
        passes += 2 + 8 * config.critic.ppo_epochs
    flops = passes * model.parameters * seen
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    # Turns follow one another, and so do an action's tokens; each of them reads all weights once.
    weights = BF16 * model.parameters / config.actor_rollout_ref.rollout.tensor_model_parallel_size
    decode = turns * action * weights / (PEAK_BYTES * DECODE_SHARE)
    return Compute(trajectories, steps, steps * action, seen, flops, flops / (gpus * PEAK_FLOPS * TRAIN_SHARE), decode)


def _has_critic(config: DictConfig) -> bool:
    enabled = OmegaConf.select(config, "critic.enable")
    return config.algorithm.adv_estimator == "gae" if enabled is None else bool(enabled)
