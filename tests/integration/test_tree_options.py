"""What a tree's options would do to each other: trained as meant, or refused in one line before anything starts."""

from itertools import product

import hydra
import pytest

pytest.importorskip("verl")

from verl_bpo.config.schema import build
from verl_bpo.integration.prepare import prepare
from verl_bpo.options import ConfigError
from verl_bpo.tree.selectors import SELECTORS

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def config(*overrides):
    with hydra.initialize_config_module("verl_bpo.config", version_base=None):
        return hydra.compose(
            "bpo_trainer",
            ["bpo.env.name=textworld", "data.train_batch_size=8", f"{ROLLOUT}.name=hf", *overrides],
        )


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["bpo.branch.selector=none"], "nothing spends the rest: set both alike, or choose a selector"),
        (["bpo.preset=plain", "bpo.budget.limit=8"], "nothing spends the rest"),
        (["bpo.preset=plain"], "leaves no siblings to learn from"),
        (["algorithm.adv_estimator=grpo", "bpo.budget.limit=8"], "nothing spends the rest"),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"], "set it to token-mean"),
        ([f"{ROLLOUT}.top_p=0.9"], "rollout.top_p=0.9 cuts the distribution that bpo.branch.selector=most_uncertain"),
        ([f"{ROLLOUT}.top_k=20", "bpo.preset=guided"], "rollout.top_k=20 cuts the distribution"),
        (["bpo.branch.interval=2"], "bpo.branch.interval is for selector fixed_interval"),
        (
            ["bpo.advantage.weighting=path_probability", "bpo.preset=paper_threshold"],
            "needs a number of root samples that branching doesn't change: set bpo.budget.fill=none",
        ),
        (
            ["bpo.branch.selector=top_k", "bpo.branch.trunk=success", "bpo.preset=paper"],
            "can't be compared with its forks: set bpo.branch.root_samples=2",
        ),
    ],
)
def test_what_would_do_nothing_or_something_else_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        prepare(config(*overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ROLLOUT}.top_p=0.9", "bpo.branch.selector=every"],  # no entropy is looked at
        ["bpo.preset=plain", f"{ROLLOUT}.n=8"],
        ["bpo.preset=plain", "bpo.branch.root_samples=8", "bpo.budget.limit=8"],
        ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"],
        ["bpo.advantage.weighting=path_probability"],
    ],
)
def test_what_is_sound_is_accepted(overrides):
    prepare(config(*overrides))


@pytest.mark.parametrize(
    "preset, selector, unit, fill",
    product(
        ["paper", "paper_threshold", "guided"],
        [name for name in SELECTORS if name != "none"],
        ["leaves", "env_steps", "tokens"],
        ["root", "none"],
    ),
)
def test_every_combination_of_preset_selector_and_budget_gives_groups_that_train(preset, selector, unit, fill):
    """The tree is rolled by the real rollout; every turn of every trajectory below or beside a branch point is trained."""
    from test_rollout import FakeWorld, PlacedPolicy, roll

    from verl_bpo.tree.forest import Forest

    limit = {"leaves": 8, "env_steps": 40, "tokens": 40}[unit]
    user = {
        "branch": {"selector": selector, "entropy_tokens": "first"},
        "budget": {"unit": unit, "limit": limit, "fill": fill},
    }
    if selector in ("threshold", "most_uncertain"):
        user["branch"]["threshold"] = 0.1
    _, tree = roll(PlacedPolicy(3, "aabw"), FakeWorld(), preset, **user)
    config = build({**user, "env": {"max_turns": 5, "max_action_tokens": 4}}, preset)
    estimate = config.advantage(Forest.of({"p_0": tree}, {"p_0": "p"}))
    forked = [t for t in tree.trajectories if t.parent >= 0]
    assert forked or len(tree.trajectories) > 1 or selector in ("random", "quantile")
    for i, node in enumerate(tree.nodes):
        trajectory = tree.trajectories[node.trajectory]
        below = trajectory.parent >= 0 or sum(t.parent < 0 for t in tree.trajectories) > 1
        if below:
            assert bool(estimate.valid[i]), (i, node.trajectory)
