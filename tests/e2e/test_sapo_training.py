"""SAPO (Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842) through verl's trainer. No fakes."""

import math

import pytest
import torch
from safetensors.torch import load_file
from test_training import LETTERS, QUICKSTART, _plain, assert_same_policy_in_engine_and_trainer, parameters, train

from verl_bpo.commands.dry_run import dry_run

SAPO = (
    "data.train_files=${root}/letters.parquet",
    "data.val_files=${root}/letters.parquet",
    "algorithm.adv_estimator=sapo",
)


def heads(folder, name, step):
    file = folder / "checkpoints" / name / f"global_step_{step}" / "actor" / "huggingface" / "value_readout.safetensors"
    return load_file(str(file))


@pytest.fixture(scope="module")
def sapo_run(root) -> list[dict]:
    """Three steps with one rollout a prompt, the first of them value warm-up, a checkpoint after each."""
    return train(
        root, "sapo", *SAPO, "trainer.total_training_steps=3", "trainer.save_freq=1", "bpo.sapo.warmup_steps=1"
    )  # fmt: skip


def test_one_rollout_a_prompt_trains_actor_and_values_without_a_critic_worker(sapo_run):
    assert len(sapo_run) == 3
    assert_same_policy_in_engine_and_trainer(sapo_run)
    for metrics in sapo_run:
        assert metrics["tree/leaves"] == 1
        assert metrics["sapo/turns"] == metrics["tree/turns"] * metrics["tree/trees"]
        assert metrics["sapo/v_loss"] > 0 and metrics["sapo/q_loss"] > 0 and metrics["sapo/gradient_policy"] > 0
        assert all(math.isfinite(value) for key, value in metrics.items() if key.startswith("sapo/"))
        assert "timing_s/values" not in metrics and "timing_s/update_critic" not in metrics
        assert not any(key.startswith("critic/vf") for key in metrics)


def test_values_are_read_by_the_policy_that_sampled(sapo_run):
    assert sapo_run[0]["sapo/v_mean"] == sapo_run[0]["sapo/q_mean"] == 0  # the heads start at zero
    assert sapo_run[1]["sapo/v_mean"] != 0 and sapo_run[1]["sapo/q_mean"] != 0


def test_warm_up_keeps_the_policy_and_moves_the_heads(root, sapo_run):
    first, second = parameters(root, "sapo", 1), parameters(root, "sapo", 2)
    start = load_file(str(root / "warmstart" / "model.safetensors"))
    assert all(torch.equal(_plain(first[name]), tensor) for name, tensor in start.items())
    assert any(not torch.equal(_plain(second[name]), _plain(first[name])) for name in first)
    assert heads(root, "sapo", 1)["weight"].any()
    assert sapo_run[0]["actor/grad_norm"] == 0 and sapo_run[1]["actor/grad_norm"] > 0


def test_a_resumed_run_reaches_the_same_policy_and_heads(root, sapo_run):
    train(
        root, "sapo-resumed", *SAPO, "trainer.total_training_steps=3", "trainer.save_freq=1", "bpo.sapo.warmup_steps=1",
        "trainer.resume_mode=resume_path", f"trainer.resume_from_path={root}/checkpoints/sapo/global_step_2",
    )  # fmt: skip
    before, after = parameters(root, "sapo", 3), parameters(root, "sapo-resumed", 3)
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(_plain(after[name]), _plain(before[name]), rtol=0, atol=1e-6)
    for name, tensor in heads(root, "sapo", 3).items():
        torch.testing.assert_close(heads(root, "sapo-resumed", 3)[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "estimator, overrides",
    [
        ("sapo", ["bpo.preset=guided", "bpo.branch.root_samples=2", "actor_rollout_ref.rollout.n=2"]),
        (
            "bpo",
            [
                "bpo.preset=paper_threshold",
                "bpo.branch.selector=quantile",
                "bpo.branch.share=0.6",
                "bpo.branch.score=value",
            ],
        ),
    ],
)
def test_trees_branch_by_the_values_that_the_policy_reads(root, estimator, overrides):
    steps = train(
        root, f"value-guided-{estimator}", *SAPO, *LETTERS[:2], *overrides, f"algorithm.adv_estimator={estimator}",
        "bpo.budget.limit=6", "trainer.total_training_steps=2",
    )  # fmt: skip
    assert_same_policy_in_engine_and_trainer(steps)
    for metrics in steps:
        assert metrics["tree/leaves"] == 6 and metrics["tree/forks"] > 0 and metrics["sapo/v_loss"] > 0
        assert metrics["sapo/rollout_value_diff"] < 1e-4  # rollout and trainer read the same states by the same heads
        assert ("bpo/advantage_std" in metrics) == (estimator == "bpo")
        if estimator == "sapo":  # a turn that several rows share counts once
            assert metrics["tree/trees"] == 4 and metrics["sapo/turns"] == metrics["tree/turns"] * 4
    assert steps[0]["tree/value_elsewhere"] == 0 != steps[1]["tree/value_elsewhere"]


@pytest.mark.parametrize(
    "override, message",
    [
        ("bpo.sapo.lam=2", r"bpo.sapo.lam=2 must be at most 1"),
        ("critic.enable=true", "critic.enable=True starts a critic"),
        ("actor_rollout_ref.model.use_fused_kernels=true", "use_fused_kernels=True hides"),
        (
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
            "ulysses_sequence_parallel_size=2 splits",
        ),
        ("actor_rollout_ref.actor.strategy=megatron", "strategy=megatron has no value readout"),
    ],
)
def test_what_sapo_cannot_do_is_said_before_anything_starts(root, override, message):
    assert message in dry_run([*QUICKSTART, f"root={root}", "algorithm.adv_estimator=sapo", override]).problems[0]
