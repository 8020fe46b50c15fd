"""What loading, a reset, a step and a snapshot of WebShop cost here, and steps a second of 1, 16 and 128 episodes at once.

A random agent shops: it searches for words of its instruction, else clicks at random, and starts anew after a purchase.
Times of single calls are wall milliseconds. Steps a second leave out resets, and the search for nouns in titles, which each
process does once for each title, some 5 ms. The original's figures were recorded on another
occasion (its text environment with the same 1000 products), not in this run, so read the ratios as orders of magnitude.

    WEBSHOP_DATA=some/folder python benchmarks/webshop_speed.py
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import random
import statistics
import time
from collections import defaultdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import episodes
from episodes import memory_mib

from verl_bpo.envs.webshop.environment import WebshopEnvironment
from verl_bpo.sandbox.base import Observation

RESULT = Path(__file__).with_name("results") / "webshop_speed.json"

ORIGINAL = {
    "provenance": "recorded from the original WebAgentTextEnv with 1000 products, not measured in this run",
    "reset_ms": [3.0, 5.0],
    "step_ms": [15.0, 33.0],
    "snapshot_ms": [145.0, 214.0],
    "snapshot_how": "copy.deepcopy of the environment",
    "rss_mib": 270.0,
}

SUB_PAGES = ("click[description]", "click[features]", "click[reviews]")


LONGEST = 15
"""Steps of an episode where many are played at once; the recipes' limit."""


def choose(observation: Observation, rng: random.Random) -> str:
    actions = observation.actions
    if actions[0].startswith("search["):
        words = observation.text.split("[SEP]")[2].split()
        return f"search[{' '.join(rng.sample(words, min(4, len(words))))}]"
    if "click[buy now]" in actions and rng.random() < 0.3:
        return "click[buy now]"
    return rng.choice([action for action in actions if action != "click[back to search]"])


class Shopper:
    """One environment and its random agent."""

    def __init__(self, environment: WebshopEnvironment, tasks: int, seed: int) -> None:
        self.environment, self.tasks, self.rng = environment, tasks, random.Random(seed)
        self.observation = self.reset()

    def reset(self) -> Observation:
        self.observation = self.environment.reset(str(self.rng.randrange(self.tasks)))
        return self.observation

    def choose(self) -> str:
        return choose(self.observation, self.rng)

    def step(self, action: str) -> Observation:
        self.observation = self.environment.step(action)
        return self.observation

    def turn(self) -> None:
        self.reset() if self.observation.done else self.step(self.choose())


def kind_of(action: str, before: Observation) -> str:
    if action.startswith("search["):
        return "search"
    if action == "click[buy now]":
        return "buy"
    if action in SUB_PAGES:
        return "sub page"
    if action in ("click[next >]", "click[< prev]"):
        return "next or previous page"
    return "option" if "click[buy now]" in before.actions else "item"


def time_calls(shopper: Shopper, turns: int) -> dict[str, dict[str, float]]:
    """Milliseconds per kind of call over ``turns`` turns of one agent, with a snapshot and a restore at each."""
    samples = defaultdict(list)

    def clock(labels: tuple[str, ...], call, *arguments):
        start = time.perf_counter()
        result = call(*arguments)
        taken = 1e3 * (time.perf_counter() - start)
        for label in labels:
            samples[label].append(taken)
        return result

    for _ in range(turns):
        if shopper.observation.done:
            clock(("reset",), shopper.reset)
        state = clock(("save",), shopper.environment.save_state)
        clock(("load",), shopper.environment.load_state, state)
        action = shopper.choose()
        clock(("step", f"step: {kind_of(action, shopper.observation)}"), shopper.step, action)
    return {
        label: {
            "mean_ms": statistics.fmean(times),
            "median_ms": statistics.median(times),
            "p95_ms": statistics.quantiles(times, n=20)[-1],
            "n": len(times),
        }
        for label, times in sorted(samples.items())
        if len(times) > 1
    }


def with_nouns(data_dir: str | None) -> WebshopEnvironment:
    environment = WebshopEnvironment(data_dir)
    for product in environment._catalogue.products:
        environment._catalogue.nouns(product.title)
    return environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=None, help="folder with WebShop's data; default: $WEBSHOP_DATA")
    parser.add_argument("--turns", type=int, default=4000, help="turns a measurement")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()

    before = memory_mib()
    start = time.perf_counter()
    environment = WebshopEnvironment(arguments.data_dir)
    load_s = time.perf_counter() - start
    loaded = memory_mib()
    start = time.perf_counter()
    WebshopEnvironment(arguments.data_dir)
    again_ms = 1e3 * (time.perf_counter() - start)
    tasks = 500 + len(environment.tasks("train", data_dir=arguments.data_dir))

    cold = time_calls(Shopper(environment, tasks, seed=1), arguments.turns)
    warm = time_calls(Shopper(environment, tasks, seed=2), arguments.turns)

    make = partial(with_nouns, arguments.data_dir)
    goals = [str(index) for index in range(tasks)]
    throughput = episodes.measure(make, choose, goals, longest=LONGEST, steps=arguments.turns)

    many, shoppers = 2000, []
    start_mib = memory_mib()
    for index in range(many):
        shoppers.append(Shopper(WebshopEnvironment(arguments.data_dir), tasks, seed=index))
        shoppers[-1].step("search[shoes]")
    per_episode_kib = 1024 * (memory_mib() - start_mib) / many
    shopper = shoppers[-1]
    while "click[buy now]" not in shopper.observation.actions:
        shopper.turn()

    result = {
        "machine": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
        },
        "versions": {name: version(name) for name in ("bm25s", "thefuzz", "spacy", "numpy")},
        "load_s": load_s,
        "load_again_ms": again_ms,
        "rss_before_mib": before,
        "rss_loaded_mib": loaded,
        "rss_end_mib": memory_mib(),
        "calls_first_pass": cold,
        "calls_second_pass": warm,
        "episodes_at_once": throughput,
        "memory_per_episode_kib": per_episode_kib,
        "snapshot_bytes": len(pickle.dumps(shopper.environment.save_state())),
        "original": ORIGINAL,
        "ratio_of_original_to_here": {
            "step, fastest recorded / mean of first pass": ORIGINAL["step_ms"][0] / cold["step"]["mean_ms"],
            "step, fastest recorded / mean of second pass": ORIGINAL["step_ms"][0] / warm["step"]["mean_ms"],
            "reset, fastest recorded / mean": ORIGINAL["reset_ms"][0] / warm["reset"]["mean_ms"],
            "snapshot, fastest recorded / mean of save and load": ORIGINAL["snapshot_ms"][0]
            / (warm["save"]["mean_ms"] + warm["load"]["mean_ms"]),
        },
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")

    print(f"load {load_s:.1f} s (again {again_ms:.2f} ms), memory {before:.0f} -> {loaded:.0f} MiB (original: 270 MiB)")
    print(f"{'call':32} {'first pass: mean':>18} {'second: mean':>14} {'median':>10} {'p95 ms':>10}")
    for label, row in warm.items():
        first = cold[label]["mean_ms"] if label in cold else float("nan")
        print(f"{label:32} {first:18.4f} {row['mean_ms']:14.4f} {row['median_ms']:10.4f} {row['p95_ms']:10.4f}")
    episodes.show(throughput)
    print(f"memory per episode {per_episode_kib:.1f} KiB, snapshot {result['snapshot_bytes']} bytes")
    for label, ratio in result["ratio_of_original_to_here"].items():
        print(f"{label}: {ratio:.0f}x")


if __name__ == "__main__":
    main()
