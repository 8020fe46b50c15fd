"""From "one key" to a whole run: completes and checks verl's config before Ray starts."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_bpo.advantages.estimator import ESTIMATORS, Estimator
from verl_bpo.config.schema import BPOConfig, build, estimator_class, find_estimator
from verl_bpo.integration.checks import check_numbers, missing_inputs, needs_platform
from verl_bpo.integration.process import ERRORS, on_cpu
from verl_bpo.integration.vllm import vllm_usable
from verl_bpo.options import ConfigError, keys
from verl_bpo.sandbox.loading import BACKENDS, environment_status, load_environment
from verl_bpo.shells.base import SHELLS
from verl_bpo.tree.prompting import PromptConfig
from verl_bpo.tree.selectors import NoBranching

AGENT_LOOP = "tree_agent"
MANAGER = "verl_bpo.integration.manager.TreeManager"
PLAIN_MODE, VALUE_MODE = "bpo_sync", "sapo_sync"
"""Trainer modes: for every estimator, verl's too; and where a value readout is trained."""
VALUE_ENGINES = ("hf", "vllm")
"""Rollout engines that read values of states while they generate."""
VLLM_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"
FLOAT16 = ("16", "fp16", "float16")
"""Names that verl has for it."""
READOUT_MODEL = "language_model_with_value_readout"
PACKED_VENDOR = "packed_tree"
"""Name under which verl's engine registry holds the engines on packed trees."""


def asks_for_us(config: DictConfig) -> bool:
    """Whether a run wants tree rollouts: by its estimator, its agent loop, or any ``bpo.*`` key."""
    agent = OmegaConf.select(config, "actor_rollout_ref.rollout.agent.default_agent_loop")
    return ESTIMATORS.knows(config.algorithm.adv_estimator) or agent == AGENT_LOOP or bool(config.get("bpo"))


def wrap_validate_config(validate: Callable[..., Any]) -> Callable[..., Any]:
    """verl calls ``validate_config`` first of all, before Ray starts: the place to complete the config."""

    @functools.wraps(validate)
    def wrapped(config: DictConfig, *args: Any, **kwargs: Any) -> Any:
        if asks_for_us(config):
            try:
                bpo = prepare(config)
            except ConfigError as error:
                raise SystemExit(f"verl_bpo: {error}") from None
            if wrong := missing_inputs(config, bpo, Path.cwd(), starts=True):
                raise SystemExit("\n".join(f"verl_bpo: {line}" for line in wrong))
        return validate(config, *args, **kwargs)

    return wrapped


def prepare(config: DictConfig, cpu: bool | None = None) -> BPOConfig:
    """Complete ``config`` in place.

    Args:
        cpu: complete it for a machine without an accelerator; None: if this is one.

    Raises:
        ConfigError: keys that are unknown, out of range or contradict each other.
    """
    if ERRORS:
        raise ConfigError(f"the plugin did not register completely: {ERRORS[0]} (see verl-bpo doctor)")
    if advice := needs_platform():
        raise ConfigError(advice)
    check_numbers(config)
    user = OmegaConf.to_container(config.bpo, resolve=True) if config.get("bpo") else {}
    kind, cpu = estimator_class(config.algorithm.adv_estimator), on_cpu() if cpu is None else cpu
    needs = kind.NEEDS if kind else frozenset()
    engine = _rollout_engine(config, cpu)
    values = "value" in needs and engine in VALUE_ENGINES
    resolved = build(_without_unset(user), kind.PRESET if kind else "plain", values)
    readout = "value" in needs or (kind is not None and resolved.branch.needs_value)
    _check(config, resolved, find_estimator(resolved, config.algorithm.adv_estimator), readout, engine)
    if "value" in needs and resolved.preset == "guided" and not values:
        print(
            f"verl_bpo: rollout.name={engine} gives no state values: preset guided forks successful trajectories instead"
        )
    for difference in taught_otherwise(str(config.actor_rollout_ref.model.path), resolved.prompt):
        print(f"verl_bpo: WARNING: {difference}")
    with open_dict(config):
        config.bpo = OmegaConf.create(resolved.model_dump())
        config.trainer.use_v1 = True
        config.trainer.v1.trainer_mode = VALUE_MODE if readout else PLAIN_MODE
        rollout = config.actor_rollout_ref.rollout
        rollout.agent.default_agent_loop = AGENT_LOOP
        rollout.agent.agent_loop_manager_class = MANAGER
        rollout.calculate_log_probs = True
        _environment(config, "VERL_BPO_ENTROPY", "1")
        if readout:
            _use_value_readout(config, resolved)
        if rollout.name == "vllm":
            # vLLM's second model runner samples without the function that the plugin takes entropies from.
            _environment(config, "VLLM_USE_V2_MODEL_RUNNER", "0")
        if resolved.packed_tree.enable:
            _use_packed_trees(config, resolved)
        if cpu:
            adjusted = cpu_defaults(config)
            if adjusted:
                print(f"verl_bpo: no accelerator; set for the CPU: {', '.join(adjusted)}")
    return resolved


