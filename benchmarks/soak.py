"""Snapshots, forks and closes of every backend and environment, with faults: is what the program holds at the end what it
held at the beginning?

Each row plays trees as a rollout does: branches step, are snapshot, forked and closed in any order, while its environment
crashes, hangs, raises, answers nonsense, leaves daemons, prints and outgrows its memory, and while its processes are killed
and stopped from outside. What can't be built on this machine is named and left out. What is counted is this program's alone.

    python benchmarks/soak.py                          # 600 operations
    nice -n 5 python benchmarks/soak.py --operations 20000 --out benchmarks/results/soak.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandbox_leftovers import Account, marked, settled
from sandbox_speed import make_tree

from verl_bpo.sandbox import Environment, Observation, Sandbox, SandboxError, SandboxPool, Snapshot, World
from verl_bpo.sandbox.family import descendants
from verl_bpo.sandbox.loading import ENVIRONMENTS, load_environment
from verl_bpo.shells.container import find_engine

HERE = Path(__file__)
SPEED = HERE.with_name("sandbox_speed.py")
INSIDE = ("crash", "raise", "hang", "none", "nan", "surrogate", "object", "huge", "daemon", "print", "memory")
"""Faults of the environment; :class:`Faulty` has a method for each."""
OUTSIDE = ("kill", "stop", "kill the guard")
MOST_GROWN_MB = 24
"""Memory of this process at the end beside that at the beginning. More counts as a leak."""


class Faulty(Environment):
    """Another environment, with a fault where the action names one. ``env``, ``kwargs``: that one's."""

    def __init__(self, env: str, kwargs: dict[str, Any]) -> None:
        self.inner = load_environment(env)(**kwargs)
        self.volatile = dict(self.inner.volatile)

    def reset(self, task: str, seed: int = 0) -> Observation:
        return self.inner.reset(task, seed)

    def step(self, action: str) -> Observation:
        name = action.removeprefix("fault: ")
        return self.inner.step(action) if name == action else getattr(self, f"do_{name}")()

    def close(self) -> None:
        self.inner.close()

    def do_crash(self) -> None:
        os._exit(3)

    def do_raise(self) -> None:
        raise ValueError("a fault")

    def do_hang(self) -> None:
        time.sleep(1000)

    def do_none(self) -> None:
        return None

    def do_nan(self) -> Observation:
        return Observation("a fault", reward=float("nan"))

    def do_surrogate(self) -> Observation:
        return Observation("a \ud800 fault")

    def do_object(self) -> Observation:
        return Observation("a fault", info={"thing": self})

    def do_huge(self) -> Observation:
        return Observation("x" * (20 << 20))

    def do_daemon(self) -> Observation:
        script = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(1000)"
        subprocess.run([sys.executable, "-S", "-c", script], check=True)
        raise ValueError("it left a daemon")

    def do_print(self) -> Observation:
        print("x" * (1 << 20))
        return self.do_nan()

    def do_memory(self) -> Observation:
        return Observation(str(len(bytearray(4 << 30))))


class FaultySaving(Faulty):
    """One that saves its own state."""

    def save_state(self) -> Any:
        return self.inner.save_state()

    def load_state(self, state: Any) -> None:
        self.inner.load_state(state)


class Row:
    """One environment on one backend. ``weight``: its share of the operations, 1 where they are cheap."""

    def __init__(
        self, env: str, kwargs: dict[str, Any], backend: str, actions: list[str], tasks: list[str], weight: float = 1.0
    ) -> None:
        saves = load_environment(env).save_state is not Environment.save_state
        self.env = f"{HERE}:{'FaultySaving' if saves and backend == 'memory' else 'Faulty'}"
        self.kwargs, self.backend, self.actions, self.tasks = {"env": env, "kwargs": kwargs}, backend, actions, tasks
        self.weight = weight


