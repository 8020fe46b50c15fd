"""One rank of ``test_packed_engine.py``: verl's engine and ours on the same batch."""

import os
import random
import sys
from pathlib import Path

import engine_worker
import torch
import torch.distributed as dist
import verl.workers.engine.fsdp  # noqa: F401
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry

import verl_bpo.model.packed_engine as packed_engine


def build(folder: Path, vendor: str, checkpointing: bool):
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    model = HFModelConfig(
        path=str(folder / "model"), load_tokenizer=False, use_remove_padding=True,
        enable_gradient_checkpointing=checkpointing, override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    model.model_type = "language_model"
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
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
    """Four trees in mixed order, each with forks of forks, and a padding row without any mask."""
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
    masks = [(torch.arange(len(x)) >= n).long() for x, (_, n) in zip(ids, rows)]
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
    out = engine.forward_backward_batch(batch(budget), loss_function, forward_only=False)
    grads = {n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad) for n, p in
             engine.module.named_parameters()}  # fmt: skip
    rows = {k: [x[:-1] for x in out["model_output"][k].unbind()] for k in ("log_probs", "entropy")}
    return {
        "engine": type(engine).__name__, "loss": sum(out["loss"]), "micro_batches": len(out["loss"]),
        "metrics": out["metrics"], "grads": {n: g.clone() for n, g in grads.items()},
        **{k: torch.cat(v) for k, v in rows.items()},
    }  # fmt: skip


def readout(folder: Path, vendor: str) -> dict:
    """Values after two updates of an actor with SAPO's readout, on rows that share their first tokens."""
    stock = engine_worker.rows

    def sharing(*args):
        data = stock(*args)
        ids = [x.clone() for x in data["input_ids"].unbind()]
        for row in ids[1:]:
            row[:5] = ids[0][:5]
        data["input_ids"] = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
        return data

    engine_worker.rows = sharing
    try:
        os.environ["VERL_ENGINE_VENDOR"] = vendor
        engine = engine_worker.build(folder)
        engine_worker.train(engine, engine_worker.value_loss(), 2, rank=dist.get_rank(), ranks=dist.get_world_size())
        values = {k: torch.cat(list(v.unbind())) for k, v in engine_worker.infer(engine).items() if "values" in k}
        return {"engine": type(engine).__name__, "weights": engine_worker.whole(engine), **values}
    finally:
        engine_worker.rows = stock


def main(folder: Path) -> None:
    found = {}
    for checkpointing in (False, True):
        for vendor in ("stock", packed_engine.VENDOR):
            engine = build(folder, vendor, checkpointing)
            for budget in (100_000, 120):
                found[vendor, checkpointing, budget] = result(engine, budget)
    found["readout"] = {vendor: readout(folder, vendor) for vendor in ("stock", packed_engine.VENDOR)}
    if dist.get_rank() == 0:
        torch.save(found, folder / f"packed-{dist.get_world_size()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