def check_by_verl(config: DictConfig) -> None:
    """verl's own checks of a completed config, without the model's files.

    Raises:
        Exception: anything from AssertionError to Hydra's own.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    offline = config.copy()
    with open_dict(offline.critic.model):
        del offline.critic.model["_target_"]  # making it would load the model's files
    check = getattr(validate_config, "__wrapped__", validate_config)
    check(offline, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    omega_conf_to_dataclass(config.algorithm)


def taught_otherwise(model: str, prompt: PromptConfig) -> list[str]:
    """How ``prompt`` differs from the prompts that a warm start was taught with: one line a key. Empty for other models."""
    record = Path(model).expanduser() / "warmstart.json"
    if not record.is_file():
        return []
    known = keys(PromptConfig)
    taught = json.loads(record.read_text())["options"]["prompt"]
    taught = PromptConfig(**{key: value for key, value in taught.items() if key in known})
    compared = ["template", "list_actions", "max_observation_tokens", "context"]
    compared += ["max_actions_listed"] if prompt.list_actions and taught.list_actions else []
    compared += ["window_turns"] if prompt.context == taught.context == "window" else []
    differ = [(key, getattr(prompt, key), getattr(taught, key)) for key in compared]
    differ.append(("system", prompt.system_text, taught.system_text))
    return [
        f"bpo.prompt.{key}={now!r}, but the policy in {model} was taught with {then!r}: it meets prompts it never saw"
        for key, now, then in differ
        if now != then
    ]


def _rollout_engine(config: DictConfig, cpu: bool) -> str:
    """The engine that will run: a CPU has no other than ``hf`` and, where it is installed, vLLM."""
    name = config.actor_rollout_ref.rollout.name
    return "hf" if cpu and not (name == "vllm" and vllm_usable()) else name


def _check(config: DictConfig, bpo: BPOConfig, estimator: Estimator | None, readout: bool, engine: str) -> None:
    mode = config.trainer.v1.trainer_mode
    if mode not in ("sync", PLAIN_MODE, VALUE_MODE):
        raise ConfigError(f"trainer.v1.trainer_mode={mode} can't carry trees yet: use sync, which picks ours")
    if readout:
        _check_readout(config, bpo)
    if estimator and bpo.branch.needs_value and engine not in VALUE_ENGINES:
        raise ConfigError(
            f"bpo.branch.score={bpo.branch.selector.score} needs state values during rollouts, which rollout.name={engine} "
            f"doesn't give: set bpo.branch.score=entropy, or actor_rollout_ref.rollout.name={VALUE_ENGINES[0]}"
        )
    if bpo.packed_tree.enable:
        _check_packed_trees(config, bpo.packed_tree.backend)
    _check_model(config, bpo, readout, engine)
    if estimator and config.algorithm.use_kl_in_reward:
        raise ConfigError(
            "algorithm.use_kl_in_reward=True adds token rewards, which the returns of turns don't see: set it to False and "
            "use actor_rollout_ref.actor.use_kl_loss=True"
        )
    if not estimator and not isinstance(bpo.branch.selector, NoBranching):
        raise ConfigError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} takes independent trajectories, but "
            f"bpo.branch.selector={bpo.branch.selector.NAME} branches: set bpo.preset=plain or adv_estimator=bpo"
        )
    if not estimator and bpo.branch.root_samples != 1:
        raise ConfigError(
            f"bpo.branch.root_samples={bpo.branch.root_samples} is for adv_estimator=bpo; independent trajectories are "
            f"counted by actor_rollout_ref.rollout.n"
        )
    if bpo.updates_per_step and config.data.train_batch_size < bpo.updates_per_step:
        raise ConfigError(
            f"bpo.updates_per_step={bpo.updates_per_step} is more than data.train_batch_size="
            f"{config.data.train_batch_size} prompts"
        )
    plain = isinstance(bpo.branch.selector, NoBranching)
    if plain and bpo.budget.unit == "leaves" and bpo.budget.limit > bpo.branch.root_samples:
        raise ConfigError(
            f"bpo.budget.limit={bpo.budget.limit}: without branching (bpo.branch.selector=none) a tree has "
            f"bpo.branch.root_samples={bpo.branch.root_samples} trajectories and nothing spends the rest: set both alike, or "
            f"choose a selector"
        )
    alone = plain and bpo.branch.root_samples == 1
    if estimator and "siblings" in estimator.NEEDS and alone and config.actor_rollout_ref.rollout.n == 1:
        raise ConfigError(
            "bpo.branch.selector=none with one trajectory a tree and rollout.n=1 leaves no siblings to learn from: "
            "choose a selector, or raise bpo.branch.root_samples or actor_rollout_ref.rollout.n"
        )
    if estimator and not plain:
        _check_trees(config, bpo)
    if bpo.env.name:
        usable, reason = environment_status(bpo.env.name)
        if not usable:
            raise ConfigError(reason)
        if bpo.env.execution != "local" and not load_environment(bpo.env.name).runs_commands:
            raise ConfigError(
                f"bpo.env.execution={bpo.env.execution}: environment {bpo.env.name} runs no shell commands; leave it at local"
            )
    for registry, name in ((BACKENDS, bpo.env.backend), (SHELLS, bpo.env.execution)):
        usable, reason = registry.status(name)
        if not usable:
            raise ConfigError(reason)
    room = config.data.max_response_length
    if bpo.env.max_action_tokens > room:
        raise ConfigError(
            f"bpo.env.max_action_tokens={bpo.env.max_action_tokens} is more than data.max_response_length={room}, which "
            f"holds a whole trajectory after its prompt"
        )


def _check_trees(config: DictConfig, bpo: BPOConfig) -> None:
    """What would change the meaning of a tree's entropies or weights without a word."""
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    if mode.startswith("seq-mean"):
        raise ConfigError(
            f"actor_rollout_ref.actor.loss_agg_mode={mode} gives every row the same weight, and the rows of a tree train "
            f"from one turn to a whole trajectory: set it to token-mean"
        )
    rollout = config.actor_rollout_ref.rollout
    cut = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0}
    if bpo.branch.needs_entropy and any(cut.values()):
        key = next(key for key, given in cut.items() if given)
        raise ConfigError(
            f"actor_rollout_ref.rollout.{key}={rollout[key]} cuts the distribution that bpo.branch.selector="
            f"{bpo.branch.selector.NAME} takes entropies of: leave it out, or use a selector that needs none"
        )


