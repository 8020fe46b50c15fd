"""Cost of training on packed trees against training on rows, on this machine.

    python benchmarks/packed_tree.py                                    # a small model on a CPU
    python benchmarks/packed_tree.py --model qwen2.5-1.5b               # on a GPU; torch and transformers are enough

Forward and backward of every row's log-probs, by mode:

    padded        rows of one length with a mask
    rows          one sequence of all rows, each attending to itself alone: what remove-padding computes, by one call of SDPA
                  a row (rows:torch_varlen, on a GPU: by one call for all)
    packed        the tree, each token once (packed:BACKEND where there is a choice)
    chunked       the same in chunks of --chunk tokens, with one more forward

With --learned SHARE only the first so many of each turn's tokens have a loss, as in an agent's trajectory, where the rest is
what the world says. ``packed`` and ``chunked`` then compute logits for these alone; ``packed/all`` and ``chunked/all``, like
``rows``, for all tokens.

Repeats are interleaved over the modes, time ratios are medians of paired runs against ``rows``. The ideal ratio is unique over
total tokens. On a CPU, seconds are the process's CPU time on one thread, and memory is what torch allocated, by its
profiler. Peak memory is above what the model and its gradients hold. Models have random weights. A mode that runs out of
memory is reported as such, and ratios are then against the best mode on rows that did not. Writes
``benchmarks/results/packed_tree.json`` (``packed_tree_MODEL.json``, ``packed_tree_learned.json``) after each tree.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # so that a machine without verl needs no installation

from verl_bpo.model.packed_tree import (  # noqa: E402
    PackedTreeUnsupported,
    choose_backend,
    chunked_outputs,
    pack_rows,
    packed_forward,
    row_outputs,
    tree_outputs,
    wanted_logits,
)

SHAPES = {  # prompt tokens, turns, tokens a turn, branch points, forks at each
    "tiny": (10, 4, 5, 1, 2),
    "small": (100, 8, 80, 2, 2),
    "medium": (150, 10, 130, 3, 3),
    "large": (200, 12, 160, 3, 3),
    "wide": (1500, 4, 200, 1, 15),
    "comb": (100, 24, 100, 12, 1),
    "tree4k": (250, 14, 50, 3, 3),
    "tree16k": (1000, 14, 200, 3, 3),
    "tree32k": (2000, 28, 200, 3, 3),
    "tree64k": (4000, 56, 200, 3, 3),
    "wide16k": (8000, 4, 150, 1, 23),
}
SMALL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 2048}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
QWEN = {"vocab_size": 151936, "rope_theta": 1e6}
MODELS = {  # shapes of Qwen2.5 from their published config.json
    "tiny": ({**SMALL, **HEADS, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}, ["tiny"]),
    "small": ({**SMALL, **HEADS}, ["small", "medium", "large", "wide", "comb"]),
    "qwen2.5-1.5b": (
        {
            **QWEN,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        ["tree4k", "tree16k", "wide16k", "tree32k", "tree64k"],
    ),
    "qwen2.5-7b": (
        {
            **QWEN,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        ["tree4k", "tree16k", "wide16k", "tree32k", "tree64k"],
    ),
}
GPU_BACKENDS = ("flash_attn", "torch_varlen", "flex")

Rows = list[list[int]]
ALL = "/all"
"""End of a mode's name: logits of all tokens."""