def rows(folder: Path) -> dict[str, Row | str]:
    """By name, or why one can't be built here."""
    tree = str(make_tree(folder / "tree", 1))
    touch = ["echo x >> d0/f0.py", "ls d0 | head", "mkdir -p new && date > new/f; rm -rf d0/f1.py"]
    found: dict[str, Row | str] = {
        "memory": Row(f"{SPEED}:Saving", {}, "memory", ["a"], ["t", "u"]),
        "memory, copies": Row(f"{SPEED}:Heap", {}, "memory", ["a"], ["t"]),
        "fork": Row(f"{SPEED}:Heap", {}, "fork", ["a"], ["t"]),
        "replay": Row(f"{SPEED}:Heap", {}, "replay", ["a"], ["t"]),
        "shell, layers": Row(f"{SPEED}:ShellWorld", {"base": tree}, "memory", touch, ["t"]),
        "shell, git": Row(f"{SPEED}:ShellWorld", {"base": tree, "files": "git"}, "memory", touch, ["t"], 0.3),
    }
    weights = {"alfworld": 0.05, "repair": 0.2, "textworld": 0.3}  # those that take long to start
    plays = {
        "textworld": ["look", "inventory", "go north"],
        "repair": ["ls", "echo x >> notes"],
        "alfworld": ["look", "inventory"],
    }
    for name in ENVIRONMENTS.built_in():
        possible, why = ENVIRONMENTS.status(name)
        if possible and name in plays:
            root = folder / name
            ENVIRONMENTS.load_part(name, "generate").make(root, train=3, valid=1, seed=1, level=1)
            where = {"root": str(root)}
            if name == "alfworld":
                where, os.environ["ALFWORLD_DATA"] = {}, str(root)
            found[name] = Row(
                name, {}, "memory", plays[name], load_environment(name).tasks("train", **where), weights[name]
            )
        else:
            found[name] = why or "its data isn't made here"
    try:
        engine = find_engine()[0]
        found["container"] = f"{Path(engine).name} is here; tests/shells/test_container.py counts what containers leave"
    except SandboxError as error:
        found["container"] = str(error)
    return found


class Play:
    """One row's trees, until so many snapshots, forks and closes are done."""

    def __init__(self, row: Row, operations: int, chance: float, seed: int) -> None:
        self.row, self.operations, self.chance, self.draw = row, operations, chance, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.lost = self.recoveries = self.idle = 0
        self.last = ""

    def run(self) -> SandboxPool:
        """Returns the pool, closed."""
        row = self.row
        pool = SandboxPool(
            row.env, row.kwargs, row.backend, size=2, step_timeout=3.0, reset_timeout=60.0, snapshot_bytes=64 << 20,
            memory_bytes=1 << 30, growth_bytes=256 << 20, worker_trees=20,
        )  # fmt: skip
        with pool:
            while self._operations() < self.operations:
                before = self._operations()
                with pool.open() as world:
                    self._tree(world, pool)
                    self.recoveries += world.recoveries
                self.idle = 0 if self._operations() > before else self.idle + 1
                if self.idle > 5:
                    raise SystemExit(f"{row.env} does nothing: {self.last}")
        return pool

    def _operations(self) -> int:
        return self.done["snapshots"] + self.done["forks"] + self.done["closes"]

    def _tree(self, world: World, pool: SandboxPool) -> None:
        branches: list[Sandbox] = []
        snapshots: list[Snapshot] = []
        for _ in range(80):
            try:
                if not branches:
                    branches.append(world.reset(self.draw.choice(self.row.tasks))[0])
                self._turn(world, pool, branches, snapshots)
            except SandboxError as error:
                self.lost, self.last = self.lost + 1, str(error)
                if world._hung >= 3:  # it is given up
                    return

    def _turn(self, world: World, pool: SandboxPool, branches: list[Sandbox], snapshots: list[Snapshot]) -> None:
        what, branch = self.draw.random(), self.draw.choice(branches)
        if self.draw.random() < self.chance:
            self._fault(pool, branches, branch)
        elif what < 0.25:
            branch.step(self.draw.choice(self.row.actions))
        elif what < 0.5:
            snapshots.append(branch.snapshot())
            self.done["snapshots"] += 1
        elif what < 0.75 and snapshots:
            forks = self.draw.choice(snapshots).fork(self.draw.randint(1, 3))
            self.done["forks"] += len(forks)
            self.lost += sum(isinstance(fork, Exception) for fork in forks)
            branches += [fork for fork in forks if not isinstance(fork, Exception)]
        if what >= 0.75 or len(branches) > 12 or len(snapshots) > 12:
            thing = branches if len(branches) > 1 and (what < 0.9 or not snapshots) else snapshots
            if thing:
                gone = thing.pop(self.draw.randrange(len(thing)))
                gone.close() if isinstance(gone, Sandbox) else gone.release()
                self.done["closes"] += 1

    def _fault(self, pool: SandboxPool, branches: list[Sandbox], branch: Sandbox) -> None:
        name = self.draw.choice((*INSIDE, *OUTSIDE))
        if name in ("hang", "stop") and self.draw.random() < 0.7:  # each takes its whole deadline
            name = "crash"
        self.faults[name] += 1
        if name in INSIDE:
            branches.remove(branch)
            try:
                branch.step(f"fault: {name}")
            finally:
                branch.close()
                self.done["closes"] += 1
            return
        guards = [worker._process.pid for worker in pool._workers]
        victims = guards if name == "kill the guard" else [pid for guard in guards for pid in descendants(guard)]
        with suppress(ProcessLookupError, IndexError):
            os.kill(self.draw.choice(victims), signal.SIGSTOP if name == "stop" else signal.SIGKILL)


