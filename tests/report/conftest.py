"""Fixtures of the report tests."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_run

from verl_bpo.report.cli import add_report


@pytest.fixture(scope="session")
def dump(tmp_path_factory) -> Path:
    """The dump of a small made-up run: 3 steps, 3 prompts and 4 trees each."""
    return fake_run.write_dump(tmp_path_factory.mktemp("run") / "dump", fake_run.small_steps())


@pytest.fixture
def report():
    """``report("trees", ...)``: run a command as the command line does, returning its exit code."""

    def run(*arguments: object) -> int:
        top = argparse.ArgumentParser()
        add_report(top.add_subparsers())
        parsed = top.parse_args(["report", *map(str, arguments)])
        return parsed.run(parsed)

    return run
