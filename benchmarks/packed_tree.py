"""Cost of training on packed trees against training on rows, on this machine.

    python benchmarks/packed_tree.py [--shapes small medium large wide comb] [--repeats 3] [--device cpu]

Forward and backward of every row's log-probs: ``padded`` rows; ``rows``, one sequence of all rows, each attending to
itself alone (what remove-padding does); ``packed`` trees; ``frugal`` packed trees. Repeats are interleaved, ratios are
medians of paired runs against ``rows``. On a CPU, seconds are the process's CPU time on one thread. Peak memory is taken
in a fresh process for each mode, above what the model and its gradients hold. Writes ``benchmarks/results/packed_tree.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl_bpo.model.packed_tree import frugal_outputs, pack_rows, packed_forward, row_outputs, tree_outputs

SHAPES = {  # prompt tokens, turns, tokens a turn, branch points, forks at each
    "small": (100, 8, 80, 2, 2),
    "medium": (150, 10, 130, 3, 3),
    "large": (200, 12, 160, 3, 3),
    "wide": (1000, 4, 100, 1, 15),
    "comb": (100, 24, 100, 12, 1),
}
MODES = ("padded", "rows", "packed", "frugal")
MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 2048}
RESULTS = Path(__file__).parent / "results" / "packed_tree.json"

Rows = list[list[int]]


def make_rows(shape: str) -> Rows:
    """One backbone, forks of equal depth at branch points spread evenly over it."""
    prompt, turns, tokens, points, forks = SHAPES[shape]
    rng = random.Random(1)
    run = lambda n: [rng.randrange(MODEL["vocab_size"]) for _ in range(n)]  # noqa: E731
    backbone = run(prompt + turns * tokens)
    rows = [backbone]
    for i in range(points):
        cut = prompt + tokens * (turns * (i + 1) // (points + 1))
        rows += [backbone[:cut] + run(len(backbone) - cut) for _ in range(forks)]
    return rows


def make_model(device: str) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        **MODEL, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=65536, attn_implementation="sdpa"
    )
    return Qwen2ForCausalLM(config).to(device).train()


def block_diagonal(module, query, key, value, attention_mask, scaling=None, row_lengths=None, **kwargs):
    parts = zip(*(x.split(row_lengths, 2) for x in (query, key, value)))
    out = [F.scaled_dot_product_attention(*p, is_causal=True, scale=scaling, enable_gqa=True) for p in parts]
    return torch.cat(out, 2).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("block_diagonal", block_diagonal)


def next_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs of ``tokens`` (..., n) rolled by one, like verl's."""
    chosen = logits.gather(-1, tokens.roll(-1, -1)[..., None])[..., 0]
    return chosen - torch.logsumexp(logits, -1)


def log_probs(mode: str, model: Qwen2ForCausalLM, rows: Rows) -> torch.Tensor:
    device = model.device
    if mode == "padded":
        lengths = torch.tensor([len(r) for r in rows], device=device)
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True).to(device)
        mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return next_log_probs(logits, ids)[mask]
    if mode == "rows":
        ids = torch.tensor([t for r in rows for t in r], device=device)
        position_ids = torch.cat([torch.arange(len(r)) for r in rows]).to(device)
        model.set_attn_implementation("block_diagonal")
        try:
            lengths = [len(r) for r in rows]
            logits = model(ids[None], position_ids=position_ids[None], use_cache=False, row_lengths=lengths).logits[0]
        finally:
            model.set_attn_implementation("sdpa")
        return next_log_probs(logits, ids)
    tree = pack_rows(rows).to(device)
    if mode == "frugal":
        return frugal_outputs(model, tree).log_probs
    return row_outputs(*tree_outputs(packed_forward(model, tree).logits[0], tree), tree).log_probs


def step(mode: str, model: Qwen2ForCausalLM, rows: Rows) -> None:
    values = log_probs(mode, model, rows)
    weights = torch.linspace(-1, 1, len(values), device=values.device).clone()
    weights[torch.tensor([len(r) for r in rows]).cumsum(0).to(values.device) - 1] = 0
    (values * weights).mean().backward()
    if values.is_cuda:
        torch.cuda.synchronize()


def timed(function: Callable[[], object], device: str = "cpu") -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    function()
    return clock() - start


def peak_mib(mode: str, shape: str, device: str) -> float:
    """Run in a process of its own."""
    torch.set_num_threads(1)
    model, rows = make_model(device), make_rows(shape)
    step(mode, model, [r[:16] for r in rows])  # kernels, gradients
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(mode, model, rows)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    step(mode, model, rows)
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1])


def measure(shape: str, repeats: int, device: str) -> dict:
    model, rows = make_model(device), make_rows(shape)
    gradients = {}
    for mode in MODES:  # warm-up, and a check that all compute the same thing
        model.zero_grad()
        step(mode, model, rows)
        gradients[mode] = torch.cat([p.grad.flatten() for p in model.parameters()])
    norm = gradients["rows"].norm()
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(repeats):
        for mode in MODES:
            seconds[mode].append(timed(lambda m=mode: step(m, model, rows), device))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {mode: pool.apply(peak_mib, (mode, shape, device)) for mode in MODES}
    tree = pack_rows(rows)
    return {
        "rows": len(rows),
        "nodes": len(tree.node_lengths),
        "total_tokens": tree.total_tokens,
        "unique_tokens": tree.unique_tokens,
        "ideal_ratio": round(tree.compute_ratio, 3),
        "pack_ms": round(1e3 * min(timed(lambda: pack_rows(rows)) for _ in range(5)), 2),
        "gradient_difference": {m: float((g - gradients["rows"]).norm() / norm) for m, g in gradients.items()},
        "seconds": {m: round(statistics.median(s), 3) for m, s in seconds.items()},
        "time_ratio": {
            m: round(statistics.median(a / b for a, b in zip(s, seconds["rows"])), 3) for m, s in seconds.items()
        },
        "peak_mib": {m: round(x, 1) for m, x in memory.items()},
        "memory_ratio": {m: round(x / memory["rows"], 3) for m, x in memory.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.parent.mkdir(exist_ok=True)
    results: dict = {"torch": torch.__version__, "device": arguments.device, "threads": 1, "model": MODEL, "shapes": {}}
    print(f"{'shape':8}{'unique':>8}{'total':>8}{'ideal':>7}  mode    seconds   time  peak MiB  memory")
    for shape in arguments.shapes:
        found = results["shapes"][shape] = measure(shape, arguments.repeats, arguments.device)
        for mode in MODES:
            print(
                f"{shape:8}{found['unique_tokens']:8}{found['total_tokens']:8}{found['ideal_ratio']:7.3f}  {mode:8}"
                f"{found['seconds'][mode]:7.3f}{found['time_ratio'][mode]:7.3f}"
                f"{found['peak_mib'][mode]:10.1f}{found['memory_ratio'][mode]:8.3f}",
                flush=True,
            )
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