class Census(Account):
    """The account, with threads and dead children that nobody buried."""

    def __call__(self) -> dict[str, int]:
        counts = super().__call__()
        threads = zombies = 0
        for pid in (str(os.getpid()), *self.family()):
            with suppress(OSError):
                threads += len(os.listdir(f"/proc/{pid}/task"))
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with suppress(OSError):
                zombies += Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return {**counts, "threads": threads, "zombies": zombies}


def soak(operations: int, names: list[str], chance: float, seed: int) -> dict[str, Any]:
    """What was done, and the counts at the beginning and at the end."""
    with marked() as account:
        census = Census(account.mark.decode(), account.folder)
        known = rows(account.folder)
        chosen = {name: row for name, row in known.items() if isinstance(row, Row) and (not names or name in names)}
        whole = sum(row.weight for row in chosen.values())
        for number, row in enumerate(chosen.values()):  # what is imported and made once isn't counted
            Play(row, 4, 0.0, seed + number).run()
        begin = settled(census, {"processes": 0})
        result: dict[str, Any] = {"rows": {}}
        for number, (name, row) in enumerate(chosen.items()):
            play = Play(row, int(operations * row.weight / whole) + 1, chance, seed + 100 + number)
            pool = play.run()
            after = settled(census, begin)
            result["rows"][name] = {
                **play.done,
                "faults": dict(sorted(play.faults.items())),
                "branches_lost": play.lost,
                "worlds_rebuilt": play.recoveries,
                "workers_renewed": pool.renewals,
                "left": left_over(begin, after),
            }
            print(f"{name}: {result['rows'][name]}", file=sys.stderr, flush=True)
        end = settled(census, begin)
        done: Counter[str] = Counter()
        for row in result["rows"].values():
            done.update({key: row.get(key, 0) for key in ("snapshots", "forks", "closes")})
        return {
            "operations": done.total(),
            "done": dict(done),
            "faults": sum(sum(row["faults"].values()) for row in result["rows"].values()),
            "begin": begin,
            "end": end,
            "left": left_over(begin, end),
            "not_here": {name: row for name, row in known.items() if isinstance(row, str)},
            **result,
        }


def left_over(begin: dict[str, int], end: dict[str, int]) -> dict[str, int]:
    """What there is more of; memory above what a program's own bookkeeping takes."""
    grown = {key: end[key] - begin[key] for key in begin}
    return {key: count for key, count in grown.items() if count > (MOST_GROWN_MB if key == "memory_mb" else 0)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=600, help="snapshots, forks and closes, all rows together")
    parser.add_argument("--rows", default="", help="only these, separated by semicolons; default: all")
    parser.add_argument("--faults", type=float, default=0.01, help="chance that a turn is a fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to write the result as JSON; default: it is shown")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.rows.split(";") if name.strip()]
    result = soak(options.operations, names, options.faults, options.seed)
    result = {"machine": {"python": platform.python_version(), "system": platform.platform()}, **result}
    text = json.dumps(result, indent=2) + "\n"
    options.out.write_text(text) if options.out else print(text)
    print(f"{result['operations']} operations, {result['faults']} faults: left {result['left'] or 'nothing'}")
    return 1 if result["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