def _check_readout(config: DictConfig, bpo: BPOConfig) -> None:
    """What the value readout can't work with; each would give wrong values or fail deep inside a worker."""
    sapo = "the value readout of SAPO (Single-rollout Autoregressive Policy Optimization)"
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if actor.strategy not in ("fsdp", "fsdp2"):
        raise ConfigError(
            f"actor_rollout_ref.actor.strategy={actor.strategy} has no value readout, which {sapo} needs: use fsdp2"
        )
    if config.critic.enable:
        raise ConfigError(
            f"critic.enable=True starts a critic, which {sapo} reads from the actor: leave critic.enable unset"
        )
    for key, selected in (
        ("actor_rollout_ref.model.use_fused_kernels", model.get("use_fused_kernels")),
        ("actor_rollout_ref.model.enable_activation_offload", model.get("enable_activation_offload")),
        (
            "algorithm.rollout_correction.bypass_mode",
            OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"),
        ),
    ):
        if selected:
            raise ConfigError(f"{key}=True hides from {sapo} the forward that it reads values in: set it to False")
    if bpo.sapo.head_fit == "ridge" and bpo.packed_tree.enable and bpo.packed_tree.chunked is not False:
        raise ConfigError(
            f"bpo.packed_tree.chunked={bpo.packed_tree.chunked} computes a tree in parts, of which bpo.sapo.head_fit=ridge "
            f"keeps no hidden states: set bpo.packed_tree.chunked=false"
        )
    precision = OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype")
    if str(precision) in FLOAT16:
        raise ConfigError(
            f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={precision} scales the gradients that {sapo} "
            f"clips: set it to bf16"
        )
    ulysses = OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size") or 1
    if max(ulysses, actor.get("ulysses_sequence_parallel_size") or 1) > 1:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={ulysses} splits the rows that {sapo} reads values in: set it to 1"
        )


