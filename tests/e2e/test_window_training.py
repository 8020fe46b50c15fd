"""``bpo.prompt.context=window`` through verl's trainer, with a learning branch selector and reference policies. No fakes."""

import json

import pytest
import torch
from test_training import (
    LETTERS,
    _plain,
    assert_same_policy_in_engine_and_trainer,
    assert_sampled_from,
    parameters,
    train,
)

WINDOW = (
    *(key for key in LETTERS if not key.startswith("bpo.branch.threshold")),
    "bpo.prompt.context=window",
    "bpo.prompt.window_turns=1",
)
QUANTILE = (
    *WINDOW, "bpo.preset=paper_threshold", "bpo.branch.selector=quantile", "bpo.branch.share=0.5", "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1", "trainer.total_training_steps=3", "trainer.save_freq=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def window_run(root) -> list[dict]:
    return train(root, "window", *QUANTILE, f"bpo.dump_dir={root}/window-dump")


def test_each_turn_of_a_tree_is_trained_as_a_row_of_its_own(root, window_run):
    assert len(window_run) == 3
    assert_same_policy_in_engine_and_trainer(window_run)
    for metrics in window_run:
        assert metrics["tree/leaves"] == 6 and metrics["tree/forks"] > 0 and metrics["actor/grad_norm"] > 0
        assert metrics["tree/rows"] == metrics["tree/turns"] * metrics["tree/trees"]
    assert assert_sampled_from(root / "warmstart", root / "window-dump", 3, parameters(root, "window", 2)) > 100


def test_the_reference_policy_holds_the_actor_back_from_its_second_step_on(window_run):
    assert abs(window_run[0]["actor/kl_loss"]) < 1e-9
    assert all(metrics["actor/kl_loss"] > 1e-9 for metrics in window_run[1:])


def test_a_resumed_run_branches_where_the_whole_run_did(root, window_run):
    resumed = train(
        root, "window-resumed", *QUANTILE, "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={root}/checkpoints/window/global_step_2",
    )  # fmt: skip
    states = [
        json.loads((root / "checkpoints" / run / f"global_step_{step}" / "verl_bpo.json").read_text())
        for run, step in (("window", 2), ("window", 3), ("window-resumed", 3))
    ]
    assert len(states[0]["scores"]) == 2 and sum(map(len, states[0]["scores"])) >= 32  # step 3 goes by what was learnt
    assert states[1]["totals"] == states[2]["totals"]
    for whole, again in zip(states[1]["scores"], states[2]["scores"]):
        assert sorted(again) == pytest.approx(sorted(whole), abs=1e-5)
    for key in ("tree/branch_points", "tree/forks", "tree/turns"):
        assert resumed[0][key] == window_run[2][key]
    before, after = parameters(root, "window", 3), parameters(root, "window-resumed", 3)
    for name in before:
        torch.testing.assert_close(_plain(after[name]), _plain(before[name]), rtol=0, atol=1e-6)


def test_grpo_trains_the_turns_of_plain_trajectories_with_kl_in_the_reward(root):
    steps = train(
        root, "window-grpo", *(o for o in WINDOW if "preset" not in o and "branch" not in o and "budget" not in o),
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=3", "algorithm.use_kl_in_reward=true",
        "trainer.total_training_steps=2",
    )  # fmt: skip
    assert_same_policy_in_engine_and_trainer(steps)
    for metrics in steps:
        assert metrics["tree/trees"] == 6 and metrics["tree/leaves"] == 1 and metrics["tree/forks"] == 0
        assert metrics["tree/rows"] == metrics["tree/turns"] * 6 and metrics["actor/grad_norm"] > 0
    assert steps[1]["actor/reward_kl_penalty"] != 0
