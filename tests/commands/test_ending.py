"""Ctrl-C and SIGTERM end what was started, with one line."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from recipes.imitation.policy import make_model, make_tokenizer
from verl_bpo.integration import deaths

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT = 60
"""Seconds that a loaded machine may take; the command gives itself ``ending.SECONDS``."""

HANGS = """
import pathlib, subprocess, time
from verl_bpo.sandbox import Environment, Observation
class Hangs(Environment):
    def __init__(self, mark): self.mark = mark
    def reset(self, task, seed=0): return Observation("x")
    def step(self, action):
        subprocess.Popen(["sleep", "600"])
        pathlib.Path(self.mark).touch()
        time.sleep(600)
"""


def of_mark(mark: str) -> list[int]:
    """Processes that were started with ``mark`` in their environment, and live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                mark.encode() in (folder / "environ").read_bytes()
                and "Z" not in (folder / "stat").read_text().split()[2]
            ):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def gone(mark: str) -> bool:
    """Whether none is left, now or once the kernel has taken them away."""
    end = time.monotonic() + LIMIT
    while (left := of_mark(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return not left


def until(there: Path, process: subprocess.Popen) -> None:
    end = time.monotonic() + 4 * LIMIT
    while not there.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_evaluation_whose_world_hangs_ends_with_one_line_and_leaves_nothing(tmp_path, number):
    """Started as bash starts what stands before ``&``: with Ctrl-C ignored."""
    tokenizer = make_tokenizer(["guess 1 guess 2"], 300)
    torch.manual_seed(0)
    model = make_model(tokenizer, hidden_size=16, layers=1, heads=2)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "panel.jsonl").write_text(
        '{"extra_info": {"env": "%s/hangs.py:Hangs", "task": "a", "seed": 0}}\n' % tmp_path  # noqa: UP031
    )
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_bpo.commands.main", "eval", tmp_path / "model", "--panel", tmp_path / "panel.jsonl",
         "--out", tmp_path / "out", "bpo.prompt.template=bare", f"+bpo.env.kwargs.mark={tmp_path}/stepped"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "MARK": mark}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    until(tmp_path / "stepped", process)
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT)
    lines = [line for line in said.splitlines() if line.startswith("verl-bpo eval: ")]
    assert process.returncode == 128 + number and "Traceback" not in said, said
    assert lines == [f"verl-bpo eval: stopped by {number.name}: the same command goes on from here"]
    assert gone(mark)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_quickstart_ends_what_it_trains(tmp_path, number):
    """Its script, with commands that stand for its own: a trainer that would run on, and nothing else to do."""
    for name in ("recipes/quickstart/run.sh", "recipes/quickstart/progress.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "recipes/venv.sh").write_text("ensure_venv() { :; }\n")
    (tmp_path / "recipes/imitation").mkdir()
    (tmp_path / "recipes/imitation/train.py").write_text("")
    fakes = tmp_path / "bin"
    fakes.mkdir()
    (fakes / "verl-bpo").write_text(
        f'#!/bin/bash\n[ "$1" = train ] || exit 0\ntouch {tmp_path}/training\nexec sleep 600\n'
    )
    # Not a link, by which some Pythons don't find the virtual environment that they belong to.
    (fakes / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    for name in ("verl-bpo", "python"):
        (fakes / name).chmod(0o755)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        ["bash", "recipes/quickstart/run.sh"], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "MARK": mark, "PATH": f"{fakes}:{os.environ['PATH']}", "ROOT": str(tmp_path / "runs")},
        start_new_session=True,
    )  # fmt: skip
    (tmp_path / "runs").mkdir()
    until(tmp_path / "training", process)
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 130 and gone(mark)
    assert said.splitlines()[-1] == "stopped: the same command goes on from here" and "Traceback" not in said


def test_a_process_that_cleans_up_for_ever_ends_all_the_same():
    code = (
        "import time\nfrom verl_bpo import ending\nending.SECONDS = 0.5\nwith ending.ends_on_signals('x'):\n"
        "  try:\n    print('ready', flush=True)\n    time.sleep(600)\n  finally:\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM and said.strip() == (
        "x: stopped by SIGTERM: the same command goes on from here"
    )


def test_what_ray_says_of_a_death_and_of_a_full_disk_is_one_line():
    import errno

    from ray.exceptions import RayActorError, RayTaskError

    died = RayActorError(
        error_msg="The actor died unexpectedly before finishing this task.\n\tclass_name: TransformersServer\n\tactor_id: 1\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker unexpectedly exits with a connection error code 2."
    )
    line = deaths.told(died)
    assert line.startswith("the rollout engine died (") and "connection error code 2" in line and "\n" not in line
    full = OSError(errno.ENOSPC, "No space left on device", "/data/x")
    assert deaths.told(RayTaskError("save", "...", full)) == (
        "the disk is full (/data/x): make room, then the same command goes on from the last checkpoint"
    )
    assert deaths.told(RayTaskError("step", "...", KeyError("x"))) is None