def _use_value_readout(config: DictConfig, bpo: BPOConfig) -> None:
    config.actor_rollout_ref.model.model_type = READOUT_MODEL
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref):
        if role.strategy == "fsdp":
            role.strategy = "fsdp2"
            print("verl_bpo: strategy=fsdp2 in place of fsdp, for SAPO's float32 value heads")
    _environment(config, "VERL_BPO_SAPO", json.dumps(bpo.sapo.model_dump()))
    _environment(config, "VERL_BPO_VALUES_IN_ROLLOUT", str(int(bpo.branch.needs_value)))


def _check_packed_trees(config: DictConfig, backend: str) -> None:
    """What packed trees can't be combined with; each would stop deep inside a worker, or silently not pack."""
    why = "bpo.packed_tree.enable=True"
    roles = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
    for role in roles:
        strategy = OmegaConf.select(config, f"{role}.strategy")
        if strategy not in ("fsdp", "fsdp2"):
            raise ConfigError(
                f"{role}.strategy={strategy} has no engine for packed trees: use fsdp2, or turn {why} off"
            )
        for key in ("fsdp_config.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size"):
            ranks = OmegaConf.select(config, f"{role}.{key}") or 1
            if ranks > 1:
                raise ConfigError(f"{role}.{key}={ranks} splits the sequences that {why} packs: set it to 1")
    for key in (
        "actor_rollout_ref.model.use_fused_kernels",
        "actor_rollout_ref.model.enable_activation_offload",
        "actor_rollout_ref.model.mtp.enable",
        "actor_rollout_ref.actor.calculate_sum_pi_squared",
        "distillation.enabled",
    ):
        if OmegaConf.select(config, key):
            raise ConfigError(f"{key}=True can't be combined with {why}: set one of them to False")
    vendor = os.environ.get("VERL_ENGINE_VENDOR", PACKED_VENDOR)
    if vendor != PACKED_VENDOR:
        raise ConfigError(f"VERL_ENGINE_VENDOR={vendor} selects other engines than {why} needs: unset it")
    if not on_cpu() and config.trainer.device != "cuda":
        raise ConfigError(f"trainer.device={config.trainer.device} has no engine for packed trees: turn {why} off")
    if on_cpu() and backend not in ("auto", "sdpa"):
        raise ConfigError(f"bpo.packed_tree.backend={backend} trains on a GPU only: use auto or sdpa")


