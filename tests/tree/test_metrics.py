"""Metrics that are ours."""

import pytest
import torch

from verl_bpo.tree.forest import Forest
from verl_bpo.tree.metrics import blind_entropy, lost_shares, success_by_type, tree_metrics, without_lost
from verl_bpo.tree.topology import Failure, Trajectory, Tree


def test_success_is_counted_for_each_type_of_task_and_each_split():
    infos = {
        "task_type": ["heat", "heat", "cool", "heat", None, "cool"],
        "success": [1.0, 0.0, 1.0, 1.0, 1.0, None],
        "reward": [1.0] * 6,
    }
    metrics = success_by_type(["seen", "seen", "seen", "unseen", "seen", "seen"], infos)
    assert metrics == {
        "val-type/seen/heat/success": 0.5,
        "val-type/seen/heat/episodes": 2.0,
        "val-type/seen/cool/success": 1.0,
        "val-type/seen/cool/episodes": 1.0,
        "val-type/unseen/heat/success": 1.0,
        "val-type/unseen/heat/episodes": 1.0,
    }


def test_environments_without_types_add_nothing():
    assert success_by_type(["a"], {"success": [1.0]}) == {}


@pytest.mark.parametrize(
    "scores, blind",
    [
        ([0.01] * 99 + [3.0], True),
        ([0.01] * 90 + [3.0] * 10, False),
        ([float("nan")] * 50 + [0.5] * 50, False),
        ([float("nan")] * 50, False),
        ([], False),
    ],
)
def test_entropies_that_tell_nothing_apart_are_noticed(scores, blind):
    assert blind_entropy(torch.tensor(scores, dtype=torch.float64)) is blind


def test_the_lost_share_is_told_by_cause_and_a_tree_that_was_lost_whole_counts_whole():
    half = Tree([], trajectories=[Trajectory(end="failed"), Trajectory()], failures=[Failure("SandboxCrashed", "x", 0)])
    whole = Tree([], failures=[Failure("KeyError", "x")])
    late = Tree([], trajectories=[Trajectory(end="failed")], failures=[Failure("SandboxTimeout", "x", 0)])
    trees = [half, whole, late, Tree([], trajectories=[Trajectory()])]
    assert lost_shares(trees) == {"other": 0.25, "hang": 0.25, "crash": 0.125}
    metrics = tree_metrics(Forest.of({str(i): tree for i, tree in enumerate(trees)}, {str(i): "p" for i in range(4)}))
    assert metrics["tree/lost_share"] == 0.625 and metrics["tree/lost_share/crash"] == 0.125
    assert metrics["tree/lost_share/task"] == 0.0


def test_prompts_that_lost_an_episode_stay_in_the_means():
    """verl alone gives mean@2 of 0 here, over the one prompt that lost none, and 1 under another name."""
    metrics = {
        "val-core/s/reward/mean@2": 0.0,
        "val-aux/s/reward/mean@1": 1.0,
        "val-aux/s/success/mean@1": 1.0,
        "val-aux/s/success/mean@2": 0.0,
        "val-aux/s/success/best@2/mean": 0.0,
    }
    infos = {"reward": [0.0, 0.0, 1.0], "success": [0.0, 0.0, 1.0], "task_type": ["a", "a", "b"]}
    assert without_lost(metrics, ["s"] * 3, ["p", "p", "q"], infos, episodes=2) == {
        "val-core/s/reward/mean@2": 0.5,
        "val-aux/s/success/mean@2": 0.5,
        "val-aux/s/success/best@2/mean": 0.0,
    }
