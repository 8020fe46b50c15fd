"""ALFWorld with 1, 16 and 128 episodes at once: steps per second on one core and on two, and memory per episode.

A random agent plays; a finished game, or one of 30 steps, starts anew. The episodes of a process take their steps one after
the other, as the worlds of a rollout worker do that wait for the model; with two processes each holds half of them. Games
are loaded before the clock starts. Without ``--root`` games are generated: their size is that of the official ones.

    python benchmarks/alfworld_episodes.py [--root FOLDER_WITH_GAMES]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path

from verl_bpo.envs.alfworld import AlfworldEnvironment
from verl_bpo.envs.make_alfworld import make_alfworld_games

RESULT = Path(__file__).with_name("results") / "alfworld_episodes.json"
LONGEST = 30


def memory_mib() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def play(tasks: list[str], episodes: int, steps: int, seed: int) -> dict[str, float]:
    """``steps`` steps of ``episodes`` episodes in turn; seconds exclude resets."""
    rng = random.Random(seed)
    environments = [AlfworldEnvironment() for _ in range(episodes)]
    warm = AlfworldEnvironment()
    for task in tasks:
        warm.reset(task)
    before, cpu_reset, start = memory_mib(), 0.0, time.process_time()
    observations = [environment.reset(rng.choice(tasks)) for environment in environments]
    cpu_reset = time.process_time() - start
    memory = memory_mib() - before
    lengths, cpu, wall = [0] * episodes, 0.0, 0.0
    for step in range(steps):
        i = step % episodes
        if observations[i].done or lengths[i] == LONGEST:
            observations[i], lengths[i] = environments[i].reset(rng.choice(tasks)), 0
        action = rng.choice(observations[i].actions)
        start, start_wall = time.process_time(), time.perf_counter()
        observations[i] = environments[i].step(action)
        cpu += time.process_time() - start
        wall += time.perf_counter() - start_wall
        lengths[i] += 1
    for environment in (*environments, warm):
        environment.close()
    return {"steps": steps, "cpu_s": cpu, "wall_s": wall, "reset_cpu_s": cpu_reset, "memory_mib": memory}


def measure(tasks: list[str], episodes: int, processes: int, steps: int) -> dict[str, float]:
    share = episodes // processes
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.starmap(play, [(tasks, share, steps // processes, seed) for seed in range(processes)])
    total = {key: sum(result[key] for result in results) for key in results[0]}
    return {
        "steps_per_cpu_second": total["steps"] / total["cpu_s"],
        "steps_per_second": sum(result["steps"] / result["wall_s"] for result in results),
        "reset_cpu_ms": 1e3 * total["reset_cpu_s"] / episodes,
        "memory_per_episode_mib": total["memory_mib"] / episodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with games; default: 12 generated ones")
    parser.add_argument("--games", type=int, default=12, help="so many games of the split, spread over it")
    parser.add_argument("--steps", type=int, default=3000, help="steps a measurement")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.root or make_alfworld_games(folder, {"train": arguments.games}, progress=False)
        tasks = AlfworldEnvironment.tasks("train", root=root)
        tasks = tasks[:: max(1, len(tasks) // arguments.games)][: arguments.games]
        rows = {}
        for processes in (1, 2):
            for episodes in (1, 16, 128):
                if episodes >= processes:
                    rows[f"{episodes} in {processes}"] = measure(tasks, episodes, processes, arguments.steps)
    print(f"{'episodes in processes':24} {'steps/s of CPU':>15} {'steps/s':>9} {'reset ms CPU':>13} {'MiB each':>9}")
    for name, row in rows.items():
        print(
            f"{name:24} {row['steps_per_cpu_second']:15.0f} {row['steps_per_second']:9.0f} {row['reset_cpu_ms']:13.1f} "
            f"{row['memory_per_episode_mib']:9.2f}"
        )
    result = {
        "games": "generated" if arguments.root is None else "given",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
