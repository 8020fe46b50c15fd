"""One rank of an engine test: ``engine_worker.py CASE FOLDER``, started once per rank with torch's environment variables."""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed
import verl  # noqa: F401  (loads the plugin)
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

from verl_bpo.advantages.sapo import SAPO
from verl_bpo.integration.losses import policy_loss, sapo_loss
from verl_bpo.integration.value_engine import MODEL_TYPE

RESUMED = ["model", "optimizer", "extra"]
PROMPTS, RESPONSES = [3, 5, 4, 2, 6, 3], [9, 7, 8, 11, 6, 5]


def build(folder, kind=MODEL_TYPE, packed=False, model=None, mixed="fp32", lr=1e-2):
    config = HFModelConfig(
        path=str(folder / "model"), load_tokenizer=False, override_config={"attn_implementation": "sdpa"},
        enable_gradient_checkpointing=False, use_remove_padding=packed, **(model or {}),
    )  # fmt: skip
    config.model_type = kind
    engine = EngineRegistry.new(
        kind,
        "fsdp2",
        config,
        FSDPEngineConfig(
            strategy="fsdp2", model_dtype="fp32", use_torch_compile=False,
            mixed_precision={"param_dtype": mixed, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        FSDPOptimizerConfig(lr=lr, weight_decay=0.01, total_training_steps=10),
        CheckpointConfig(save_contents=[*RESUMED, "hf_model"], load_contents=RESUMED),
    )  # fmt: skip
    engine.initialize()
    return engine


def rows(rank=0, ranks=1, seed=0):
    """A mini-batch of this rank: jagged fields as verl's trainer sends them. Touching actions in row 3, none in row 5."""
    generator = torch.Generator().manual_seed(seed)
    fields = {key: [] for key in ("prompts", "responses", "input_ids", "position_ids", "response_mask", "turn_id")}
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        ids = torch.randint(1, 50, (prompt + response,), generator=generator)
        turn_id = torch.zeros(response, dtype=torch.long)
        if row != 5:
            turn_id[0:2], turn_id[response - 3 :] = 1, 2
        if row == 3:
            turn_id[2:4] = 3
        fields["prompts"].append(ids[:prompt])
        fields["responses"].append(ids[prompt:])
        fields["input_ids"].append(ids)
        fields["position_ids"].append(torch.arange(prompt + response))
        fields["response_mask"].append((turn_id > 0).long())
        fields["turn_id"].append(turn_id)
    for key in ("old_log_probs", "advantages", "returns", "action_targets", "old_state_values", "old_action_values"):
        shift = -3.0 if key == "old_log_probs" else 0.0
        fields[key] = [torch.randn(n, generator=generator) * 0.3 + shift for n in RESPONSES]
    # The first turn of every other row is no target of Q: micro-batches and ranks then hold unequal numbers of them.
    fields["action_weights"] = [(t > row % 2).float() for row, t in enumerate(fields["turn_id"])]
    fields["fit_returns"] = [(t / 3).float() + row / 4 for row, t in enumerate(fields["turn_id"])]
    fields["loss_mask"] = fields["response_mask"]
    own = slice(rank * len(PROMPTS) // ranks, (rank + 1) * len(PROMPTS) // ranks)
    data = TensorDict(
        {k: torch.nested.as_nested_tensor(v[own], layout=torch.jagged) for k, v in fields.items()},
        batch_size=len(PROMPTS) // ranks,
    )
    return data


def settings(data, engine, micro=64, **extra):
    tu.assign_non_tensor(
        data, use_dynamic_bsz=True, max_token_len_per_gpu=micro, temperature=1.0, calculate_entropy=False,
        global_batch_size=len(PROMPTS), use_remove_padding=engine.use_remove_padding, use_fused_kernels=False, **extra,
    )  # fmt: skip
    return data


def actor_config():
    return FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=6, use_dynamic_bsz=False
    )


def whole(engine):
    full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in engine.module.state_dict().items()}
    heads = engine.readout.own_state() if getattr(engine, "readout", None) is not None else {}
    return {k: v.detach().clone() for k, v in full.items()} | {f"head.{k}": v for k, v in heads.items()}


def train(engine, loss, steps=1, first=0, rank=0, ranks=1, **extra):
    metrics = []
    for step in range(first, first + steps):
        with engine.train_mode():
            out = engine.train_batch(settings(rows(rank, ranks, step), engine, **extra), loss)
        metrics.append(out["metrics"])
        engine.lr_scheduler_step()
    return metrics


def infer(engine):
    with engine.eval_mode():
        return engine.infer_batch(settings(rows(), engine, compute_loss=False))["model_output"]


def value_loss(**config):
    return partial(sapo_loss, actor_config(), SAPO().model_copy(update=config))


def plain(metrics):
    return [{k: v if isinstance(v, (float, list)) else v.aggregate() for k, v in m.items()} for m in metrics]


def case_single(folder):
    """Everything that one rank can show; the test reads the result."""
    result = {}
    stock = build(folder, "language_model")
    stock_policy = partial(policy_loss, actor_config())
    train(stock, stock_policy, 2)
    result["stock"] = whole(stock)
    engine = build(folder)
    train(engine, value_loss(v_coef=0.0, q_coef=0.0), 2)
    result["no_value_loss"] = whole(engine)

    engine = build(folder)
    result["start"] = whole(engine)
    silent = build(folder)
    result["silent_metrics"] = plain(train(silent, value_loss(v_coef=0.0, q_coef=0.0), 1))
    result["silent"] = whole(silent)
    result["sync_names"] = [name for name, _ in engine.get_per_tensor_param()[0]]
    result["stock_sync_names"] = [name for name, _ in stock.get_per_tensor_param()[0]]
    result["lrs"] = [(g["lr"], len(g["params"]), g["weight_decay"]) for g in engine.optimizer.param_groups]
    result["warmup_metrics"] = plain(train(engine, value_loss(), 1, value_warmup=True))
    result["after_warmup"] = whole(engine)
    result["backbone_moments"] = len(engine.optimizer.state)
    result["metrics"] = plain(train(engine, value_loss(), 1, first=1))
    engine.save_checkpoint(str(folder / "checkpoint"), global_step=2)
    train(engine, value_loss(), 1, first=2)
    result["continued"] = whole(engine)
    result["values"] = {k: [x for x in infer(engine)[k].unbind()] for k in ("state_values", "action_values")}

    resumed = build(folder)
    resumed.load_checkpoint(str(folder / "checkpoint"), del_local_after_load=False)
    train(resumed, value_loss(), 1, first=2)
    result["resumed"] = whole(resumed)
    packed = build(folder, packed=True)
    packed.load_checkpoint(str(folder / "checkpoint"), del_local_after_load=False)
    train(packed, value_loss(), 1, first=2)
    result["packed"] = whole(packed)
    result["packed_values"] = {k: [x for x in infer(packed)[k].unbind()] for k in ("state_values", "action_values")}

    small = build(folder)
    train(small, value_loss(), 2, micro=16)
    large = build(folder)
    train(large, value_loss(), 2, micro=256)
    result["small_micro"], result["large_micro"] = whole(small), whole(large)

    shouting = build(folder)
    result["shouting_metrics"] = plain(train(shouting, value_loss(v_coef=1e6, q_coef=1e6), 1))
    result["shouting"] = whole(shouting)
    broken = build(folder)
    result["broken_metrics"] = plain(train(broken, value_loss(v_coef=float("nan"), value_clip=None), 1))
    result["broken"] = whole(broken)

    half = build(folder, mixed="bf16")
    result["bf16_metrics"] = plain(train(half, value_loss(), 1))
    result["bf16_dtypes"] = [str(v.dtype) for v in infer(half).values()]
    lora = build(folder, model={"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    before = whole(lora)
    train(lora, value_loss(), 2)
    result["lora_moved"] = [k for k, v in whole(lora).items() if not torch.equal(v, before[k])]
    result["lora_sync_names"] = [name for name, _ in lora.get_per_tensor_param(base_sync_done=True)[0]]
    return result


def case_ranks(folder):
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine = build(folder)
    metrics = train(engine, value_loss(), 2, rank=rank, ranks=ranks)
    engine.save_checkpoint(str(folder / f"checkpoint-{ranks}"), global_step=2)
    gradients = {k: metrics[1][k] for k in ("sapo/gradient_policy", "sapo/gradient_value")}
    # As on a machine of its own, every rank sees its own shards only, and rank 0 what only it wrote.
    mine = folder / f"checkpoint-{ranks}-of-{rank}"
    files = shutil.ignore_patterns("huggingface") if rank else None
    shutil.copytree(folder / f"checkpoint-{ranks}", mine, ignore=files)
    resumed, lost = build(folder), ""
    resumed.load_checkpoint(str(mine), del_local_after_load=False)
    heads = whole(resumed)
    if rank == 0:
        (mine / "huggingface/value_readout.safetensors").unlink()
    try:
        resumed.load_checkpoint(str(mine), del_local_after_load=False)
    except FileNotFoundError as error:
        lost = str(error)
    return {"parameters": whole(engine), "gradients": gradients, "resumed": heads, "lost": lost}


def case_ridge(folder):
    """Heads that are solved. The policy stands still (lr 0), so that an offline fit of the same hidden states is the same."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ["VERL_BPO_SAPO"] = SAPO(head_fit="ridge", head_ridge=0.1).model_dump_json()
    engine = build(folder, lr=0.0)
    before = {k: v for k, v in whole(engine).items() if not k.startswith("head.")}
    metrics = train(engine, value_loss(), 1, rank=rank, ranks=ranks, value_step=1)
    result = {"one_step": whole(engine), "metrics": metrics[0]}
    result["backbone_stood"] = all(torch.equal(whole(engine)[k], v) for k, v in before.items())
    engine.save_checkpoint(str(folder / f"ridge-{ranks}"), global_step=1)
    train(engine, value_loss(), 1, first=1, rank=rank, ranks=ranks, value_step=2)
    result["continued"] = whole(engine)
    resumed = build(folder, lr=0.0)
    resumed.load_checkpoint(str(folder / f"ridge-{ranks}"), del_local_after_load=False)
    train(resumed, value_loss(), 1, first=1, rank=rank, ranks=ranks, value_step=2)
    result["resumed"] = whole(resumed)
    if ranks == 1:
        result["hidden"] = hidden_states(engine)
    moving = build(folder)
    train(moving, value_loss(), 2, rank=rank, ranks=ranks, value_step=1)
    result["moving"] = whole(moving)
    return result


def hidden_states(engine):
    """(state, action, return) of every turn of the first mini-batch, by a plain forward."""
    found = []
    for row, (ids, turn_id, returns) in enumerate(
        zip(*(rows()[k].unbind() for k in ("input_ids", "turn_id", "fit_returns")))
    ):
        with torch.no_grad():
            hidden = engine.module(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]
        for turn in sorted({*turn_id.tolist()} - {0}):
            at = (turn_id == turn).nonzero().flatten() + PROMPTS[row]
            found.append((hidden[at[0] - 1], hidden[at[-1]], returns[at[0] - PROMPTS[row]]))
    return [torch.stack(column) for column in zip(*found)]


if __name__ == "__main__":
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    result = {"single": case_single, "ranks": case_ranks, "ridge": case_ridge}[case](folder)
    if torch.distributed.get_rank() == 0:
        torch.save(result, folder / f"{case}-{os.environ['WORLD_SIZE']}.pt")
        print(json.dumps({"done": case}))
    torch.distributed.destroy_process_group()
