"""The example of a class with tools: a tiny policy is taught the form of calls, and plays through the rollouts of training."""

import asyncio
import runpy
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_bpo.config.schema import build
from verl_bpo.generation.local import LocalRollouts
from verl_bpo.generation.play import Play
from verl_bpo.generation.prompts import Task
from verl_bpo.integration.tool_parsers import find_parser
from verl_bpo.tree.rows import tree_rows

ROOT = Path(__file__).parents[2]
CUPS = f"trl:{ROOT / 'recipes' / 'extend' / 'cups.py'}:Cups"


def test_a_policy_taught_the_form_calls_tools_in_a_tree(tmp_path, monkeypatch):
    out = tmp_path / "policy"
    script = ROOT / "recipes" / "extend" / "teach_calls.py"
    monkeypatch.setattr(sys, "argv", [str(script), CUPS, str(out), "--episodes", "60", "--steps", "50"])
    runpy.run_path(str(script), run_name="__main__")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    settings = {
        "env": {"name": CUPS, "max_turns": 3, "max_action_tokens": 64, "workers": 1},
        "prompt": {"template": "tools"},
        "branch": {"selector": "every", "forks": 2, "entropy_tokens": "open"},
        "budget": {"unit": "leaves", "limit": 4, "fill": "none"},
    }
    config = build(settings, "paper_threshold")
    with LocalRollouts(model, tokenizer, config, Play(config), find_parser=find_parser) as rollouts:
        tree = asyncio.run(rollouts.tree(Task(CUPS, "train-0", 0), "0"))
    assert tree.counters["failed"] == 0
    assert tree.counters["leaves"] > 1
    called = [node for node in tree.nodes if node.action_text.startswith("lift(")]
    assert called
    assert any(node.observation_text.startswith(("A coin.", "Nothing.")) for node in called)
    for row in tree_rows(tree):  # what was sampled stands in the rows as it was sampled
        for number, start, end in zip(row.spans.nodes, row.spans.starts, row.spans.ends):
            assert row.response_ids[start:end] == tree.nodes[number].action_ids
