"""BPO in one file: it runs by itself, and it learns."""

import runpy
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "recipes/minimal/bpo.py"


def test_one_command_prints_a_table_and_draws_the_curves(tmp_path):
    command = [sys.executable, str(FILE), "--env-steps", "400", "--games", "4", "--out", str(tmp_path / "curves.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["environment", "steps", "BPO", "RLOO"]
    assert [row.split()[0] for row in rows] == [str(50 * part) for part in range(1, 9)]
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_bpo_learns_to_win_more_than_chance_does():
    """Chance is 1 - (8/9)^3 = 0.30."""
    bpo = runpy.run_path(str(FILE))
    curve = bpo["train"](bpo["Args"](env_steps=8000), bpo["Branching"](selector=bpo["Threshold"]()))
    late = [won for steps, won in curve if steps > 6000]
    assert sum(late) / len(late) > 0.45
