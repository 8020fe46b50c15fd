"""What a reset, a step and a snapshot of ALFWorld cost here and in the original, and whether both say the same.

Both play the same commands in one run, game by game and step by step: half of them random admissible ones, then the stored
walkthrough. Every text, command list, reward and end is compared, and after each game states saved on the way are loaded
in random order and replayed. Times are CPU milliseconds of this process (other load on the machine distorts them
less than wall time); the json holds wall time too.

    python benchmarks/alfworld_speed.py                 # six games of $ALFWORLD_DATA
    python benchmarks/alfworld_speed.py --all --data some/folder --data games.tar.gz
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import textworld
import textworld.gym
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

from verl_bpo.envs.alfworld import fast_pddl
from verl_bpo.envs.alfworld.environment import AlfworldEnvironment, _data_folder

RESULT = Path(__file__).with_name("results") / "alfworld_speed.json"


class Clock:
    """Collects (CPU, wall) milliseconds per label."""

    def __init__(self) -> None:
        self.samples = defaultdict(list)

    def time(self, label, function, *arguments):
        cpu, wall = time.process_time(), time.perf_counter()
        result = function(*arguments)
        self.samples[label].append((1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)))
        return result

    def medians(self):
        return {
            label: {
                "cpu_ms": statistics.median(c for c, _ in s),
                "wall_ms": statistics.median(w for _, w in s),
                "n": len(s),
            }
            for label, s in self.samples.items()
        }


def open_original(path: str):
    infos = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
    wrappers = [AlfredDemangler(shuffle=False), AlfredInfos]
    game = textworld.gym.register_games([path], infos, batch_size=1, max_episode_steps=None, wrappers=wrappers)
    return textworld.gym.make(game)


def play(
    path: str, environment: AlfworldEnvironment, clock: Clock, steps: int, rng: random.Random
) -> tuple[int, int, list]:
    """Play one game in both; returns comparisons made, wins seen, and what differed."""
    original = open_original(path)
    (text,), infos = clock.time("original reset", original.reset)
    fast_pddl._load_game.cache_clear()
    clock.time("reset, first of a game", environment.reset, path)
    observation = clock.time("reset, known game", environment.reset, path)
    name = "/".join(Path(path).parts[-3:-1])
    commands = json.loads(Path(path).read_text()).get("walkthrough") or []
    differences, saved, score, compared = [], [], 0, 1
    if (observation.text, list(observation.actions)) != (text, infos["admissible_commands"][0]):
        differences.append((name, "reset"))
    for step in range(steps + len(commands)):
        command = rng.choice(observation.actions) if step < steps else commands[step - steps]
        state = clock.time("save", environment.save_state)
        (text,), (new_score,), (done,), infos = clock.time("original step", original.step, [command])
        observation = clock.time("step", environment.step, command)
        saved.append((state, command, observation))
        expected = (text, infos["admissible_commands"][0], new_score - score, done, infos["won"][0])
        won = observation.info["won"]
        compared += 1
        if (observation.text, list(observation.actions), observation.reward, observation.done, won) != expected:
            differences.append((name, step, command))
        score = new_score
        if done:
            break
    for state, command, expected in rng.sample(saved, len(saved)):
        clock.time("load", environment.load_state, state)
        compared += 1
        if environment.step(command) != expected:
            differences.append((name, "after load", command))
    original.close()
    return compared, int(score), differences


def find_games(sources: list[Path], scratch: Path) -> list[str]:
    """Games below folders and in archives, in a fixed order."""
    games = []
    for number, source in enumerate(sources):
        folder = source
        if source.is_file():
            folder = scratch / str(number)
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")
        games += sorted(str(path) for path in folder.rglob("game.tw-pddl"))
    return games


def report(clock: Clock, games: int, compared: int, wins: int, differences: list, steps: int) -> None:
    medians = clock.medians()
    rows = [
        ("reset, first of a game", "original reset"),
        ("reset, known game", "original reset"),
        ("step", "original step"),
    ]
    print(f"{'CPU ms, median':<24}{'original':>10}{'here':>10}{'ratio':>8}")
    for ours, theirs in rows:
        here, there = medians[ours]["cpu_ms"], medians[theirs]["cpu_ms"]
        print(f"{ours:<24}{there:>10.2f}{here:>10.3f}{there / here:>8.0f}")
    for label in ("save", "load"):
        print(f"{label:<24}{'-':>10}{medians[label]['cpu_ms']:>10.4f}")
    print(f"{games} games, {wins} won, {compared} observations compared, {len(differences)} differ")
    RESULT.parent.mkdir(exist_ok=True)
    packages = {name: version(name) for name in ("alfworld", "textworld", "fast_downward_textworld")}
    result = {
        "games": games, "steps_per_game": steps, "wins": wins, "compared": compared, "differences": differences[:20],
        "medians": medians, "python": platform.python_version(), "machine": platform.machine(), "packages": packages,
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", help="folder or tar archive of games, repeatable")
    parser.add_argument("--all", action="store_true", help="every game instead of a sample")
    parser.add_argument("--games", type=int, default=6, help="sample size")
    parser.add_argument("--steps", type=int, default=25, help="random steps before the walkthrough")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng, clock, environment = random.Random(args.seed), Clock(), AlfworldEnvironment()
    compared, wins, differences = 0, 0, []
    with tempfile.TemporaryDirectory() as scratch:
        games = find_games(args.data or [_data_folder()], Path(scratch))
        if not games:
            parser.error("no game.tw-pddl found: set ALFWORLD_DATA or give --data")
        if not args.all:
            games = rng.sample(games, min(args.games, len(games)))
        for path in games:
            counted, won, different = play(path, environment, clock, args.steps, rng)
            compared, wins, differences = compared + counted, wins + won, differences + different
    environment.close()
    report(clock, len(games), compared, wins, differences, args.steps)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
