"""Shared fixtures."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from four_products import HUMAN, INSTRUCTIONS, PRODUCTS

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


@pytest.fixture(scope="session")
def small_shop(tmp_path_factory):
    """A shop of four products."""
    folder = tmp_path_factory.mktemp("small_shop")
    (folder / "items_shuffle_1000.json").write_text(json.dumps(PRODUCTS))
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(INSTRUCTIONS))
    (folder / "items_human_ins.json").write_text(json.dumps(HUMAN))
    return folder


@pytest.fixture(autouse=True)
def same_environment_variables():
    """A run's preparation sets variables for its workers; the next test must not see them."""
    with patch.dict(os.environ):
        yield
