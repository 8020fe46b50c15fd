"""``benchmarks/gpu/run.sh`` runs where torch and transformers are all there is; here on a CPU with tiny shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ABSENT = ("verl", "ray", "vllm", "tensordict", "hydra", "omegaconf", "flash_attn", "peft", "torchdata")


def test_it_needs_torch_and_transformers_only_and_writes_every_part(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    # Importing one of them raises ImportError.
    (blocked / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n")
    out = tmp_path / "out"
    environment = {
        **os.environ,
        "PYTHONPATH": str(blocked),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    environment |= {"MODELS": "tiny", "DEVICE": "cpu", "OUT": str(out), "REPEATS": "1"}
    command = ["bash", str(REPOSITORY / "benchmarks/gpu/run.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("exactness", "readout", "likelihood", "generator", "packed_tree")
    found = {name: json.loads((out / f"gpu_{name}_tiny.json").read_text()) for name in names}
    assert 0 < found["exactness"]["float32"]["packed:sdpa"] < 1e-5
    assert found["exactness"]["bfloat16"]["packed:sdpa"] < 2 * found["exactness"]["bfloat16"]["rows"]
    assert found["readout"]["turns"] > 1
    assert found["likelihood"]["difference"] < 1e-5
    assert found["generator"]["tokens_per_s"] > 0
    assert not found["packed_tree"]["shapes"]["tiny"]["failed"]
