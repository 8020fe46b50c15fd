"""Runs with and without packed trees, from the same seeds: the same rollouts, losses and policy. No fakes."""

import pytest
from test_sapo_training import heads
from test_training import LETTERS, _plain, assert_same_policy_in_engine_and_trainer, parameters, train

STEPS = 2
ROWS, PACKED = (f"bpo.packed_tree.enable={value}" for value in ("false", "true"))
SMALL = (
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
    "actor_rollout_ref.actor.optim.lr=1.0e-4",
    "trainer.save_freq=2",
)
CASES = {
    # Against a reference policy, in several micro-batches.
    "bpo": ("algorithm.adv_estimator=bpo", "actor_rollout_ref.actor.use_kl_loss=true", *SMALL),
    # One row a turn, each with its own prompt; values are read in the packed forward.
    "sapo": ("algorithm.adv_estimator=sapo", "bpo.prompt.context=window", "bpo.prompt.window_turns=1", *SMALL),
}
TREES = tuple(option for option in LETTERS if not option.startswith("bpo.preset"))


@pytest.fixture(scope="module", params=CASES)
def pair(request, root) -> tuple[str, list[dict], list[dict]]:
    """Metrics of the steps without and with packed trees."""
    name = request.param
    options = (
        *CASES[name],
        *TREES,
        f"bpo.preset={'paper' if name == 'bpo' else 'plain'}",
        "actor_rollout_ref.rollout.n=2",
    )
    options += (f"trainer.total_training_steps={STEPS}",)
    return name, train(root, f"{name}-rows", *options, ROWS), train(root, f"{name}-packed", *options, PACKED)


def test_the_losses_are_the_same(pair):
    name, rows, packed = pair
    compared = ["actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl"]
    compared += {"bpo": ["actor/kl_loss"], "sapo": ["sapo/v_loss", "sapo/q_loss", "sapo/v_mean", "sapo/q_mean"]}[name]
    assert len(rows) == len(packed) == STEPS
    for one, other in zip(rows, packed):
        assert other["compute/generated_tokens"] == one["compute/generated_tokens"]
        for key in compared:
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
    assert_same_policy_in_engine_and_trainer(packed)
    assert all(one["actor/grad_norm"] > 1e-3 for one in rows)


def test_the_policies_are_the_same(pair, root):
    name = pair[0]
    before, after = parameters(root, f"{name}-rows", STEPS), parameters(root, f"{name}-packed", STEPS)
    assert before.keys() == after.keys()
    for key in before:
        # Adam turns rounding of gradients near zero into steps of up to its learning rate, 1e-4 here.
        difference = (_plain(after[key]) - _plain(before[key])).abs()
        assert difference.max() <= STEPS * 1e-4 and difference.mean() < 2e-6, key
    if name == "sapo":
        for key, value in heads(root, "sapo-rows", STEPS).items():
            assert value.any() and (heads(root, "sapo-packed", STEPS)[key] - value).abs().max() < 1e-4


def test_the_log_tells_what_was_shared(pair):
    for metrics in pair[2]:
        assert 0 < metrics["packed/unique_tokens"] < metrics["packed/total_tokens"]
        assert metrics["packed/compute_ratio"] == metrics["packed/unique_tokens"] / metrics["packed/total_tokens"]
        assert metrics["packed/total_tokens"] == metrics["global_seqlen/mean"]
        assert 0 < metrics["packed/build_seconds"] < metrics["timing_s/update_actor"]
        assert not any(key.startswith("actor/packed") for key in metrics)
    assert not any(key.startswith("packed/") for metrics in pair[1] for key in metrics)
