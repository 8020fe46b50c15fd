"""What users get wrong, through the real trainer: survived and counted, or one line that says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_training import LETTERS, QUICKSTART, REPOSITORY, train

from verl_bpo.commands.make_data import write_prompts


@pytest.fixture(scope="module")
def worlds(root) -> Path:
    for name in ("Uncopyable", "Dying"):
        write_prompts(f"{Path(__file__).with_name('bad_worlds.py')}:{name}", "train", root / f"{name}.parquet", limit=4)
    return root


def test_worlds_whose_process_dies_lose_their_branch_and_are_counted(worlds):
    """In Ray actors, placed by a resource; local worlds die in tests/sandbox, and live in the other runs here."""
    steps = train(
        worlds, "dying", *LETTERS, "data.train_files=${root}/Dying.parquet",
        "trainer.total_training_steps=2", "bpo.env.placement.where=ray", "bpo.env.placement.resources={sandbox:1}",
        "bpo.env.placement.num_cpus=0", "bpo.env.placement.worlds=4", "+ray_kwargs.ray_init.resources={sandbox:2}",
    )  # fmt: skip
    assert sum(metrics["tree/failed_branches"] for metrics in steps) > 0
    assert sum(metrics["tree/recoveries"] for metrics in steps) > 0
    for metrics in steps:
        assert metrics["tree/leaves"] > 0 and metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.train_files=${root}/Uncopyable.parquet"], "bpo.env.backend=fork or replay"),
        (["data.max_prompt_length=8"], "more than data.max_prompt_length=8"),
    ],
)
def test_what_no_rollout_can_mend_ends_the_run_in_one_line(worlds, overrides, message):
    command = [
        sys.executable, "-m", "verl_bpo.commands.main", "train", *QUICKSTART, f"root={worlds}", *LETTERS,
        "bpo.branch.threshold=0.0", "bpo.env.max_turns=4",
        "data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.val_before_train=false",
        "trainer.total_training_steps=1", "trainer.logger=[console]", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=REPOSITORY, env={**os.environ})
    lines = [line for line in done.stderr.splitlines() if line.startswith("verl_bpo: ") and message in line]
    assert done.returncode != 0 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
