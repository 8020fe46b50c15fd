"""Metrics that are ours."""

import pytest
import torch

from verl_bpo.tree.metrics import blind_entropy, success_by_type


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
