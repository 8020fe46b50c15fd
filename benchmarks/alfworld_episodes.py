"""ALFWorld with 1, 16 and 128 episodes at once: steps per second on one core and on two, and memory per episode.

A random agent plays; a finished game, or one of 30 steps, starts anew. Games are loaded before the clock starts. Without
``--root`` games are generated: their size is that of the official ones.

    python benchmarks/alfworld_episodes.py [--root FOLDER_WITH_GAMES]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path

import episodes

from verl_bpo.envs.alfworld.environment import AlfworldEnvironment
from verl_bpo.envs.alfworld.generate import make_alfworld_games
from verl_bpo.sandbox.base import Observation

RESULT = Path(__file__).with_name("results") / "alfworld_episodes.json"
LONGEST = 30


def choose(observation: Observation, rng: random.Random) -> str:
    return rng.choice(observation.actions)


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
        rows = episodes.measure(AlfworldEnvironment, choose, tasks, warm=tasks, longest=LONGEST, steps=arguments.steps)
    episodes.show(rows)
    result = {
        "games": "generated" if arguments.root is None else "given",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
