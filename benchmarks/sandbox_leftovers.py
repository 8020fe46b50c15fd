"""20,000 snapshots and forks of each backend, and whether anything of them is left: while the world is open, and afterwards.

Worlds live in a pool's worker process, as in a rollout. What is counted is this program's alone, whatever else the machine
does: processes that it started (found by a mark in their environment, wherever they were moved to), mounts and open files
of them all (in the machine's own mount namespace: those below its folder), its control groups, and what lies in its temporary
folder.

    python benchmarks/sandbox_leftovers.py [--forks 20000] [--backends memory,fork,overlay,git]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from verl_bpo.sandbox import SandboxError, SandboxPool
from verl_bpo.sandbox.scratch import Scratch

HERE = Path(__file__)
RESULT = HERE.with_name("results") / "sandbox_leftovers.json"
WORLDS = HERE.with_name("sandbox_speed.py")
BACKENDS = {
    "memory": ("Saving", {}, "memory", 1),
    "memory-copy": ("Heap", {"megabytes": 1}, "memory", 1),
    "fork": ("Heap", {"megabytes": 1}, "fork", 1),
    "overlay": ("ShellWorld", {"files": "overlay"}, "memory", 50),
    "git": ("ShellWorld", {"files": "git"}, "memory", 50),
}
"""World, its arguments, backend, and every how many forks one acts and is snapshot and forked itself."""


class Account:
    """What this program holds of the machine. Give it the mark that its children carry in their environment."""

    def __init__(self, mark: str, folder: Path) -> None:
        self.mark, self.folder = mark.encode(), folder
        self.seen: set[str] = set()
        """Every process found so far, since control groups are named after them."""

    def family(self) -> list[str]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if self.mark in Path(f"/proc/{pid}/environ").read_bytes() and int(pid) != os.getpid():
                    found.append(pid)
        self.seen.update(found)
        return found

    def __call__(self) -> dict[str, int]:
        processes = self.family()
        mounts, handles, memory, ours = {}, 0, 0, os.readlink("/proc/self/ns/mnt")
        for pid in [str(os.getpid()), *processes]:
            with suppress(OSError):
                namespace, table = os.readlink(f"/proc/{pid}/ns/mnt"), Path(f"/proc/{pid}/mountinfo").read_text()
                mounts[namespace] = table.count("\n" if namespace != ours else str(self.folder))
                handles += len(os.listdir(f"/proc/{pid}/fd"))
                fields = dict(
                    line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
                )
                memory += int(fields["Pss"].split()[0])
        groups = Path("/sys/fs/cgroup").glob("**/verl-bpo-*")
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {
            "processes": len(processes),
            "mounts": sum(mounts.values()),
            "open_files": handles,
            "control_groups": sum(group.name.removeprefix("verl-bpo-") in self.seen for group in groups),
            "temporary_folders": len(list(self.folder.iterdir())),
            "disk_kb": sum(path.stat().st_size for path in files) >> 10,
            "memory_mb": memory >> 10,
        }


@contextmanager
def marked() -> Iterator[Account]:
    """A temporary folder and a mark of this program's own."""
    mark = f"/leftovers-{uuid4().hex}"
    before = dict(os.environ)
    folder = Path(tempfile.mkdtemp(prefix="leftovers-"))
    os.environ |= {"PATH": f"{os.environ['PATH']}:{mark}", "TMPDIR": str(folder)}  # all that a shell's keeper is given
    tempfile.tempdir = None
    try:
        yield Account(mark, folder)
    finally:
        os.environ.clear()
        os.environ |= before
        tempfile.tempdir = None
        shutil.rmtree(folder)


def settled(account: Account, expected: dict[str, int]) -> dict[str, int]:
    """The account once what was told to end has ended, or after ten seconds."""
    deadline = time.monotonic() + 10
    while (now := account())["processes"] > expected["processes"] and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def run(name: str, forks: int, base: Path, account: Account, say: Callable[[str], None]) -> dict[str, object]:
    """One backend's row: the account before, early, late and after."""
    world, kwargs, backend, every = BACKENDS[name]
    if world == "ShellWorld":
        kwargs = {"base": str(base), **kwargs}
    action = "echo x >> d0/f0.py" if world == "ShellWorld" else "a"
    Scratch("first").close()  # looks for what dead processes left
    before, started, early = account(), time.perf_counter(), {}
    with SandboxPool(f"{WORLDS}:{world}", kwargs, backend=backend) as pool, pool.open() as host:
        trunk, _ = host.reset("task")
        trunk.step(action)
        for number in range(1, forks + 1):
            snapshot = trunk.snapshot()
            (fork,) = snapshot.fork()
            if isinstance(fork, Exception):
                raise fork
            if number % every == 0:
                fork.step(action)
                inner = fork.snapshot()
                (nested,) = inner.fork()
                nested.step(action)
                nested.close()
                inner.release()
            fork.close()
            snapshot.release()
            if number == min(200, forks // 2):
                trunk.step(action)  # what was closed goes with the next call
                early = account()
            if number % 1000 == 0:
                say(f"{name}: {number} forks, {time.perf_counter() - started:.0f} s")
        trunk.step(action)
        late, recoveries = settled(account, early), host.recoveries
    after = settled(account, before)
    return {
        "forks": forks,
        "acting_and_forked_again": forks // every,
        "worlds_lost": recoveries,
        "grown_while_open": {key: late[key] - early[key] for key in early},
        "left_afterwards": {key: after[key] - before[key] for key in before},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forks", type=int, default=20_000)
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"of {', '.join(BACKENDS)}")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    from sandbox_speed import make_tree

    machine = {"python": platform.python_version(), "system": platform.platform()}
    rows = json.loads(arguments.out.read_text())["backends"] if arguments.out.exists() else {}
    clean = True
    for name in arguments.backends.split(","):
        with marked() as account:
            base = make_tree(account.folder / "tree", 1)
            try:
                row = run(name, arguments.forks, base, account, lambda text: print(text, file=sys.stderr, flush=True))
            except SandboxError as error:
                print(f"{name}: not here: {error}")
                continue
        rows[name] = row
        arguments.out.write_text(json.dumps({"machine": machine, "backends": rows}, indent=2) + "\n")
        left = {key: count for key, count in row["left_afterwards"].items() if count and key != "memory_mb"}
        clean = clean and not left
        print(
            f"{name}: {row['forks']} forks; grown while open {row['grown_while_open']}; left afterwards {left or 'nothing'}"
        )
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
