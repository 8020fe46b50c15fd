"""What a fork of a large process costs with its memory in pages of 4 kB, and gathered in pages of 2 MB.

    python benchmarks/fork_pages.py

Bare forks of processes of 200 MB, with and without what the ``fork`` backend does, in turn; CPU time. Prints a table and
writes ``benchmarks/results/fork_pages.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

from verl_bpo.sandbox.fork import _use_huge_pages

RESULT = Path(__file__).with_name("results") / "fork_pages.json"
HEAPS = {
    "200 blocks of 1 MB": lambda: [bytearray(os.urandom(1 << 20)) for _ in range(200)],
    "450,000 dictionaries": lambda: [{"name": f"thing {i}", "at": i} for i in range(450_000)],
}
WRITES = 200


def forks(heap: str, gathered: bool, count: int) -> dict[str, float]:
    """Milliseconds of CPU: of gathering, of a fork (in the parent), and of writes all over the heap (in the child)."""
    things: list[Any] = HEAPS[heap]()
    start = time.process_time()
    if gathered:
        _use_huge_pages()
    gathering = time.process_time() - start
    times, writes = [], []
    for _ in range(count):
        reader, writer = os.pipe()
        start = time.process_time()
        child = os.fork()
        if child == 0:
            start = time.process_time()
            for thing in things[:: len(things) // WRITES]:
                thing["at" if isinstance(thing, dict) else 0] = 1
            os.write(writer, str(time.process_time() - start).encode())
            os._exit(0)
        times.append(time.process_time() - start)
        writes.append(float(os.read(reader, 64)))
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    found = {"gathering": gathering, "fork": statistics.median(times), "writes": statistics.median(writes)}
    return {name: round(1e3 * value, 2) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="forks a process")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    print(f"{'memory':24}{'pages':>8}{'fork ms':>10}{'gathering':>11}{'writes':>9}")
    for _ in range(arguments.repeats):
        for heap in HEAPS:
            for gathered in (False, True):
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    found = pool.apply(forks, (heap, gathered, arguments.count))
                pages = "2 MB" if gathered else "4 kB"
                rows.append({"heap": heap, "pages": pages, **found})
                print(
                    f"{heap:24}{pages:>8}{found['fork']:10.2f}{found['gathering']:11.1f}{found['writes']:9.2f}",
                    flush=True,
                )
    RESULT.write_text(json.dumps({"count": arguments.count, "cpu_ms": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
