"""The examples of other people's environments: each can be won, and is played by the name that the script gives."""

import re
from pathlib import Path

import pytest

from verl_bpo.sandbox.loading import load_environment

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = (REPOSITORY / "recipes/adapters/run.sh").read_text()


@pytest.mark.parametrize("world, package", [("lake", "gymnasium"), ("guess", "textarena"), ("number", "openenv.core")])
def test_an_examples_expert_wins_within_the_turns_that_the_script_gives(world, package, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.chdir(REPOSITORY)
    case = re.search(rf"\n  {world}\)(.*?);;", SCRIPT, re.DOTALL)[1]
    settings = dict(re.findall(r"(\w+)=([^\s;()]+)", case))
    assert issubclass(load_environment(settings["expert"]), load_environment(settings["name"]).__mro__[1])
    expert = load_environment(settings["expert"])()
    turns, won = int(settings["turns"]), 0
    for task in range(20):
        expert.reset(str(task))
        way = expert.expert_actions()
        last = [expert.step(action) for action in way[:turns]][-1]
        won += last.terminated and last.reward == 1.0
    assert won == 20 if world == "lake" else won >= 15  # halving finds most numbers in so many guesses


def test_another_lake_lies_behind_every_seed():
    pytest.importorskip("gymnasium")
    lakes = load_environment(f"gymnasium:{REPOSITORY}/recipes/adapters/lakes.py:Lakes-v0")()
    seen = {lakes.reset(str(seed)).text for seed in range(8)}
    assert len(seen) > 5 and lakes.reset("3").text == lakes.reset("3").text
