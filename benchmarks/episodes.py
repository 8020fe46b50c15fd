"""Many episodes of an environment at once, in one process and in two: shared by the benchmarks of single environments."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from verl_bpo.sandbox.base import Environment, Observation

COUNTS = (1, 16, 128)
"""Episodes at once."""
PROCESSES = (1, 2)


def memory_mib() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def play(
    make: Callable[[], Environment],
    choose: Callable[[Observation, random.Random], str],
    tasks: Sequence[str],
    warm: Sequence[str],
    longest: int,
    episodes: int,
    steps: int,
    seed: int,
) -> dict[str, float]:
    """``steps`` steps of ``episodes`` episodes in turn, as the worlds of a rollout worker take them that wait for the model.

    Args:
        make: an environment; its class and data are loaded before the clock starts.
        choose: the agent.
        tasks: drawn from at random, anew when an episode has ended or has taken ``longest`` steps.
        warm: tasks that are reset once before the clock starts.
        seed: of the draws.

    Returns:
        ``cpu_s`` and ``wall_s`` of the steps alone, ``reset_cpu_s`` of the first resets, ``memory_mib`` of all episodes.
    """
    rng = random.Random(seed)
    environments = [make() for _ in range(episodes)]
    first = make()
    for task in warm:
        first.reset(task)
    before, start = memory_mib(), time.process_time()
    observations = [environment.reset(rng.choice(tasks)) for environment in environments]
    reset_cpu = time.process_time() - start
    memory = memory_mib() - before
    lengths, cpu, wall = [0] * episodes, 0.0, 0.0
    for step in range(steps):
        i = step % episodes
        if observations[i].done or lengths[i] == longest:
            observations[i], lengths[i] = environments[i].reset(rng.choice(tasks)), 0
        action = choose(observations[i], rng)
        start, start_wall = time.process_time(), time.perf_counter()
        observations[i] = environments[i].step(action)
        cpu += time.process_time() - start
        wall += time.perf_counter() - start_wall
        lengths[i] += 1
    for environment in (*environments, first):
        environment.close()
    return {"steps": steps, "cpu_s": cpu, "wall_s": wall, "reset_cpu_s": reset_cpu, "memory_mib": memory}


def measure(
    make: Callable[[], Environment],
    choose: Callable[[Observation, random.Random], str],
    tasks: Sequence[str],
    *,
    warm: Sequence[str] = (),
    longest: int,
    steps: int,
) -> dict[str, dict[str, float]]:
    """:func:`play` for each of COUNTS in each of PROCESSES, whose processes share the episodes out among them."""
    rows = {}
    for processes in PROCESSES:
        for episodes in COUNTS:
            if episodes < processes:
                continue
            share = (make, choose, tasks, warm, longest, episodes // processes, steps // processes)
            with multiprocessing.get_context("spawn").Pool(processes) as pool:
                results = pool.starmap(play, [(*share, seed) for seed in range(processes)])
                pool.close()
                pool.join()
            total = {key: sum(result[key] for result in results) for key in results[0]}
            rows[f"{episodes} in {processes}"] = {
                "steps_per_cpu_second": total["steps"] / total["cpu_s"],
                "steps_per_second": sum(result["steps"] / result["wall_s"] for result in results),
                "reset_cpu_ms": 1e3 * total["reset_cpu_s"] / episodes,
                "memory_per_episode_mib": total["memory_mib"] / episodes,
            }
    return rows


def show(rows: dict[str, dict[str, float]]) -> None:
    print(f"{'episodes in processes':24} {'steps/s of CPU':>15} {'steps/s':>9} {'reset ms CPU':>13} {'MiB each':>9}")
    for name, row in rows.items():
        print(
            f"{name:24} {row['steps_per_cpu_second']:15.0f} {row['steps_per_second']:9.0f} {row['reset_cpu_ms']:13.2f} "
            f"{row['memory_per_episode_mib']:9.3f}"
        )
