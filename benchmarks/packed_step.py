"""A whole training step of the quickstart with and without packed trees: the same seeds, the same losses.

Trains the quickstart's policy with BPO for a few steps, without and with packed trees in turn, and prints the median
seconds of the phases over all steps but each run's first, and the largest relative difference of any step's loss,
entropy, gradient norm or environment steps. These seconds are wall time. The training phases are then repeated on the
last step's trees with verl's engine alone, in this process's CPU time on one thread, which other load disturbs less.
Needs the quickstart's games and warm start (recipes/quickstart/run.sh makes them).

    python benchmarks/packed_step.py --root runs/quickstart --steps 6 --repeats 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from step_profile import REPOSITORY, train

PHASES = ("old_log_prob", "update_actor", "gen", "step")
SAME = ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "compute/env_steps")
OPTIONS = ["algorithm.adv_estimator=bpo", "bpo.preset=guided"]


def difference(rows: list[dict], packed: list[dict]) -> float:
    """Largest relative difference of a step's numbers."""
    pairs = [(one[key], other[key]) for one, other in zip(rows, packed, strict=True) for key in SAME]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)


def batch(trees: list[Any]) -> Any:
    """The rows of some trees as verl's trainer sends them to the engine, with made-up advantages."""
    import torch
    from tensordict import TensorDict

    from verl_bpo.tree.rows import tree_rows

    rows = [row for tree in trees for row in tree_rows(tree)]
    fields: dict[str, list] = {
        "prompts": [torch.tensor(r.prompt_ids) for r in rows],
        "responses": [torch.tensor(r.response_ids) for r in rows],
        "input_ids": [torch.tensor(r.prompt_ids + r.response_ids) for r in rows],
        "position_ids": [torch.arange(len(r.prompt_ids) + len(r.response_ids)) for r in rows],
        "response_mask": [torch.tensor(r.response_mask) for r in rows],
        "old_log_probs": [torch.tensor(r.logprobs, dtype=torch.float32) for r in rows],
        "advantages": [torch.full((len(r.logprobs),), (-1.0) ** i) for i, r in enumerate(rows)],
    }
    fields["loss_mask"] = fields["response_mask"]
    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    return TensorDict({key: jagged(values) for key, values in fields.items()}, batch_size=len(rows))


def engine_seconds(model: str, trees: list[dict], repeats: int) -> dict[str, dict[str, float]]:
    """CPU seconds of the two training phases, by engine. Run in a process of its own."""
    os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    import torch
    import verl  # noqa: F401  (loads the plugin)
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from verl_bpo.integration.losses import policy_loss
    from verl_bpo.tree.topology import Tree

    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as meeting:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting.name}", rank=0, world_size=1)
        engines = {}
        for name, vendor in (("rows", "stock"), ("packed", "packed_tree")):
            os.environ["VERL_ENGINE_VENDOR"] = vendor
            config = HFModelConfig(
                path=model,
                use_remove_padding=False,  # as on a CPU
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            )
            config.model_type = "language_model"
            precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
            engines[name] = EngineRegistry.new(
                "language_model",
                "fsdp2",
                config,
                FSDPEngineConfig(
                    strategy="fsdp2", model_dtype="fp32", use_torch_compile=False, mixed_precision=precision
                ),
                FSDPOptimizerConfig(lr=1e-9, total_training_steps=1000),
                CheckpointConfig(),
            )
            engines[name].initialize()
        actor = FSDPActorConfig(
            strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=1, use_dynamic_bsz=False
        )
        seconds: dict[str, dict[str, list[float]]] = {n: {"old_log_prob": [], "update_actor": []} for n in engines}
        for _ in range(repeats + 1):
            for name, engine in engines.items():
                data = batch([Tree.from_dict(t) for t in trees])
                settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 8192, "temperature": 1.0}
                settings |= {"use_remove_padding": False, "use_fused_kernels": False, "global_batch_size": len(data)}
                tu.assign_non_tensor(data, calculate_entropy=True, **settings)
                start = time.process_time()
                with engine.eval_mode():
                    engine.infer_batch(data, None)
                middle = time.process_time()
                tu.assign_non_tensor(data, calculate_entropy=False)
                with engine.train_mode():
                    engine.train_batch(data, partial(policy_loss, actor))
                seconds[name]["old_log_prob"].append(middle - start)
                seconds[name]["update_actor"].append(time.process_time() - middle)
        torch.distributed.destroy_process_group()
    return {n: {k: round(statistics.median(v[1:]), 3) for k, v in found.items()} for n, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--model", type=Path, default=None, help="default: ROOT/warmstart-0")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks/results/packed_step.json")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    model = (arguments.model or root / "warmstart-0").resolve()
    if not (model / "config.json").is_file():
        raise SystemExit(f"no policy in {model}: make the quickstart's with recipes/quickstart/run.sh, or name another")
    modes = {mode: [*OPTIONS, f"bpo.packed_tree.enable={mode == 'packed'}"] for mode in ("rows", "packed")}
    runs: dict[str, list[list[dict]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as dump:
        for repeat in range(arguments.repeats):
            for mode, overrides in modes.items():
                print(f"run {repeat + 1} of {arguments.repeats}, {mode} ...", file=sys.stderr)
                where = [f"bpo.dump_dir={dump}"] if mode == "packed" and not repeat else []
                steps, _ = train(f"packed-step-{mode}", overrides + where, root, model, arguments.steps)
                runs[mode].append(steps)
        (last,) = Path(dump, "trees").glob(f"{arguments.steps:06d}-*.jsonl")
        trees = [json.loads(line)["tree"] for line in last.read_text().splitlines()]
    print("engines alone ...", file=sys.stderr)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        engine = pool.apply(engine_seconds, (str(model), trees, 5))
    warm = {mode: [step for run in found for step in run[1:]] for mode, found in runs.items()}
    seconds = {
        mode: {phase: round(statistics.median(s[f"timing_s/{phase}"] for s in steps), 3) for phase in PHASES}
        for mode, steps in warm.items()
    }
    ratio = {phase: round(seconds["packed"][phase] / seconds["rows"][phase], 3) for phase in PHASES}
    tokens = {key: sum(s[f"packed/{key}_tokens"] for s in warm["packed"]) for key in ("unique", "total")}
    worst = max(difference(rows, packed) for rows in runs["rows"] for packed in runs["packed"])
    results = {
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "seconds": seconds,
        "ratio": ratio,
        "engine_cpu_seconds": engine,
        "engine_ratio": {k: round(engine["packed"][k] / seconds, 3) for k, seconds in engine["rows"].items()},
        "compute_ratio": round(tokens["unique"] / tokens["total"], 3),
        "build_seconds": round(statistics.median(s["packed/build_seconds"] for s in warm["packed"]), 4),
        "largest_difference": worst,
        "pg_loss": {mode: [step["actor/pg_loss"] for step in found[0]] for mode, found in runs.items()},
    }
    print(f"{'phase':14}{'rows s':>9}{'packed s':>10}{'ratio':>8}")
    for phase in PHASES:
        print(f"{phase:14}{seconds['rows'][phase]:9.3f}{seconds['packed'][phase]:10.3f}{ratio[phase]:8.3f}")
    for phase, found in results["engine_ratio"].items():
        one, other = engine["rows"][phase], engine["packed"][phase]
        print(f"{phase + ' CPU':18}{one:5.3f}{other:10.3f}{found:8.3f}")
    print(f"compute ratio {results['compute_ratio']}, trie {1e3 * results['build_seconds']:.1f} ms a step,")
    print(f"largest relative difference of a step's numbers {worst:.1e}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
