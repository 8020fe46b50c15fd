"""What sandboxes in Ray actors cost beside those of a local pool: a call alone, and hundreds of worlds at once.

First one world of each kind takes turns with the other, call by call. Then ``--worlds`` worlds of each kind are opened at once
and step at once, from as many threads as a rollout worker would use. The world does nothing, so what is measured is the way to
it. Wall milliseconds; memory is that of all processes of the worlds and their actors, shared pages divided among them.

    python benchmarks/pool_overhead.py [--worlds 200] [--steps 20] [--rounds 300]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

from verl_bpo.config.worlds import EnvConfig, PlacementConfig
from verl_bpo.integration.ray_workers import PlacedPools

HERE = Path(__file__)
RESULT = HERE.with_name("results") / "pool_overhead.json"
WORLD = f"{HERE.with_name('sandbox_speed.py')}:Saving"
KINDS = ("local", "ray")


def make_pools(kind: str, worlds: int, per_actor: int) -> PlacedPools:
    placement = PlacementConfig(where=kind, num_cpus=0, resources={"sandbox": 1}, worlds=per_actor, start_timeout=600)
    return PlacedPools(EnvConfig(workers=worlds, reset_timeout=600, step_timeout=300, placement=placement))


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def memory_mb(before: set[int]) -> float:
    """Of what runs below this process and didn't before."""
    total = 0
    for pid in set(descendants(os.getpid())) - before:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return round(total / 1024, 1)


def summary(samples: list[float]) -> dict[str, float]:
    return {
        "median_ms": round(1e3 * statistics.median(samples), 3),
        "p95_ms": round(1e3 * statistics.quantiles(samples, n=20)[-1], 3),
        "n": len(samples),
    }


def alone(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """One world of each kind, in turns: a step, a snapshot, a fork."""
    pools = {kind: make_pools(kind, 1, 1) for kind in KINDS}
    samples = {kind: {"step": [], "snapshot": [], "fork": []} for kind in KINDS}
    try:
        trunks = {kind: pools[kind][WORLD].open().reset("task")[0] for kind in KINDS}
        for _ in range(rounds):
            for kind, trunk in trunks.items():
                times = [time.perf_counter()]
                trunk.step("a")
                times.append(time.perf_counter())
                snapshot = trunk.snapshot()
                times.append(time.perf_counter())
                (fork,) = snapshot.fork()
                times.append(time.perf_counter())
                fork.close()
                snapshot.release()
                for name, start, end in zip(samples[kind], times, times[1:]):
                    samples[kind][name].append(end - start)
    finally:
        for pool in pools.values():
            pool.close()
    return {kind: {name: summary(values) for name, values in named.items()} for kind, named in samples.items()}


def together(kind: str, worlds: int, steps: int, per_actor: int) -> dict[str, object]:
    """All worlds of one kind at once: time to open them, then each takes ``steps`` steps."""
    before = set(descendants(os.getpid()))
    pools = make_pools(kind, worlds, per_actor)
    latencies: list[float] = []

    def play(sandbox) -> None:
        for _ in range(steps):
            started = time.perf_counter()
            sandbox.step("a")
            latencies.append(time.perf_counter() - started)

    try:
        with ThreadPoolExecutor(worlds) as threads:
            started = time.perf_counter()
            hosts = list(threads.map(lambda _: pools[WORLD].open(), range(worlds)))
            sandboxes = [sandbox for sandbox, _ in threads.map(lambda host: host.reset("task"), hosts)]
            opened = time.perf_counter()
            list(threads.map(play, sandboxes))
            seconds = time.perf_counter() - opened
        memory = memory_mb(before)
        lost = sum(host.recoveries for host in hosts)
        closing = time.perf_counter()
    finally:
        pools.close()
    closed = time.perf_counter()
    deadline = closed + 20
    while (left := set(descendants(os.getpid())) - before) and time.perf_counter() < deadline:
        time.sleep(0.2)
    return {
        "worlds": worlds,
        "open_all_s": round(opened - started, 2),
        "steps_per_second": round(worlds * steps / seconds, 1),
        "step": summary(latencies),
        "memory_mb": memory,
        "worlds_lost": lost,
        "close_all_s": round(closed - closing, 2),
        "processes_left": len(left),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--per-actor", type=int, default=50, help="worlds in a Ray actor (default 50)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    actors = -(-arguments.worlds // arguments.per_actor)
    ray.init(
        num_cpus=1, resources={"sandbox": actors + 1}, include_dashboard=False, log_to_driver=False,
        object_store_memory=80 << 20,
    )  # fmt: skip
    result: dict[str, object] = {
        "machine": {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()},
        "ray": ray.__version__,
        "load_before": os.getloadavg(),
    }
    result["alone"] = alone(arguments.rounds)
    for kind, row in result["alone"].items():
        print(
            f"{kind:6}",
            *(f"{name} {values['median_ms']:.3f} ms (p95 {values['p95_ms']:.3f})" for name, values in row.items()),
        )
    result["together"] = {
        kind: together(kind, arguments.worlds, arguments.steps, arguments.per_actor) for kind in KINDS
    }
    for kind, row in result["together"].items():
        print(f"{kind:6}", json.dumps(row))
    result["load_after"] = os.getloadavg()
    ray.shutdown()
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