def make_rows(shape: str, vocabulary: int) -> Rows:
    """One backbone, forks of equal depth at branch points spread evenly over it."""
    prompt, turns, tokens, points, forks = SHAPES[shape]
    rng = random.Random(1)
    run = lambda n: [rng.randrange(vocabulary) for _ in range(n)]  # noqa: E731
    backbone = run(prompt + turns * tokens)
    rows = [backbone]
    for i in range(points):
        cut = prompt + tokens * (turns * (i + 1) // (points + 1))
        rows += [backbone[:cut] + run(len(backbone) - cut) for _ in range(forks)]
    return rows


def learned_tokens(shape: str, rows: Rows, share: float) -> torch.Tensor:
    """(total tokens,) bool: no prompt, and the first part of each turn."""
    prompt, _, tokens, *_ = SHAPES[shape]
    if share == 1:
        return torch.cat([torch.arange(len(row)) > 0 for row in rows])
    at = torch.cat([torch.arange(len(row)) for row in rows]) - prompt
    return (at >= 0) & (at % tokens < share * tokens)


def make_model(name: str, device: str, dtype: torch.dtype, checkpointing: bool) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(**MODELS[name][0], max_position_embeddings=131072, attn_implementation="sdpa")
    with torch.device(device):  # made where it will live, in its own precision: no float32 copy of a large model
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = Qwen2ForCausalLM(config).train()
        finally:
            torch.set_default_dtype(default)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def block_diagonal(module, query, key, value, attention_mask, scaling=None, row_lengths=None, **kwargs):
    parts = zip(*(x.split(row_lengths, 2) for x in (query, key, value)))
    out = [F.scaled_dot_product_attention(*p, is_causal=True, scale=scaling, enable_gqa=True) for p in parts]
    return torch.cat(out, 2).transpose(1, 2), None


def varlen_rows(module, query, key, value, attention_mask, scaling=None, row_lengths=None, **kwargs):
    from torch.nn.attention.varlen import varlen_attn

    bounds = F.pad(torch.tensor(row_lengths, device=query.device).cumsum(0), (1, 0)).int()
    flat = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = max(row_lengths)
    options = {"scale": scaling, "window_size": (-1, 0), "enable_gqa": True}
    return varlen_attn(*flat, bounds, bounds, longest, longest, **options)[None], None


ROWS = {"rows": "block_diagonal", "rows:torch_varlen": "varlen_rows"}
ALL_ATTENTION_FUNCTIONS.register("block_diagonal", block_diagonal)
ALL_ATTENTION_FUNCTIONS.register("varlen_rows", varlen_rows)


def modes_for(device: str, dtype: torch.dtype, backends: list[str] | None, all_too: bool) -> list[str]:
    ours = [mode + end for mode in ("packed", "chunked") for end in ("", ALL)[: 1 + all_too]]
    kind = torch.device(device)
    if kind.type != "cuda" and not backends:
        return ["padded", "rows", *ours]
    usable = []
    for name in backends or GPU_BACKENDS:
        try:
            choose_backend(kind, dtype, name)
            usable.append(name)
        except PackedTreeUnsupported as error:
            print(f"left out: {error}", file=sys.stderr)
    rows = ["padded", "rows"] + (["rows:torch_varlen"] if "torch_varlen" in usable else [])
    return rows + [f"{mode}:{backend}" for backend in usable for mode in ours]


def next_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs of ``tokens`` (..., n) rolled by one, like verl's."""
    chosen = logits.gather(-1, tokens.roll(-1, -1)[..., None])[..., 0]
    return chosen - torch.logsumexp(logits, -1)


def log_probs(mode: str, model: Qwen2ForCausalLM, rows: Rows, learned: torch.Tensor, chunk: int) -> torch.Tensor:
    device = model.device
    if mode == "padded":
        lengths = torch.tensor([len(r) for r in rows], device=device)
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True).to(device)
        mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return next_log_probs(logits, ids)[mask]
    if mode in ROWS:
        ids = torch.tensor([t for r in rows for t in r], device=device)
        lengths = [len(r) for r in rows]
        inputs = {
            "input_ids": ids[None],
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(device),
            "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device),  # 4D: none is built
        }
        return next_log_probs(model(**inputs, use_cache=False, row_lengths=lengths).logits[0], ids)
    mode, _, backend = mode.partition(":")
    tree = pack_rows(rows).to(device)
    everything = int(learned.sum()) == len(learned) - len(rows)  # nothing predicts a row's first token
    wanted = None if mode.endswith(ALL) or everything else wanted_logits(tree, learned.to(device))
    if mode.removesuffix(ALL) == "chunked":
        chunks = -(-tree.unique_tokens // chunk)
        return chunked_outputs(model, tree, chunks=chunks, backend=backend or "auto", wanted=wanted).log_probs
    logits = packed_forward(model, tree, backend or "auto", wanted).logits[0]
    return row_outputs(*tree_outputs(logits, tree, wanted=wanted), tree).log_probs


def step(mode: str, model: Qwen2ForCausalLM, rows: Rows, learned: torch.Tensor, chunk: int) -> None:
    """Adds to the gradients: a loss with another weight at every learned token of every row."""
    # A checkpointed layer asks for its attention function again in the backward.
    model.set_attn_implementation(ROWS.get(mode, "sdpa"))
    values = log_probs(mode, model, rows, learned, chunk)
    weights = torch.linspace(-1, 1, len(values), device=values.device) * learned.roll(-1).to(values.device)
    (values * weights).mean().backward()
    if values.is_cuda:
        torch.cuda.synchronize()


def seconds(mode: str, model: Qwen2ForCausalLM, rows: Rows, learned: torch.Tensor, chunk: int) -> float:
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    start = clock()
    step(mode, model, rows, learned, chunk)
    return clock() - start


def peak_mib(mode: str, model: Qwen2ForCausalLM, rows: Rows, learned: torch.Tensor, chunk: int) -> float:
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(mode, model, rows, learned, chunk)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        step(mode, model, rows, learned, chunk)
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**20


class Trial:
    """Every mode on one tree, in turn."""

    def __init__(
        self, model: Qwen2ForCausalLM, rows: Rows, learned: torch.Tensor, modes: list[str], chunk: int
    ) -> None:
        self.model, self.rows, self.learned, self.chunk = model, rows, learned, chunk
        self.modes = list(modes)
        self.failed: dict[str, str] = {}

    def run(self, what: str, function) -> dict:
        """``function``'s result by mode; modes that run out of memory drop out."""
        found = {}
        for mode in list(self.modes):
            print(f"\r  {what}: {mode:24}", end="", file=sys.stderr, flush=True)
            try:
                found[mode] = function(mode, self.model, self.rows, self.learned, self.chunk)
            except torch.OutOfMemoryError:
                self.failed[mode] = "out of memory"
                self.modes.remove(mode)
                gc.collect()
                torch.cuda.empty_cache()
        print(f"\r{'':60}\r", end="", file=sys.stderr, flush=True)
        return found

    def gradient(self, mode: str, *arguments) -> list[torch.Tensor]:
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        step(mode, *arguments)
        return [p.grad.cpu() if p.is_cuda else p.grad.clone() for p in self.model.parameters()]


def measure(
    model: Qwen2ForCausalLM, rows: Rows, learned: torch.Tensor, modes: list[str], repeats: int, chunk: int
) -> dict:
    trial = Trial(model, rows, learned, modes, chunk)
    reference: list[torch.Tensor] = []

    def difference(mode: str, *arguments) -> float:
        grads = trial.gradient(mode, *arguments)
        reference[:] = reference or grads
        square = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(grads, reference))
        return (square / sum(float(b.float().square().sum()) for b in reference)) ** 0.5

    differences = trial.run("gradients", difference)  # a warm-up too
    times = [trial.run(f"time {i + 1}/{repeats}", seconds) for i in range(repeats)]
    memory = trial.run("memory", peak_mib)
    base = next((m for m in (*[m for m in trial.modes if m.startswith("rows")], "padded") if m in trial.modes), None)
    tree = pack_rows(rows)
    start = time.perf_counter()
    pack_rows(rows)
    pack_ms = 1e3 * (time.perf_counter() - start)
    rounded = lambda values, digits: {m: round(x, digits) for m, x in values.items() if m in trial.modes}  # noqa: E731
    return {
        "rows": len(rows),
        "nodes": len(tree.node_lengths),
        "total_tokens": tree.total_tokens,
        "unique_tokens": tree.unique_tokens,
        "logits": len(wanted_logits(tree, learned)),
        "ideal_ratio": round(tree.compute_ratio, 3),
        "pack_ms": round(pack_ms, 2),
        "failed": trial.failed,
        "ratios_against": base,
        "gradient_difference": differences,
        "seconds": rounded({m: statistics.median(t[m] for t in times if m in t) for m in trial.modes}, 3),
        "time_ratio": rounded({m: statistics.median(t[m] / t[base] for t in times) for m in trial.modes}, 3)
        if base
        else {},
        "peak_mib": rounded(memory, 1),
        "memory_ratio": rounded({m: x / memory[base] for m, x in memory.items()}, 3) if base else {},
    }


