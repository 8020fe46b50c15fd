"""A progress bar over a training run's log: environment steps taken, success so far."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

from tqdm import tqdm


def alive(pid: int) -> bool:
    """Whether the process runs (a finished child that nobody has waited for counts as dead)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--env-steps", type=int, required=True, help="environment steps at which the run ends")
    parser.add_argument("--pid", type=int, required=True, help="the trainer's process")
    parser.add_argument("--name", required=True)
    arguments = parser.parse_args()
    begun, seen, valid = time.time(), 0, "-"
    with tqdm(total=arguments.env_steps, desc=f"{arguments.name} (starting)", unit="env step") as bar:
        running = True
        while running:
            running = alive(arguments.pid)
            fresh = arguments.log.exists() and arguments.log.stat().st_mtime >= begun
            lines = arguments.log.read_text().splitlines() if fresh else []
            for line in lines[seen:]:
                try:
                    step = json.loads(line)
                except json.JSONDecodeError:
                    break
                seen += 1
                data = step["data"]
                valid = next((f"{v:.0%}" for k, v in data.items() if "/success/mean@" in k), valid)
                bar.set_description(f"{arguments.name} step {step['step']}", refresh=False)
                bar.set_postfix(train=f"{data.get('tree/success', 0):.0%}", valid=valid, refresh=False)
                bar.n = int(data.get("compute/env_steps", 0))
                bar.refresh()
            time.sleep(1.0 if running else 0.0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
