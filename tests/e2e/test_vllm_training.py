"""verl's trainer with its own vLLM replica on a machine without a GPU. Needs the extra ``vllm`` (docs/install.md)."""

from importlib.util import find_spec

import pytest
import torch
from test_training import (
    assert_same_policy_in_engine_and_trainer,
    assert_sampled_from,
    parameters,
    train,
    warm_start,
)

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: see docs/install.md"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU"),
]


@pytest.fixture(scope="module")
def vllm_run(root) -> list[dict]:
    """Three steps of BPO on TextWorld from a policy that is far from uniform."""
    warm_start(root / "games", root / "taught", steps=35)
    return train(
        root, "vllm", "actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.model.path={root}/taught",
        "bpo.preset=paper", "bpo.branch.threshold=0.05", "bpo.budget.limit=6", f"bpo.dump_dir={root}/vllm-dump",
        "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.total_training_steps=3", "trainer.save_freq=1",
        "trainer.test_freq=3",
    )  # fmt: skip


def test_vllm_follows_every_update_and_reuses_prefixes(root, vllm_run):
    assert len(vllm_run) == 3
    assert_same_policy_in_engine_and_trainer(vllm_run)
    for metrics in vllm_run:
        assert metrics["tree/forks"] > 0 and metrics["actor/grad_norm"] > 0
        assert metrics["tree/cached_share"] > 0.3
        assert metrics["tree/entropy_at_branch"] > 0.05
    assert any(key.endswith("success/mean@1") for key in vllm_run[-1])


def test_vllm_reports_the_log_probs_and_entropies_of_the_weights_that_sampled(root, vllm_run):
    assert assert_sampled_from(root / "taught", root / "vllm-dump", 1) > 100
    assert assert_sampled_from(root / "taught", root / "vllm-dump", 3, parameters(root, "vllm", 2)) > 100


@pytest.mark.parametrize("estimator", ["sapo", "bpo"])
def test_vllm_reads_the_values_that_the_trainer_reads(root, estimator):
    steps = train(
        root, f"vllm-values-{estimator}", "actor_rollout_ref.rollout.name=vllm", f"algorithm.adv_estimator={estimator}",
        "bpo.preset=guided", "bpo.branch.score=value", "bpo.branch.root_samples=2", "bpo.budget.limit=6",
        f"data.train_files={root}/letters.parquet", f"data.val_files={root}/letters.parquet",
        "trainer.total_training_steps=2",
    )  # fmt: skip
    assert_same_policy_in_engine_and_trainer(steps)
    for metrics in steps:
        assert metrics["tree/forks"] > 0 and metrics["sapo/v_loss"] > 0
        assert metrics["sapo/rollout_value_diff"] < 1e-4
    assert steps[0]["tree/value_elsewhere"] == 0 != steps[1]["tree/value_elsewhere"]
