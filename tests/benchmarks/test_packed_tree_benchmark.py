"""``benchmarks/packed_tree.py`` runs where torch and transformers are all there is."""

import json
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "benchmarks/packed_tree.py"
ABSENT = ("verl", "ray", "tensordict", "hydra", "omegaconf", "flash_attn", "peft", "torchdata")
ALONE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))  # importing one of them raises ImportError
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_it_needs_torch_and_transformers_only(tmp_path):
    command = [sys.executable, "-c", ALONE, str(FILE), "--model", "tiny", "--device", "cpu", "--repeats", "1"]
    command += ["--chunk", "20", "--checkpointing", "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())["shapes"]["tiny"]
    assert found["unique_tokens"] < found["total_tokens"] and not found["failed"]
    for key in ("time_ratio", "memory_ratio", "gradient_difference"):
        assert list(found[key]) == ["padded", "rows", "packed", "chunked"]
    assert max(found["gradient_difference"].values()) < 1e-4
    assert all(line.split()[0] == "tiny" for line in done.stdout.splitlines()[1:])
