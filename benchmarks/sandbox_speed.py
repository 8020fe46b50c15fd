"""What snapshots, forks, restores and commands of each backend cost (what they leave behind: ``sandbox_leftovers.py``).

Wall milliseconds (median and 95th percentile); for commands also CPU milliseconds, which a busy machine changes less.
A restore is a fork's first step on another state than the live one.

    python benchmarks/sandbox_speed.py [--tree FOLDER] [--only fork]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verl_bpo.sandbox import Environment, ForkBackend, MemorySandbox, Observation, ReplaySandbox, Sandbox, SandboxError
from verl_bpo.shells.local import LocalShell

RESULT = Path(__file__).with_name("results") / "sandbox_speed.json"


class Heap(Environment):
    """A world of ``megabytes`` in small objects and one number."""

    def __init__(self, megabytes: int = 1) -> None:
        self.heap = [bytearray(1 << 20) for _ in range(megabytes)]

    def reset(self, task: str, seed: int = 0) -> Observation:
        self.count = 0
        return Observation("0")

    def step(self, action: str) -> Observation:
        self.count += 1
        return Observation(str(self.count))


class Objects(Environment):
    """A world of small objects, some 440 bytes each with what it holds. A step changes 200 of them, all over the memory."""

    def __init__(self, count: int) -> None:
        self.facts = [{"name": f"at {number}", "arguments": [number, str(number)]} for number in range(count)]

    def reset(self, task: str, seed: int = 0) -> Observation:
        self.count = 0
        return Observation("0")

    def step(self, action: str) -> Observation:
        self.count += 1
        for number in range(self.count, len(self.facts), len(self.facts) // 200):
            self.facts[number]["name"] = action
        return Observation(str(self.count))


class Saving(Heap):
    def save_state(self) -> int:
        return self.count

    def load_state(self, state: int) -> None:
        self.count = state


class ShellWorld(Environment):
    """A tree of files; a step is a command."""

    def __init__(self, base: str, files: str = "overlay") -> None:
        self.shell = LocalShell({"/testbed": base}, files=files)

    def reset(self, task: str, seed: int = 0) -> Observation:
        self.shell.reset()
        return Observation("")

    def step(self, action: str) -> Observation:
        return Observation(self.shell.execute(action).output)

    def save_state(self) -> object:
        return self.shell.save()

    def load_state(self, state: object) -> None:
        self.shell.load(state)

    def close(self) -> None:
        self.shell.close()


def clock(samples: list[float], call: Callable, *arguments: object) -> Any:
    start = time.perf_counter()
    result = call(*arguments)
    samples.append(1e3 * (time.perf_counter() - start))
    return result


def summary(samples: list[float]) -> dict[str, float]:
    return {
        "median_ms": round(statistics.median(samples), 3),
        "p95_ms": round(statistics.quantiles(samples, n=20)[-1], 3),
        "n": len(samples),
    }


def measure(trunk: Sandbox, action: str, rounds: int) -> dict[str, object]:
    """A step, a snapshot, a fork, the fork's first step, ``rounds`` times; then a chain of 20 forks of forks, and 200
    forks at once."""
    trunk.reset("task")
    times: dict[str, list[float]] = {name: [] for name in ("step", "snapshot", "fork", "first step of a fork")}
    nbytes = []
    for _ in range(rounds):
        clock(times["step"], trunk.step, action)
        snapshot = clock(times["snapshot"], trunk.snapshot)
        (fork,) = clock(times["fork"], snapshot.fork)
        clock(times["first step of a fork"], fork.step, action)
        nbytes.append(snapshot.nbytes)
        fork.close()
        snapshot.release()
    chain, branch, kept = [], trunk, []
    for _ in range(20):
        started = time.perf_counter()
        kept.append(branch.snapshot())
        (branch,) = kept[-1].fork()
        branch.step(action)
        chain.append(1e3 * (time.perf_counter() - started))
        kept.append(branch)
    snapshot = trunk.snapshot()
    started = time.perf_counter()
    many = [fork for fork in snapshot.fork(200) if not isinstance(fork, Exception)]
    many_ms = 1e3 * (time.perf_counter() - started)
    for thing in (*many, *kept, snapshot):
        thing.close() if isinstance(thing, Sandbox) else thing.release()
    known = [size for size in nbytes if size is not None]
    return {
        **{name: summary(samples) for name, samples in times.items()},
        "bytes_per_snapshot": statistics.median(known) if known else None,
        "level_1_to_5_of_a_chain_ms": round(statistics.median(chain[:5]), 3),
        "level_16_to_20_of_a_chain_ms": round(statistics.median(chain[15:]), 3),
        "forks_of_200_made": len(many),
        "200_forks_ms": round(many_ms, 1),
        "steps_per_second": round(1e3 / statistics.mean(times["step"]), 1),
    }


def make_tree(folder: Path, megabytes: int) -> Path:
    """Files of 16 KiB in folders of 100."""
    for number in range(megabytes * 64):
        place = folder / f"d{number // 100}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"f{number}.py").write_bytes(number.to_bytes(4, "big") * 4096)
    return folder


def worlds(scratch: Path, large: Path) -> Iterator[tuple[str, Callable[[], tuple[Sandbox, Callable[[], None]]], str]]:
    """Name, a function that makes the sandbox and what ends it, and the action of a step."""
    small = make_tree(scratch / "small", 1)

    def in_memory(make: Callable[[], Environment]) -> Callable:
        def opened() -> tuple[Sandbox, Callable[[], None]]:
            sandbox = MemorySandbox(make())
            return sandbox, sandbox.close

        return opened

    def forked(world: str, **size: int) -> Callable:
        def opened() -> tuple[Sandbox, Callable[[], None]]:
            backend = ForkBackend(f"{__file__}:{world}", size)
            return backend.sandbox(), backend.close

        return opened

    def replayed() -> tuple[Sandbox, Callable[[], None]]:
        sandbox = ReplaySandbox(Heap)
        return sandbox, sandbox.close

    touch = "echo x >> d0/f0.py"
    yield "memory, own save_state", in_memory(Saving), "a"
    yield "memory, copy of 1 MB", in_memory(Heap), "a"
    yield "memory, copy of 2,500 objects", in_memory(lambda: Objects(2500)), "a"
    yield "fork, 1 MB heap", forked("Heap", megabytes=1), "a"
    yield "fork, 200 MB heap", forked("Heap", megabytes=200), "a"
    yield "fork, 200 MB of objects", forked("Objects", count=450_000), "a"
    yield "replay (up to 50 actions)", replayed, "a"
    yield "overlay, 1 MB tree", in_memory(lambda: ShellWorld(str(small))), touch
    yield "overlay, large tree", in_memory(lambda: ShellWorld(str(large))), touch
    yield "git, 1 MB tree", in_memory(lambda: ShellWorld(str(small), "git")), touch


def commands(rounds: int) -> dict[str, Any]:
    """What a command costs in a sandbox and in plain bash, in turns."""
    plain: list[float] = []
    inside: list[float] = []

    def cpu_ms(pid: int) -> float:
        """Of a process and of its children that have ended."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 1e3 * sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    with LocalShell({"/testbed": None}) as shell:
        keeper = shell._keeper._process.pid
        shell.execute("true")
        inside_cpu, plain_cpu = cpu_ms(keeper), resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in range(rounds):
            clock(plain, subprocess.run, ["/bin/bash", "-c", "true"])
            clock(inside, shell.execute, "true")
        inside_cpu = cpu_ms(keeper) - inside_cpu
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        plain_s = after.ru_utime + after.ru_stime - plain_cpu.ru_utime - plain_cpu.ru_stime
    return {
        "plain bash": {**summary(plain), "cpu_ms": round(1e3 * plain_s / rounds, 2)},
        "in a sandbox": {**summary(inside), "cpu_ms": round(inside_cpu / rounds, 2)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tree", type=Path, help="large tree; default: 80 MB of small files, made here")
    parser.add_argument("--only", default="", help="only backends whose names begin so, shown and not written")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()

    result: dict[str, object] = {
        "machine": {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()},
        "load_before": os.getloadavg(),
        "backends": {},
    }
    scratch = Path(tempfile.mkdtemp(prefix="sandbox-speed-"))
    try:
        large = arguments.tree or make_tree(scratch / "large", 80)
        print(
            f"{'backend':30} {'snapshot':>10} {'fork':>10} {'1st step':>10} {'step':>10} {'p95 snap':>10} {'200 forks':>10}"
        )
        for name, make, action in worlds(scratch, large):
            if not name.startswith(arguments.only):
                continue
            try:
                sandbox, end = make()
            except SandboxError as error:
                print(f"{name:30} not here: {error}")
                continue
            try:
                row = measure(sandbox, action, arguments.rounds)
            finally:
                end()
            result["backends"][name] = row
            print(
                f"{name:30} {row['snapshot']['median_ms']:10.3f} {row['fork']['median_ms']:10.3f} "
                f"{row['first step of a fork']['median_ms']:10.3f} {row['step']['median_ms']:10.3f} "
                f"{row['snapshot']['p95_ms']:10.3f} {row['200_forks_ms']:10.1f}",
                flush=True,
            )
        if arguments.only:
            return
        result["commands"] = commands(arguments.rounds)
    finally:
        shutil.rmtree(scratch)
    result["load_after"] = os.getloadavg()
    print(json.dumps({key: result[key] for key in ("commands", "load_before", "load_after")}, indent=1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
