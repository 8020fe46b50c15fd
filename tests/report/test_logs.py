"""Reading logs that verl's own loggers wrote, and the runner's folders."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from verl_bpo.report.logs import find_logs, read_run

SUCCESS = "val-core/textworld/success/mean@1"
STEPS = 80
WRITE = """
import sys
from verl.utils.tracking import Tracking
log = Tracking("project", "run", default_backend=[sys.argv[1]], config={"trainer": {}})
for step in range(int(sys.argv[2])):
    values = {f"metric/{i}": float(i * step) for i in range(40)}
    log.log({**values, **({"val-core/textworld/success/mean@1": step / 100} if step % 10 == 0 else {})}, step)
log.finish()
"""


def written_by_verl(logger, folder):
    """Let verl's logger write ``STEPS`` steps in a process of its own."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "WANDB_MODE": "offline",
        "TENSORBOARD_DIR": f"{folder}/tb",
    }
    done = subprocess.run(
        [sys.executable, "-c", WRITE, logger, str(STEPS)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def check(folder):
    (log,) = find_logs(folder)
    assert log.frame.index.tolist() == list(range(STEPS))
    assert log.frame["metric/39"].tolist() == pytest.approx([39 * s for s in range(STEPS)])
    assert log.frame[SUCCESS].dropna().tolist() == pytest.approx([s / 100 for s in range(0, STEPS, 10)])


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_runs_are_read_over_block_boundaries(tmp_path):
    folder = written_by_verl("wandb", tmp_path)
    (file,) = folder.rglob("*.wandb")
    assert file.stat().st_size > 2 * 32768
    check(folder)
    file.write_bytes(file.read_bytes()[:40000])  # a run that was killed
    (log,) = find_logs(file)
    assert 0 < len(log.frame) < STEPS


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_runs_are_read(tmp_path):
    check(written_by_verl("tensorboard", tmp_path))


def test_verls_files_are_read(tmp_path):
    folder = written_by_verl("file", tmp_path)
    check(folder / "project/run.jsonl")


def write_attempt(folder, number, steps, value):
    lines = [{"step": s, "data": {"compute/env_steps": 10 * s, "value": value}} for s in steps]
    (folder / f"metrics-{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_resumed_attempt_takes_over_from_its_checkpoint(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"method": "BPO", "attempts": [], "done": True}))
    write_attempt(tmp_path, 1, range(1, 8), 1.0)
    (tmp_path / "metrics-2.jsonl").write_text("")  # ended before its first step
    lines = [{"step": 5, "data": {SUCCESS: 0.5}}, {"step": 6, "data": {"compute/env_steps": 61, "value": 2.0}}]
    (tmp_path / "metrics-3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    frame = read_run(tmp_path).frame
    assert frame.index.tolist() == [1, 2, 3, 4, 5, 6]
    assert frame["value"].tolist() == [1, 1, 1, 1, 1, 2] and frame.loc[5, SUCCESS] == 0.5
    assert frame.loc[6, "compute/env_steps"] == 61


def test_a_folder_of_runs_gives_all_that_logged_something(tmp_path):
    for seed in range(3):
        folder = tmp_path / "world/model/bpo" / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"method": "BPO", "seed": seed}))
        if seed:
            write_attempt(folder, 1, range(3), 0.0)
    assert [log.record["seed"] for log in find_logs(tmp_path)] == [1, 2]


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_logs(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="holds no run: neither run.json"):
        find_logs(tmp_path)
    (tmp_path / "x.wandb").write_bytes(b"something else")
    if find_spec("wandb"):
        with pytest.raises(ValueError, match="no W&B run file"):
            find_logs(tmp_path / "x.wandb")
