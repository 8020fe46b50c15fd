"""Exactness of packed trees in half precision, and the cost of the readout, of log-probs and of generation.

    python benchmarks/gpu/parts.py [exactness readout likelihood generator] [--model qwen2.5-1.5b]

torch and transformers are enough. One json a part, ``benchmarks/results/gpu_PART_MODEL.json``:

- exactness: log-probs of one tree's rows against those of rows in float32, as root mean square: rows in half precision, and
  packed trees in half precision and in float32 by every attention backend that runs here;
- readout: forward and backward with SAPO's value readout, over the same without;
- likelihood: log-probs and their gradient in blocks of tokens, over a plain log-softmax of all logits in float32;
- generator: the transformers engine's tokens a second. It runs on this machine's CPU and is the small model's.

Times are medians of interleaved runs, memory is the peak over what was held before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]  # needs no installation

from packed_tree import GPU_BACKENDS, MODELS, ROWS, log_probs, make_model, make_rows  # noqa: E402

from verl_bpo.advantages.sapo import turn_boundaries  # noqa: E402
from verl_bpo.generation.generator import ContinuousBatcher  # noqa: E402
from verl_bpo.generation.sampling import SamplingParams  # noqa: E402
from verl_bpo.model.packed_tree import PackedTreeUnsupported, choose_backend  # noqa: E402
from verl_bpo.model.packed_tree.likelihood import edge_outputs  # noqa: E402
from verl_bpo.model.value_readout import attach_value_readout, boundary_positions  # noqa: E402

SMALLEST = {"tiny": "tiny", "small": "small", "qwen2.5-1.5b": "tree4k", "qwen2.5-7b": "tree4k"}
"""The tree whose rows are compared and read, by model."""


def cost(run: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds, and peak MiB on a GPU (0 on a CPU)."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    run()
    if not gpu:
        return time.perf_counter() - start, 0.0
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 2**20


def compare(base: Callable[[], Any], other: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, Any]:
    """Both in turn, after a warm-up."""
    base(), other()
    pairs = [(cost(base, device), cost(other, device)) for _ in range(repeats)]
    return {
        "seconds": [statistics.median(pair[i][0] for pair in pairs) for i in (0, 1)],
        "time_ratio": statistics.median(b[0] / a[0] for a, b in pairs),
        "peak_mib": [max(pair[i][1] for pair in pairs) for i in (0, 1)],
    }


def backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    found = ["sdpa"]
    for name in GPU_BACKENDS:
        try:
            choose_backend(device, dtype, name)
        except PackedTreeUnsupported as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            found.append(name)
    return found


@torch.no_grad()
def exactness(name: str, device: torch.device, repeats: int) -> dict[str, Any]:
    rows = make_rows(SMALLEST[name], MODELS[name][0]["vocab_size"])
    learned = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    # Weights that bfloat16 holds exactly: what differs is the arithmetic alone.
    model = make_model(name, str(device), torch.bfloat16, checkpointing=False).eval()

    def values(mode: str) -> torch.Tensor:
        model.set_attn_implementation(ROWS.get(mode, "sdpa"))
        found = log_probs(mode, model, rows, learned, 1024).float()
        return found[learned.roll(-1).to(found.device)]

    # Once more in float32, half precision first: the float32 copy replaces it.
    half = {mode: values(mode) for mode in ["rows", *(f"packed:{b}" for b in backends(device, torch.bfloat16))]}
    model.float()
    exact = values("rows")
    full = {mode: values(mode) for mode in (f"packed:{b}" for b in backends(device, torch.float32))}
    error = lambda found: float((found - exact).square().mean().sqrt())  # noqa: E731
    return {"bfloat16": {m: error(x) for m, x in half.items()}, "float32": {m: error(x) for m, x in full.items()}}


def readout(name: str, device: torch.device, repeats: int) -> dict[str, Any]:
    gpu = device.type == "cuda"
    model = make_model(name, str(device), torch.bfloat16 if gpu else torch.float32, checkpointing=gpu)
    ids = torch.tensor([make_rows(SMALLEST[name], MODELS[name][0]["vocab_size"])[0]], device=device)
    head = attach_value_readout(model)
    turn = 8 if name == "tiny" else 64
    turns = turn_boundaries(torch.arange(ids.shape[1], device=device)[None] % turn >= turn - turn // 8)
    at = boundary_positions(turns, torch.zeros(1, dtype=torch.long, device=device), tokens=ids.numel())
    loss = lambda logits: torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])  # noqa: E731

    def plain() -> None:
        loss(model(input_ids=ids, use_cache=False).logits).backward()

    def read() -> None:
        with head.reading(at) as values:
            logits = model(input_ids=ids, use_cache=False).logits
        (loss(logits) + values.state.square().mean() + values.action.square().mean()).backward()

    return {"tokens": ids.numel(), "turns": len(at.state), **compare(plain, read, device, repeats)}


def likelihood(name: str, device: torch.device, repeats: int) -> dict[str, Any]:
    size = MODELS[name][0]["vocab_size"]
    count = 4096 if device.type == "cuda" else 64
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(count, size, generator=generator)).to(device, dtype).requires_grad_()
    tokens = torch.randint(size, (count,), generator=generator).to(device)
    sources = torch.arange(count, device=device)
    found = {}

    def plain() -> None:
        logits.grad = None
        values = logits.float().log_softmax(-1)[sources, tokens]
        values.sum().backward()
        found["plain"] = values.detach()

    def blocks() -> None:
        logits.grad = None
        values, _ = edge_outputs(logits, sources, tokens)
        values.sum().backward()
        found["blocks"] = values.detach()

    costs = compare(plain, blocks, device, repeats)
    return {"tokens": count, "difference": float((found["plain"] - found["blocks"]).abs().max()), **costs}


def generator(name: str, device: torch.device, repeats: int) -> dict[str, Any]:
    shape = "tiny" if name == "tiny" else "small"
    model = make_model(shape, "cpu", torch.float32, checkpointing=False)
    prompts = make_rows(shape, MODELS[shape][0]["vocab_size"])
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    seconds = []
    for _ in range(repeats):
        batcher = ContinuousBatcher(model)
        start = time.perf_counter()
        batcher.generate(prompts, params)
        seconds.append(time.perf_counter() - start)
    return {"model": shape, "requests": len(prompts), "tokens_per_s": 8 * len(prompts) / statistics.median(seconds)}


PARTS = {part.__name__: part for part in (exactness, readout, likelihood, generator)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-1.5b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks/results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    machine = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    for part in arguments.parts or PARTS:
        result = {**machine, "model": arguments.model, **PARTS[part](arguments.model, device, arguments.repeats)}
        print(part, json.dumps(result), flush=True)
        (arguments.out / f"gpu_{part}_{arguments.model}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
