"""One rank of ``test_packed_engine.py``: verl's engine and ours on the same batch."""

import os
import random
import sys
from functools import partial
from pathlib import Path

import engine_worker
import torch
import torch.distributed as dist
import verl.workers.engine.fsdp  # noqa: F401
from tensordict import TensorDict
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry

import verl_bpo.integration.packed_engine as packed_engine


def build(folder: Path, vendor: str, checkpointing: bool, precision: str = "fp32", **model):
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    model = HFModelConfig(
        path=str(folder / "model"), load_tokenizer=False, use_remove_padding=True,
        enable_gradient_checkpointing=checkpointing, override_config={"attn_implementation": "sdpa"}, **model,
    )  # fmt: skip
    model.model_type = "language_model"
    precision = {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = EngineRegistry.new(
        "language_model", "fsdp2", model_config=model,
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", mixed_precision=precision, use_torch_compile=False, model_dtype="fp32"
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10), checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    return engine


def batch(budget: int) -> TensorDict:
    """Four trees in mixed order, each with forks of forks, and a padding row without any mask. A third of what follows a
    prompt is what the world said."""
    rng = random.Random(dist.get_rank())
    run = lambda n: [rng.randrange(50) for _ in range(n)]  # noqa: E731
    rows = []
    for _ in range(4):
        prompt = run(6)
        tree = [prompt + run(25)]
        for _ in range(4):
            base = rng.choice(tree)
            tree.append(base[: rng.randint(7, 24)] + run(rng.randint(3, 12)))
        rows += [(r, len(prompt)) for r in tree]
    rng.shuffle(rows)
    rows.append(([0] * 8, 4))
    ids = [torch.tensor(r) for r, _ in rows]
    jagged = lambda xs: torch.nested.as_nested_tensor(xs, layout=torch.jagged)  # noqa: E731
    masks = [((torch.arange(len(x)) >= n) & (torch.arange(len(x)) // 3 % 3 > 0)).long() for x, (_, n) in zip(ids, rows)]
    masks[-1] = torch.zeros_like(masks[-1])
    data = TensorDict(
        {
            "input_ids": jagged(ids),
            "prompts": jagged([x[:n] for x, (_, n) in zip(ids, rows)]),
            "position_ids": jagged([torch.arange(len(x)) for x in ids]),
            "loss_mask": jagged(masks),
            "advantages": torch.randn(len(ids), generator=torch.Generator().manual_seed(dist.get_rank())),
        },
        batch_size=[len(ids)],
    )
    tu.assign_non_tensor(
        data, temperature=0.9, use_remove_padding=True, use_dynamic_bsz=True, max_token_len_per_gpu=budget,
        calculate_entropy=True, pad_token_id=0, return_model_output=True,
    )  # fmt: skip
    return data


def loss_function(model_output, data, dp_group=None):
    total = 0.0
    parts = zip(model_output["log_probs"].unbind(), model_output["entropy"].unbind(), data["loss_mask"].unbind())
    for (log_probs, entropy, mask), advantage in zip(parts, data["advantages"]):
        total = total - ((log_probs * advantage + 0.01 * entropy)[:-1] * mask[1:]).sum()
    return total / tu.get_non_tensor_data(data, "batch_num_tokens", 1) * dist.get_world_size(), {}


def result(engine, budget: int) -> dict:
    engine.module.train()
    engine.optimizer_zero_grad()
    data = batch(budget)
    out = engine.forward_backward_batch(data, loss_function, forward_only=False)
    grads = {n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad) for n, p in
             engine.module.named_parameters() if p.requires_grad}  # fmt: skip
    seen = [mask[1:] for mask in data["loss_mask"].unbind()]
    rows = {k: [x[:-1] * m for x, m in zip(out["model_output"][k].unbind(), seen)] for k in ("log_probs", "entropy")}
    return {
        "engine": type(engine).__name__, "loss": sum(out["loss"]), "micro_batches": len(out["loss"]),
        "metrics": out["metrics"], "grads": {n: g.clone() for n, g in grads.items()},
        **{k: torch.cat(v) for k, v in rows.items()},
    }  # fmt: skip


OTHERS = {
    "bf16": {"precision": "bf16"},
    "lora": {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"},
}


def trained_adapters(engine) -> None:
    """Adapters start at random times zero, which hides half of their gradients and differs between engines."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if "lora_" in name:
                value = 0.1 * torch.randn(parameter.shape, generator=draw)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)


def chunked(engine, budget: int) -> dict:
    engine.chunked = "true"
    try:
        return result(engine, budget)
    finally:
        engine.chunked = "auto"


def tree_rows(context: str, rank: int = 0, ranks: int = 1, seed: int = 0) -> TensorDict:
    """Rows of six leaves of one tree of three turns, four tokens an action and three an observation. ``full``: a row per
    leaf that trains its own turns. ``window``: a row per turn, whose prompt is the context's beginning and end."""
    rng = random.Random(seed)
    run = lambda n: [rng.randrange(1, 50) for _ in range(n)]  # noqa: E731
    prompt, leaves, rows = run(5), [], []
    for leaf in range(6):
        own = 0 if not leaf else 1 + leaf % 2  # the first turn that this leaf doesn't share with its trunk
        turns = [*(leaves[leaf // 3][:own] if leaf else []), *((run(4), run(3)) for _ in range(3 - own))]
        leaves.append(turns)
        if context == "full":
            response, turn_id = [], []
            for i, (action, observation) in enumerate(turns):
                response += action + (observation if i < 2 else [])
                turn_id += [max(i - own + 1, 0)] * 4 + [0] * (3 if i < 2 else 0)
            rows.append((prompt, response, turn_id))
            continue
        for i in range(own, 3):
            past = [t for action, observation in turns[:i] for t in action + observation]
            rows.append((prompt + past[-7:], turns[i][0], [1] * 4))
    rows = rows[: len(rows) // 2 * 2]
    rows = rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]
    draw = torch.Generator().manual_seed(100 * seed + rank)
    fields = {
        "prompts": [torch.tensor(p) for p, _, _ in rows],
        "responses": [torch.tensor(r) for _, r, _ in rows],
        "input_ids": [torch.tensor(p + r) for p, r, _ in rows],
        "position_ids": [torch.arange(len(p + r)) for p, r, _ in rows],
        "turn_id": [torch.tensor(t) for _, _, t in rows],
        "response_mask": [(torch.tensor(t) > 0).long() for _, _, t in rows],
    }
    fields["loss_mask"] = fields["response_mask"]
    for key in ("old_log_probs", "advantages", "returns", "action_targets", "old_state_values", "old_action_values"):
        fields[key] = [torch.randn(len(r), generator=draw) - 3 * (key == "old_log_probs") for _, r, _ in rows]
    fields["action_weights"] = [(torch.tensor(t) > row % 2).float() for row, (_, _, t) in enumerate(rows)]
    jagged = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in fields.items()}
    return TensorDict(jagged, batch_size=len(rows))


def readout(folder: Path, vendor: str, context: str, budget: int = 64) -> dict:
    """Values after two updates of an actor with SAPO's readout on the rows of a tree."""
    stock, engine_worker.rows = engine_worker.rows, partial(tree_rows, context)
    try:
        os.environ["VERL_ENGINE_VENDOR"] = vendor
        engine = engine_worker.build(folder)
        metrics = engine_worker.train(
            engine, engine_worker.value_loss(), 2, rank=dist.get_rank(), ranks=dist.get_world_size(), micro=budget
        )
        values = {k: torch.cat(list(v.unbind())) for k, v in engine_worker.infer(engine).items() if "values" in k}
        losses = engine_worker.plain(metrics)[-1]
        return {"engine": type(engine).__name__, "weights": engine_worker.whole(engine), "losses": losses, **values}
    finally:
        engine_worker.rows = stock


def main(folder: Path) -> None:
    found = {}
    for checkpointing in (False, True):
        for vendor in ("stock", packed_engine.VENDOR):
            engine = build(folder, vendor, checkpointing)
            for budget in (100_000, 120):
                found[vendor, checkpointing, budget] = result(engine, budget)
        found["chunked", checkpointing] = chunked(engine, 24)
    for kind, settings in OTHERS.items():
        for vendor in ("stock", packed_engine.VENDOR):
            engine = build(folder, vendor, True, **settings)
            if kind == "lora":
                trained_adapters(engine)
            found[kind, vendor] = result(engine, 100_000)
        found[kind, "chunked"] = chunked(engine, 24)
    for context in ("full", "window"):
        for vendor in ("stock", packed_engine.VENDOR):
            found["readout", context, vendor] = readout(folder, vendor, context)
        os.environ[packed_engine.CHUNKED] = "true"
        found["readout", context, "chunked"] = readout(folder, packed_engine.VENDOR, context, budget=16)
        os.environ[packed_engine.CHUNKED] = "auto"
    if dist.get_rank() == 0:
        torch.save(found, folder / f"packed-{dist.get_world_size()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
