"""The soak script: that it finds nothing on a small scale, and that it would find what is left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import soak  # noqa: E402
from sandbox_leftovers import marked  # noqa: E402


def test_a_small_soak_leaves_nothing_and_says_what_it_did(tmp_path):
    out = tmp_path / "soak.json"
    arguments = ["--operations", "120", "--rows", "memory; fork", "--faults", "0.03", "--out", str(out)]
    assert soak.main(arguments) == 0
    result = json.loads(out.read_text())
    assert result["operations"] >= 120 and result["faults"] > 0 and result["left"] == {}
    assert set(result["rows"]) == {"memory", "fork"} and "webshop" in result["not_here"]


@pytest.mark.parametrize("what", ["processes", "open_files", "temporary_folders", "zombies", "threads"])
def test_what_is_left_is_counted(what):
    with marked() as account:
        census = soak.Census(account.mark.decode(), account.folder)
        before, kept = census(), []
        if what in ("processes", "zombies", "threads"):
            kept.append(subprocess.Popen(["sleep", "1000"]))
            if what == "zombies":
                kept[0].kill()
                os.waitid(os.P_PID, kept[0].pid, os.WEXITED | os.WNOWAIT)
        elif what == "open_files":
            kept.append(open("/dev/null"))  # noqa: SIM115 (it is what is left)
        else:
            (account.folder / "left").mkdir()
        try:
            assert soak.left_over(before, census())[what] == 1
        finally:
            for thing in kept:
                if isinstance(thing, subprocess.Popen):
                    thing.kill()
                    thing.wait()
                else:
                    thing.close()
