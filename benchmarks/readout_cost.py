"""What SAPO's value readout adds to a forward, to a forward and backward, and to generation.

    python benchmarks/readout_cost.py [--repeats 15]

SAPO: Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842 (not verl's policy loss ``sapo``).

With and without the readout the same model runs the same rows, in turns, in one process; ratios are medians over the
repeats of times measured next to each other. For scale: a token-wise head on every position, as a critic has. CPU
seconds of one thread. Results go to ``results/readout_cost.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_bpo.advantages.sapo import turn_boundaries
from verl_bpo.generation.generator import ContinuousBatcher
from verl_bpo.generation.sampling import SamplingParams
from verl_bpo.integration.vllm import READOUT, StateValues
from verl_bpo.model.value_readout import attach_value_readout, boundary_positions

RESULTS = Path(__file__).parent / "results" / "readout_cost.json"
ROWS, TURNS, ACTION, OBSERVATION, PROMPT = 4, 10, 8, 56, 64


def new_model(hidden: int, layers: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=8192,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 128,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
    )


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [ROWS, T] and the mask of their action tokens, like finished conversations of ten turns."""
    turn = torch.tensor([1] * ACTION + [0] * OBSERVATION)
    mask = torch.cat([torch.zeros(PROMPT, dtype=torch.long), turn.repeat(TURNS)]).repeat(ROWS, 1)
    return torch.randint(2, 8192, mask.shape, generator=torch.Generator().manual_seed(0)), mask


def ratio(base: Callable[[], None], with_it: Callable[[], None], repeats: int) -> dict[str, float]:
    """CPU seconds of both, and how much more the second takes, in percent: median and quartiles of paired runs."""
    base(), with_it()
    pairs = []
    for i in range(repeats):
        times = {}
        for name, run in ((0, base), (1, with_it)) if i % 2 else ((1, with_it), (0, base)):
            start = time.process_time()
            run()
            times[name] = time.process_time() - start
        pairs.append((times[0], times[1]))
    shares = sorted(100 * (b / a - 1) for a, b in pairs)
    low, middle, high = statistics.quantiles(shares, n=4)
    return {
        "seconds": round(statistics.median(a for a, _ in pairs), 4),
        "added_percent": round(middle, 2),
        "quartiles": [round(low, 2), round(high, 2)],
    }


def training(hidden: int, layers: int, repeats: int) -> dict[str, dict[str, float]]:
    model, (ids, mask) = new_model(hidden, layers), rows()
    readout = attach_value_readout(model)
    dense = torch.nn.Linear(hidden, 1)
    at = boundary_positions(turn_boundaries(mask), torch.arange(ROWS) * ids.shape[1], tokens=ids.numel())

    def policy(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1][mask[:, 1:] > 0], ids[:, 1:][mask[:, 1:] > 0])

    def plain(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            loss = policy(model(input_ids=ids).logits)
        if backward:
            loss.backward()
            model.zero_grad()

    def read(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            with readout.reading(at) as values:
                logits = model(input_ids=ids).logits
            loss = policy(logits) + values.state.square().mean() + values.action.square().mean()
        if backward:
            loss.backward()
            model.zero_grad()

    def everywhere(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            out = model(input_ids=ids, output_hidden_states=True)
            loss = policy(out.logits) + dense(out.hidden_states[-1]).square().mean()
        if backward:
            loss.backward()
            model.zero_grad()

    return {
        "readout, forward": ratio(lambda: plain(False), lambda: read(False), repeats),
        "readout, forward and backward": ratio(lambda: plain(True), lambda: read(True), repeats),
        "head on every token, forward": ratio(lambda: plain(False), lambda: everywhere(False), repeats),
        "head on every token, forward and backward": ratio(lambda: plain(True), lambda: everywhere(True), repeats),
    }


def generation(hidden: int, layers: int, repeats: int) -> dict[str, dict[str, float]]:
    model = new_model(hidden, layers)
    batcher = ContinuousBatcher(model, prefix_cache_tokens=0)
    head = torch.randn(hidden), torch.tensor(0.0)
    prompts = rows()[0][:, :256].repeat(4, 1).tolist()
    params = SamplingParams(max_tokens=ACTION, ignore_eos=True)

    def run(value_head: tuple | None) -> None:
        batcher.value_head = value_head
        batcher.generate(prompts, params)

    return {"V while generating": ratio(lambda: run(None), lambda: run(head), repeats)}


def sampling(hidden: int, repeats: int) -> dict[str, dict[str, float]]:
    """What vLLM's worker adds to the logits of 64 sampled tokens: V of the hidden states that they are computed from."""
    states, unembedding = torch.randn(64, hidden), torch.randn(8192, hidden)
    readout = StateValues()
    readout.take([(f"{READOUT}.weight", torch.randn(2, hidden)), (f"{READOUT}.bias", torch.zeros(2))])

    def logits(read: bool) -> None:
        for _ in range(200):
            if read:
                readout.read(states)
            torch.nn.functional.linear(states, unembedding)

    with torch.no_grad():
        return {"V beside the logits of 64 tokens": ratio(lambda: logits(False), lambda: logits(True), repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = (arguments.hidden, arguments.layers, arguments.repeats)
    found = {**training(*size), **generation(*size), **sampling(arguments.hidden, arguments.repeats)}
    for name, value in found.items():
        low, high = value["quartiles"]
        print(f"{name:45s} {value['seconds']:8.3f} s   {value['added_percent']:+6.2f}%   ({low:+.2f}% to {high:+.2f}%)")
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": 1}
    RESULTS.write_text(json.dumps({**machine, **vars(arguments), "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