def table(shape: str, found: dict, modes: list[str]) -> None:
    for mode in modes:
        line = f"{shape:9}{found['unique_tokens']:8}{found['total_tokens']:8}{found['ideal_ratio']:7.3f}  {mode:20}"
        if mode in found["failed"]:
            print(f"{line}  {found['failed'][mode]}", flush=True)
            continue
        ratios = [found[key].get(mode, float("nan")) for key in ("time_ratio", "memory_ratio")]
        print(
            f"{line}{found['seconds'][mode]:9.3f}{ratios[0]:7.3f}{found['peak_mib'][mode]:10.1f}{ratios[1]:8.3f}"
            f"{found['gradient_difference'][mode]:9.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: those that suit the model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU")
    parser.add_argument("--backends", nargs="+", help="default: on a GPU all that are installed")
    parser.add_argument(
        "--checkpointing", action=argparse.BooleanOptionalAction, help="of every mode's layers; default: on a GPU"
    )
    parser.add_argument("--chunk", type=int, help="tokens of a chunk in chunked mode; default: 1024, on a GPU 8192")
    parser.add_argument(
        "--learned", type=float, default=1.0, help="share of each turn's tokens that have a loss; default: 1"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    gpu = torch.device(arguments.device).type == "cuda"
    if not gpu:
        torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if gpu else "float32"))
    checkpointing = gpu if arguments.checkpointing is None else arguments.checkpointing
    chunk = arguments.chunk or (8192 if gpu else 1024)
    suffix = "" if arguments.model == "small" else f"_{arguments.model}"
    suffix += "_learned" if arguments.learned < 1 else ""
    out = arguments.out or REPOSITORY / f"benchmarks/results/packed_tree{suffix}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    modes = modes_for(arguments.device, dtype, arguments.backends, arguments.learned < 1)
    model = make_model(arguments.model, arguments.device, dtype, checkpointing)
    results: dict = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if gpu else "cpu, one thread",
        "model": arguments.model,
        "model_shape": MODELS[arguments.model][0],
        "dtype": str(dtype).removeprefix("torch."),
        "gradient_checkpointing": checkpointing,
        "chunked_chunk": chunk,
        "learned": arguments.learned,
        "repeats": arguments.repeats,
        "shapes": {},
    }
    head = f"{'tree':9}{'unique':>8}{'total':>8}{'ideal':>7}  {'mode':20}"
    print(f"{head}{'seconds':>9}{'time':>7}{'peak MiB':>10}{'memory':>8}{'grad':>9}")
    for shape in arguments.shapes or MODELS[arguments.model][1]:
        rows = make_rows(shape, model.config.vocab_size)
        learned = learned_tokens(shape, rows, arguments.learned)
        found = results["shapes"][shape] = measure(model, rows, learned, modes, arguments.repeats, chunk)
        table(shape, found, modes)
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
