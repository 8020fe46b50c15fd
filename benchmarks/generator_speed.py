"""Generation on a CPU: the continuous batcher against batched ``model.generate``, and its prefix cache on a tree.

    python benchmarks/generator_speed.py [--repeats 3]

Four questions, one json (``benchmarks/results/generator_speed.json``):

- throughput: the same requests, once with completions of one length (the best case of ``generate``, whose batch ends
  with its longest sequence) and once with lengths as uneven as an agent's;
- tree: a backbone of 12 turns with forks at some of them, every turn a request whose prompt is the whole path before
  it. How many prompt tokens are computed with and without the prefix cache, and how long it takes;
- lengths: 64 sequences, one of them long, against 64 of one length with the same sum, against one rectangle that is as wide
  as the longest (a cache of this script's): a decode step's time and the keys' and values' memory;
- sampling: one token for each of some rows, without cuts and with them, by the size of the vocabulary.

``--requests N`` asks only whether memory grows over N requests.

Times are CPU seconds of this process on one thread, the best of the repeats: on an idle machine that is the wall time,
and on a busy one it still is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from verl_bpo.generation.generator import Completion, ContinuousBatcher
from verl_bpo.generation.kv_rows import KVRows
from verl_bpo.generation.sampling import SamplingParams, sample

VOCABULARY = 4096
RESULTS = Path(__file__).parent / "results" / "generator_speed.json"


def new_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config).eval()


def random_ids(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()


def best(run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Least CPU time in seconds, and the last result."""
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        result = run()
        seconds.append(time.process_time() - started)
    return min(seconds), result


# --- throughput ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def naive(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> None:
    """One padded batch that runs until its longest sequence ends."""
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        max_new_tokens=max(lengths),
        min_new_tokens=max(lengths),
        pad_token_id=0,
    )


def throughput(sequences: int, uneven: bool, repeats: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    prompts = [random_ids(generator, n) for n in torch.randint(100, 401, (sequences,), generator=generator).tolist()]
    lengths = torch.randint(4, 129, (sequences,), generator=generator).tolist() if uneven else [64] * sequences
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=i) for i, n in enumerate(lengths)]
    plain = new_model()
    naive_seconds, _ = best(lambda: naive(plain, prompts, lengths), repeats)
    batched = new_model()

    def batch() -> list[Completion]:
        return ContinuousBatcher(batched, max_num_seqs=sequences).generate(prompts, params)

    seconds, completions = best(batch, repeats)
    assert [len(c.token_ids) for c in completions] == lengths
    return {
        "sequences": sequences,
        "lengths": "4 to 128" if uneven else "64",
        "completion_tokens": sum(lengths),
        "generate_tokens_per_s": sum(lengths) / naive_seconds,
        "batcher_tokens_per_s": sum(lengths) / seconds,
        "speedup": naive_seconds / seconds,
    }


# --- tree ------------------------------------------------------------------------------------------------------------


class Tree:
    """Rolls trees whose turns are requests: a turn's completion and an observation make the next turn's prompt."""

    def __init__(self, batcher: ContinuousBatcher, turns: int, fork_at: set[int], forks: int, seed: int) -> None:
        self.batcher, self.turns, self.fork_at, self.forks = batcher, turns, fork_at, forks
        self.random = torch.Generator().manual_seed(seed)
        self.cached = self.prefilled = self.requests = 0
        self.turn(random_ids(self.random, 200), 0, backbone=True)

    def turn(self, prompt: list[int], number: int, backbone: bool) -> None:
        future = self.batcher.submit(prompt, SamplingParams(max_tokens=12, ignore_eos=True))

        def finished(done) -> None:
            completion = done.result()
            self.requests += 1
            self.cached += completion.num_cached_tokens
            self.prefilled += completion.num_prefill_tokens
            if number + 1 < self.turns:
                observation = random_ids(self.random, 40)
                self.turn(prompt + completion.token_ids + observation, number + 1, backbone)
            if backbone and number in self.fork_at:
                for _ in range(self.forks):
                    self.turn(prompt, number, backbone=False)

        future.add_done_callback(finished)


def tree(cache_tokens: int, repeats: int, trees: int = 4) -> dict[str, Any]:
    model = new_model()

    def roll() -> list[Tree]:
        batcher = ContinuousBatcher(model, max_num_seqs=32, prefix_cache_tokens=cache_tokens)
        rolled = [Tree(batcher, turns=12, fork_at={2, 5, 8}, forks=3, seed=s) for s in range(trees)]
        while batcher.busy:
            batcher.step()
        return rolled

    seconds, rolled = best(roll, repeats)
    cached, prefilled = (sum(getattr(t, name) for t in rolled) for name in ("cached", "prefilled"))
    return {
        "prefix_cache_tokens": cache_tokens,
        "trees": trees,
        "requests": sum(t.requests for t in rolled),
        "cached_tokens": cached,
        "prefill_tokens": prefilled,
        "cached_share": cached / (cached + prefilled),
        "seconds": seconds,
    }


# --- uneven lengths --------------------------------------------------------------------------------------------------


