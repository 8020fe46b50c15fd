"""A resumed run's log file."""

import json

import pytest
import verl.utils.tracking as tracking

from verl_bpo.integration.tracking import go_on_after, keep_log


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "run.jsonl"))
    monkeypatch.setattr(tracking, "open", open, raising=False)
    keep_log(tracking)
    yield tmp_path / "run.jsonl"
    go_on_after(0)


def run(steps):
    logger = tracking.FileLogger("project", "run")
    for step in steps:
        logger.log({"loss": 1.0}, step)
    logger.finish()


def steps(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint(log):
    run([0, 1, 2, 3])
    log.write_text(log.read_text() + '{"step": 4, "da')  # it was killed
    go_on_after(2)
    run([3, 4])
    assert steps(log) == [0, 1, 2, 3, 4]
    assert log.with_name("run.jsonl.aside").read_text().count("\n") == 2


def test_a_run_that_begins_has_a_log_of_its_own(log):
    run([0, 1])
    go_on_after(0)
    run([0])
    assert steps(log) == [0]
