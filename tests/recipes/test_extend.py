"""The documentation's own selector and own estimator, as a run would name them."""

from pathlib import Path

import pytest
import torch

from verl_bpo.config.schema import build, find_estimator
from verl_bpo.options import ConfigError
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.selectors import DecisionPoint
from verl_bpo.tree.topology import Node, Tree

EXTEND = Path(__file__).resolve().parents[2] / "recipes/extend"


def test_the_pages_selector_branches_late():
    config = build({"branch": {"selector": f"{EXTEND}/late.py:Late", "after": 2}}, "paper")
    seen = [DecisionPoint(depth=d, entropy=0.0, value=None, chance=c) for d, c in ((1, 0.1), (2, 0.1), (2, 0.9))]
    assert [config.branch.selector.chooses(point) for point in seen] == [False, True, False]
    assert build(config.model_dump(), "plain") == config  # as a worker reads it


def test_the_pages_estimator_compares_with_its_prompt():
    tree = Tree(prompt_ids=[1])
    for reward in (1.0, 0.0):
        trajectory = tree.add_trajectory()
        tree.add_node(Node(-1, trajectory, [5], [-1.0], [0.5], reward=reward))
        tree.trajectories[trajectory].end = "terminated"
    name = f"{EXTEND}/prompt_mean.py:PromptMean"
    estimator = find_estimator(build({"estimator": {"scale": 2.0}}, "plain"), name)
    estimate = estimator(Forest.of({"p_0": tree}, {"p_0": "p"}))
    assert estimate.advantage.tolist() == [1.0, -1.0] and estimate.valid.all()
    assert torch.equal(estimate.weight, torch.ones(2, dtype=torch.float64))
    with pytest.raises(ConfigError, match="unknown key bpo.estimator.scales; known here: scale"):
        find_estimator(build({"estimator": {"scales": 2.0}}, "plain"), name)


def test_an_estimator_that_is_not_there_is_named_and_verls_own_stay_verls():
    assert find_estimator(build({}, "plain"), "grpo") is None
    with pytest.raises(ConfigError, match="algorithm.adv_estimator: .*no file nowhere.py"):
        find_estimator(build({}, "plain"), "nowhere.py:Mine")