def _check_model(config: DictConfig, bpo: BPOConfig, readout: bool, engine: str) -> None:
    """Whether what will run computes this model right: by its config, then by the model itself, without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_bpo.model.head_fit import check_width
    from verl_bpo.model.packed_tree.attach import attach
    from verl_bpo.model.support import GENERATOR, PACKED, READOUT, UnsupportedModel, attention_layers, check_config
    from verl_bpo.model.value_readout import attach_value_readout

    packed, generator = bpo.packed_tree.enable, engine == "hf"
    uses = [use for use, wanted in ((PACKED, packed), (GENERATOR, generator), (READOUT, readout)) if wanted]
    if not uses:
        return
    model, longest = config.actor_rollout_ref.model, config.data.max_prompt_length + config.data.max_response_length
    trust = bool(model.get("trust_remote_code"))
    try:
        found = AutoConfig.from_pretrained(os.path.expanduser(model.path), trust_remote_code=trust)
    except (OSError, ValueError):
        return  # a path that verl downloads from, or a wrong one: the worker checks again, verl says what is wrong
    changes = model.get("override_config") or {}
    for key, value in (changes.get("model_config") or changes).items():
        if key != "attn_implementation" and not isinstance(value, DictConfig):
            setattr(found, key, value)
    try:
        for use in uses:
            check_config(found, use, longest)
        try:
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(found, trust_remote_code=trust)
        except Exception:
            return  # its own code can't do without weights: the worker checks again where it has them
        if packed:
            attach(empty)
        if generator:
            attention_layers(empty, GENERATOR)
        if readout:
            width = attach_value_readout(empty).weight.shape[1]
            if bpo.sapo.head_fit == "ridge":
                check_width(width)
    except UnsupportedModel as error:
        raise ConfigError(str(error)) from None


def _use_packed_trees(config: DictConfig, bpo: BPOConfig) -> None:
    actor = config.actor_rollout_ref.actor
    _environment(config, "VERL_ENGINE_VENDOR", PACKED_VENDOR)  # verl's other engines know no such vendor and stay
    _environment(config, "VERL_BPO_PACKED_BACKEND", bpo.packed_tree.backend)
    _environment(config, "VERL_BPO_PACKED_CHUNKED", str(bpo.packed_tree.chunked).lower())
    if not actor.use_dynamic_bsz:
        print(
            "verl_bpo: WARNING: packed trees share less in micro-batches of a fixed number of rows, and "
            "bpo.packed_tree.chunked has no token budget to keep: set actor_rollout_ref.actor.use_dynamic_bsz=True"
        )
    if actor.shuffle:
        print(
            "verl_bpo: WARNING: actor_rollout_ref.actor.shuffle=True scatters the rows of a tree over mini-batches, so that "
            "packed trees share less"
        )


def cpu_defaults(config: DictConfig) -> list[str]:
    """Settings without which verl can't run on a CPU; returns those that were changed."""
    ranks = config.trainer.n_gpus_per_node
    ranks = ranks if ranks <= (os.cpu_count() or 1) else 1
    wanted: dict[str, Any] = {
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": ranks,
        "ray_kwargs.ray_init.num_gpus": ranks,  # logical: placement groups ask for them
        "ray_kwargs.ray_init.include_dashboard": False,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "reward.num_workers": 1,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "critic.strategy": "fsdp2",
        "critic.model.use_remove_padding": False,
        "critic.model.override_config.attn_implementation": "sdpa",
    }
    wanted["actor_rollout_ref.rollout.name"] = _rollout_engine(config, cpu=True)
    if wanted["actor_rollout_ref.rollout.name"] == "vllm":
        wanted["actor_rollout_ref.rollout.enforce_eager"] = True
        wanted["actor_rollout_ref.rollout.enable_sleep_mode"] = False
        if OmegaConf.select(config, f"{VLLM_KWARGS}.block_size") is None:
            wanted[f"{VLLM_KWARGS}.block_size"] = 32  # vLLM's own 128 tokens reuse little of short prompts
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            _environment(config, "VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM would take half of the memory
    if os.environ.get("RAY_ADDRESS"):  # a running cluster has what it was started with, and takes no numbers
        wanted = {key: value for key, value in wanted.items() if not key.startswith("ray_kwargs.ray_init.")}
        for name in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE"):
            _environment(config, name, os.environ[name])
    elif not config.ray_kwargs.ray_init.get("num_cpus"):
        wanted["ray_kwargs.ray_init.num_cpus"] = 16  # logical: verl's ~15 actors mostly wait for each other
    for role, engine in (
        ("actor_rollout_ref.actor", "fsdp_config"),
        ("actor_rollout_ref.ref", "fsdp_config"),
        ("critic", "fsdp"),
    ):
        wanted[f"{role}.strategy"] = "fsdp2"
        wanted[f"{role}.{engine}.model_dtype"] = "fp32"
        wanted[f"{role}.{engine}.use_torch_compile"] = False
        for part in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            wanted[f"{role}.{engine}.mixed_precision.{part}"] = "fp32"
    wanted["actor_rollout_ref.actor.use_torch_compile"] = False
    changed = []
    for key, value in wanted.items():
        if OmegaConf.select(config, key) != value:
            OmegaConf.update(config, key, value, merge=True, force_add=True)
            changed.append(f"{key}={value}")
    return changed


def _environment(config: DictConfig, name: str, value: str) -> None:
    """Set an environment variable here and in every Ray worker."""
    os.environ[name] = value
    OmegaConf.update(config, f"ray_kwargs.ray_init.runtime_env.env_vars.{name}", value, merge=True, force_add=True)


def _without_unset(values: dict[str, Any]) -> dict[str, Any]:
    """A yaml that lists every key writes null for those left to the preset."""
    out = {}
    for key, value in values.items():
        if isinstance(value, dict) and key != "kwargs":
            value = _without_unset(value)
            if not value:
                continue
        if value is not None:
            out[key] = value
    return out
