"""A run with and one without packed trees, from the same seeds: the same rollouts, losses and policy. No fakes.

One pair for all that meets in the trainer: branched trees, prompts of their own for every turn, values read in the packed
forward, a reference policy, several micro-batches, some of them in chunks. Other estimators differ in their advantages only;
their runs in the other modules are packed too, as the quickstart is.
"""

import pytest
from test_sapo_training import heads
from test_training import LETTERS, _plain, assert_same_policy_in_engine_and_trainer, parameters, train

STEPS = 2
ACTOR = "actor_rollout_ref.actor"
OPTIONS = (
    *LETTERS,
    "algorithm.adv_estimator=sapo",
    "bpo.prompt.context=window",
    "bpo.prompt.window_turns=1",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.optim.lr=1.0e-4",
    "trainer.save_freq=2",
    f"trainer.total_training_steps={STEPS}",
)
ROWS = ("bpo.packed_tree.enable=false", f"{ACTOR}.ppo_max_token_len_per_gpu=1024")
PACKED = ("bpo.packed_tree.enable=true", "bpo.packed_tree.chunked=true", f"{ACTOR}.ppo_max_token_len_per_gpu=256")
COMPARED = ("pg_loss", "entropy", "grad_norm", "ppo_kl", "kl_loss")


@pytest.fixture(scope="module")
def pair(root) -> tuple[list[dict], list[dict]]:
    """Metrics of the steps without and with packed trees."""
    return train(root, "rows", *OPTIONS, *ROWS), train(root, "packed", *OPTIONS, *PACKED)


def test_the_losses_are_the_same(pair):
    rows, packed = pair
    compared = [f"actor/{key}" for key in COMPARED]
    compared += [f"sapo/{key}" for key in ("v_loss", "q_loss", "v_mean", "q_mean")]
    assert len(rows) == len(packed) == STEPS
    for one, other in zip(rows, packed):
        assert other["tree/forks"] > 0
        assert other["compute/generated_tokens"] == one["compute/generated_tokens"]
        for key in compared:
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
    assert_same_policy_in_engine_and_trainer(packed)
    assert all(one["actor/grad_norm"] > 1e-3 for one in rows)


def test_the_policies_are_the_same(pair, root):
    before, after = parameters(root, "rows", STEPS), parameters(root, "packed", STEPS)
    assert before.keys() == after.keys()
    for key in before:
        # Adam turns rounding of gradients near zero into steps of up to its learning rate, 1e-4 here.
        difference = (_plain(after[key]) - _plain(before[key])).abs()
        assert difference.max() <= STEPS * 1e-4 and difference.mean() < 2e-6, key
    for key, value in heads(root, "rows", STEPS).items():
        assert value.any() and (heads(root, "packed", STEPS)[key] - value).abs().max() < 1e-4


def test_the_log_tells_what_was_shared(pair):
    for metrics in pair[1]:
        assert 0 < metrics["packed/unique_tokens"] < metrics["packed/total_tokens"]
        ratio = metrics["packed/unique_tokens"] / metrics["packed/total_tokens"]
        assert metrics["packed/compute_ratio"] == pytest.approx(ratio)
        assert metrics["packed/total_tokens"] == metrics["global_seqlen/mean"]
        assert 0 < metrics["packed/chunked_tokens"] <= metrics["packed/unique_tokens"]
        assert 0 < metrics["packed/build_seconds"] < metrics["timing_s/update_actor"]
        assert not any(key.startswith("actor/packed") for key in metrics)
    assert not any(key.startswith("packed/") for metrics in pair[0] for key in metrics)
