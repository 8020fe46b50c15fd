"""Metrics that are ours."""

from verl_bpo.trainer.metrics import success_by_type


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
