"""TRL beside verl: only one that has the value head counts."""

import subprocess
import sys
from pathlib import Path

import pytest

ASK = "import verl, verl.utils.import_utils as utils; print(utils.is_trl_available())"


@pytest.mark.parametrize("source, counts", [("", False), ("AutoModelForCausalLMWithValueHead = object", True)])
def test_a_trl_without_the_value_head_does_not_count_as_one(tmp_path: Path, source, counts):
    """Release 1.16 has none. Without the plugin the first case says True, and each engine ends in an ImportError."""
    (tmp_path / "trl.py").write_text(source)
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {ASK}"],
        capture_output=True,
        text=True,
    )
    assert found.stdout.split()[-1] == str(counts), found.stderr
