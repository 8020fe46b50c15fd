"""Every causal language model that the installed transformers can build small is computed right, or refused by name."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks/model_families.py"), run_name="model_families"))
REFUSED = {
    "gemma2": "caps its attention's logits",
    "gpt_oss": "attention sinks",
    "qwen3_next": "linear_attention",
    "mamba": "mamba",
    "llama4_text": "chunked_attention",
    "bart": "counts positions by itself",
    "bert": "sees the tokens after",
    "falcon": "0 modules of causal self-attention",
    "stablelm": "does more than attend",
}
"""One family of each kind that isn't computed, and what its refusal says."""
RIGHT = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "mistral", "gemma3_text", "gemma4_text", "deepseek_v3", "gpt2",
         "phi3", "olmo3", "glm4_moe", "smollm3", "granite")  # fmt: skip
"""Families that must stay right in every use."""


@pytest.mark.parametrize("family", FAMILIES.FAMILIES)
def test_a_family_is_computed_right_or_refused_by_name(family):
    result = FAMILIES.family_result(family)
    if "left_out" in result:
        assert family not in RIGHT
        pytest.skip(result["left_out"])
    for check, found in result.items():
        if isinstance(found, str):
            assert found.startswith("refused: ") and family not in RIGHT
            assert "another model" in found or check == "readout"
        else:
            assert found < FAMILIES.TOLERANCE, f"{check} is off by {found}"
    if family in REFUSED:
        assert REFUSED[family] in result["packed"]


def test_the_committed_table_says_what_this_test_says():
    table = json.loads((ROOT / "benchmarks/results/model_families.json").read_text())
    assert table["wrong"] == [] and set(RIGHT) <= set(table["table"])
    assert not any(isinstance(found, str) for family in RIGHT for found in table["table"][family].values())
