"""How a run ends before its time: told to, and when its rollout engine dies. No fakes."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from test_training import LETTERS, QUICKSTART, REPOSITORY

START, END = 300, 60
"""Seconds that a loaded machine may take to start a run, and to end it; an idle one takes 3 to 8 to end it."""


def processes(mark: str) -> dict[int, str]:
    """Those alive that were started with ``mark`` in their environment: number -> what Ray or the system calls it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:
            continue
    return found


@pytest.mark.parametrize("how", ["Ctrl-C", "its engine dies"])
def test_a_run_ends_with_one_line_and_leaves_nothing(root, tmp_path, how):
    """Ctrl-C is sent to a run that was started as bash starts what stands before ``&``: with Ctrl-C ignored."""
    log, mark = tmp_path / "log.jsonl", uuid.uuid4().hex
    command = [
        sys.executable, "-m", "verl_bpo.commands.main", "train", *QUICKSTART, f"root={root}", f"name=ends-{mark}", *LETTERS,
        "data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "bpo.env.max_turns=4",
    ]  # fmt: skip
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        run = subprocess.Popen(
            command, stdout=out, stderr=err, cwd=REPOSITORY, start_new_session=True,
            env={**os.environ, "VERL_FILE_LOGGER_PATH": str(log), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MARK": mark},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )  # fmt: skip
    begun = time.monotonic()
    while not (log.exists() and len(log.read_text().splitlines()) >= 2):
        assert run.poll() is None and time.monotonic() < begun + START, (tmp_path / "err").read_text()[-3000:]
        time.sleep(0.2)
    if how == "Ctrl-C":
        run.send_signal(signal.SIGINT)
    else:
        (engine,) = (number for number, name in processes(mark).items() if name.startswith("ray::TransformersServer"))
        os.kill(engine, signal.SIGKILL)
    told = time.monotonic()
    run.wait(timeout=END)
    print(f"{how}: ended after {time.monotonic() - told:.1f} s")
    while (left := processes(mark)) and time.monotonic() < told + END:
        time.sleep(0.1)
    assert not left, left
    said = (tmp_path / "err").read_text()
    lines = [line for line in said.splitlines() if line.startswith("verl_bpo: ")]
    assert run.returncode != 0 and len(lines) == 1 and "Traceback" not in said, said[-4000:]
    assert ("stopped by SIGINT" if how == "Ctrl-C" else "the rollout engine died") in lines[0]
