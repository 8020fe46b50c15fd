"""Fixtures of the report tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_run

from verl_bpo.commands.main import parse


@pytest.fixture(scope="session")
def dump(tmp_path_factory) -> Path:
    """The dump of a small made-up run: 3 steps, 3 prompts and 4 trees each."""
    return fake_run.write_dump(tmp_path_factory.mktemp("run") / "dump", fake_run.small_steps())


@pytest.fixture
def report():
    """``report("trees", ...)``: run a command as the command line does, returning its exit code."""

    def run(*arguments: object) -> int:
        command, parsed = parse(["report", *map(str, arguments)])
        return command.main(parsed)

    return run
