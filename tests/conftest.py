"""Shared fixtures."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def benchmark_data() -> Path:
    """Folder with real benchmark data, which isn't part of the repository."""
    folder = Path(os.environ.get("VERL_BPO_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no benchmark data at {folder}: set VERL_BPO_TEST_DATA")
    return folder


@pytest.fixture(autouse=True)
def same_environment_variables():
    """A run's preparation sets variables for its workers; the next test must not see them."""
    with patch.dict(os.environ):
        yield