class Rectangle(KVRows):
    """The comparison: every row has the longest one's shelf."""

    def reserve(self, tokens: list[int]) -> None:
        super().reserve([max(tokens)] * len(tokens))


def decode(lengths: list[int], kind: type[KVRows], steps: int) -> dict[str, Any]:
    """Milliseconds of a decode step (the least), and memory over what the tokens take."""
    model = new_model()
    generator = torch.Generator().manual_seed(1)
    batcher = ContinuousBatcher(model, max_num_seqs=len(lengths), prefix_cache_tokens=0, max_batched_tokens=1 << 20)
    batcher.rows = kind(model)
    for length in lengths:
        batcher.submit(random_ids(generator, length), SamplingParams(max_tokens=steps + 4, ignore_eos=True))
    batcher.step()
    seconds, _ = best(batcher.step, steps)
    layers, heads, width = batcher.rows.cell
    used = sum(r.stored for r in batcher.running) * 2 * layers * heads * width * batcher.rows.dtype.itemsize
    return {"step_ms": 1e3 * seconds, "memory_mib": batcher.rows.memory / 2**20, "used_mib": used / 2**20}


def uneven_lengths(steps: int, longest: int = 3000) -> dict[str, Any]:
    uneven = [longest, *[40 + 3 * i for i in range(63)]]
    even = [sum(uneven) // 64] * 64
    return {
        "lengths": f"{min(uneven)} to {max(uneven[1:])}, one of {longest}; even: {even[0]}",
        "uneven": decode(uneven, KVRows, steps),
        "even": decode(even, KVRows, steps),
        "rectangle": decode(uneven, Rectangle, steps),
    }


# --- sampling --------------------------------------------------------------------------------------------------------


def sampling(rows: int, vocabulary: int, repeats: int) -> dict[str, Any]:
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1))
    cuts = {"none": {}, "top_p 0.95": {"top_p": 0.95}, "top_k 50": {"top_k": 50}}
    run = lambda cut: sample(logits, [SamplingParams(**cut)] * rows, [0.5] * rows)  # noqa: E731
    found = {name: 1e3 * best(lambda cut=cut: run(cut), repeats)[0] for name, cut in cuts.items()}
    found["a full sort"] = 1e3 * best(lambda: logits.sort(-1, descending=True), repeats)[0]
    return {"rows": rows, "vocabulary": vocabulary, "ms": found}


# --- growth ----------------------------------------------------------------------------------------------------------


def growth(requests: int) -> None:
    """Print the process's memory while requests of all lengths come and go."""
    generator = torch.Generator().manual_seed(1)
    batcher = ContinuousBatcher(new_model(), max_num_seqs=64, prefix_cache_tokens=4096)
    tenth = -(-requests // 10)
    for part in range(10):
        prompts = [random_ids(generator, n) for n in torch.randint(1, 200, (tenth,), generator=generator).tolist()]
        batcher.generate(prompts, [SamplingParams(max_tokens=1 + i % 8, ignore_eos=True) for i in range(tenth)])
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        print(
            f"{(part + 1) * tenth:7} requests: {resident:6.0f} MiB resident, rows {batcher.rows.memory} bytes",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--requests", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.requests:
        growth(arguments.requests)
        return

    lengths = uneven_lengths(8 * arguments.repeats)
    print(f"decode, 64 sequences of {lengths['lengths']}")
    for name in ("uneven", "even", "rectangle"):
        print(f"{name:>10}", *(f"{key} {value:9.1f}" for key, value in lengths[name].items()))
    draws = [sampling(rows, size, arguments.repeats) for rows, size in ((8, 49152), (8, 151936), (64, 49152))]
    for row in draws:
        print(
            f"{row['rows']:3} x {row['vocabulary']:6}", *(f"{key} {value:.1f} ms" for key, value in row["ms"].items())
        )

    rows = [throughput(n, uneven, arguments.repeats) for uneven in (False, True) for n in (4, 16, 64)]
    print(f"{'sequences':>9} {'lengths':>9} {'generate':>10} {'batcher':>10} tokens/s  speed-up")
    for row in rows:
        print(
            f"{row['sequences']:9} {row['lengths']:>9} {row['generate_tokens_per_s']:10.0f} "
            f"{row['batcher_tokens_per_s']:10.0f} {'':8}  {row['speedup']:.2f}"
        )
    trees = [tree(tokens, arguments.repeats) for tokens in (0, 65536)]
    print(f"\n{'cache':>9} {'requests':>9} {'cached':>9} {'prefilled':>9} {'share':>6} {'seconds':>8}")
    for row in trees:
        print(
            f"{row['prefix_cache_tokens']:9} {row['requests']:9} {row['cached_tokens']:9} {row['prefill_tokens']:9} "
            f"{row['cached_share']:6.2f} {row['seconds']:8.2f}"
        )
    result = {
        "model_parameters": sum(p.numel() for p in new_model().parameters()),
        "threads": 1,
        "repeats": arguments.repeats,
        "cores": os.cpu_count(),
        "load_average_at_end": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lengths": lengths,
        "sampling": draws,
        "throughput": rows,
        "tree": trees,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
