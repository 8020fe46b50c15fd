"""Recipes in their smoke mode: the very same scripts, with the real trainer."""

import json
import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def smoke(recipe: str, folder: Path, *overrides: str, **environment: str) -> list[dict]:
    """Run a recipe as a user does; returns the metrics of every step."""
    log = folder / "metrics.jsonl"
    settings = {"SMOKE": "1", "DATA": str(folder / "data"), "VERL_FILE_LOGGER_PATH": str(log), **environment}
    done = subprocess.run(
        ["bash", f"{REPOSITORY}/recipes/{recipe}", f"trainer.default_local_dir={folder}/checkpoints", *overrides],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def test_bpo_on_alfworld(tmp_path):
    pytest.importorskip("alfworld")
    steps = smoke("bpo/alfworld/run_qwen2.5_1.5b.sh", tmp_path, "bpo.branch.threshold=0.1", "bpo.budget.limit=4")
    assert len(steps) == 2 and steps[-1]["compute/updates"] == 2
    assert all(step["tree/leaves"] == 4 for step in steps)
    assert any(key.startswith("val-type/alfworld_generated_valid_seen/") for key in steps[-1])
    assert any(key.startswith("val-core/alfworld_generated_valid_unseen/") for key in steps[-1])


@pytest.mark.data
def test_sapo_on_webshop(tmp_path, benchmark_data):
    pytest.importorskip("bm25s")
    shop = tmp_path / "shop"
    shop.mkdir()
    names = {"items_shuffle_1000.rebuilt.json": "items_shuffle_1000.json"}
    for name in ("items_shuffle_1000.rebuilt.json", "items_ins_v2_1000.json"):
        (shop / names.get(name, name)).symlink_to(benchmark_data / "webshop" / name)
    steps = smoke("sapo/webshop/run_qwen2.5_1.5b.sh", tmp_path, WEBSHOP_DATA=str(shop))
    assert len(steps) == 2 and all(step["tree/leaves"] == 1 for step in steps)
    assert any(key.startswith("val-core/webshop/reward") for key in steps[-1])
