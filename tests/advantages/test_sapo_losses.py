"""Value losses of SAPO (Single-rollout Autoregressive Policy Optimization)."""

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from verl_bpo.advantages.sapo import lambda_returns, sarsa_targets, turn_boundaries
from verl_bpo.advantages.sapo_losses import explained_variance, sapo_value_loss, turn_value_loss
from verl_bpo.model.value_readout import attach_value_readout, boundary_positions


def test_without_a_clip_the_loss_is_half_the_squared_error():
    loss, clipped = turn_value_loss(torch.tensor([1.0, -2.0]), torch.tensor([0.0, 1.0]))
    assert loss.tolist() == [0.5, 4.5] and not clipped.any()


def test_a_value_that_moved_past_the_clip_stops_pulling_and_one_that_moved_away_does_not():
    prediction = torch.tensor([0.5, 0.05, -0.5], requires_grad=True)
    loss, clipped = turn_value_loss(prediction, torch.ones(3), torch.zeros(3), 0.1)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), 0.5 * torch.tensor([0.9, 0.95, 1.5]) ** 2)
    torch.testing.assert_close(prediction.grad, torch.tensor([0.0, -0.95, -1.5]))
    assert clipped.tolist() == [True, False, False]


def test_shares_of_micro_batches_add_up_to_the_loss_of_the_whole_batch():
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(7, generator=g) for _ in range(6)]
    weight = torch.tensor([1.0, 1, 0, 1, 1, 0, 1])
    common = dict(turns=7, q_turns=5, v_coef=0.3, q_coef=0.7, clip=0.2)
    whole = sapo_value_loss(*x[:4], q_weight=weight, v_old=x[4], q_old=x[5], **common)
    parts = [
        sapo_value_loss(*(t[s] for t in x[:4]), q_weight=weight[s], v_old=x[4][s], q_old=x[5][s], **common)
        for s in (slice(0, 2), slice(2, 2), slice(2, 7))
    ]
    for name in ("loss", "v_loss", "q_loss", "v_clipped", "q_clipped"):
        torch.testing.assert_close(sum(getattr(p, name) for p in parts), getattr(whole, name))
    torch.testing.assert_close(whole.loss, 0.3 * whole.v_loss + 0.7 * whole.q_loss)


def test_the_mean_of_q_is_over_the_turns_that_count_for_it():
    q, target, weight = torch.tensor([[1.0, 7.0, 3.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    q.requires_grad_()
    result = sapo_value_loss(q, q, target, target, turns=3, q_weight=weight, q_turns=2, v_coef=0.0, q_coef=1.0)
    result.loss.backward()
    assert float(result.q_loss) == 0.5 * (1 + 9) / 2
    torch.testing.assert_close(q.grad, torch.tensor([0.5, 0.0, 1.5]))


def test_a_batch_without_turns_has_a_loss_of_zero_that_can_be_differentiated():
    v = torch.zeros(0, requires_grad=True)
    none = v.detach()
    result = sapo_value_loss(v, v, none, none, turns=0, q_weight=none, q_turns=0, v_coef=1.0, q_coef=1.0)
    result.loss.backward()
    assert result.loss == 0 and v.grad.shape == (0,)


@pytest.mark.parametrize(
    "prediction, target, expected",
    [
        ([0.0, 1.0], [0.0, 1.0], 1.0),
        ([5.0, 6.0], [0.0, 1.0], 1.0),  # a constant offset is no unexplained variance
        ([0.5, 0.5], [0.0, 1.0], 0.0),
        ([1.0, 0.0], [0.0, 1.0], -3.0),
        ([1.0, 0.0], [0.3, 0.3], 0.0),
        ([1.0], [0.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_explained_variance_is_defined_everywhere(prediction, target, expected):
    assert explained_variance(torch.tensor(prediction), torch.tensor(target)) == pytest.approx(expected)


GAMMA, TURNS, WEIGHT = 0.9, 3, {0: 1, 1: 3}


def reward(history):
    """Any function of the actions so far."""
    return float(sum((i + 1) * a for i, a in enumerate(history)) % 4) / 3 - 0.4 * history[-1]


def exact_q(history):
    if len(history) == TURNS:
        return reward(history)
    return reward(history) + GAMMA * exact_v(history)


def exact_v(history):
    return sum(WEIGHT[a] / 4 * exact_q((*history, a)) for a in WEIGHT)


@pytest.mark.parametrize("lam, bootstrap", [(0.0, "sarsa"), (0.8, "sarsa"), (0.8, "v")])
def test_v_and_q_converge_to_the_exact_values_of_a_fixed_policy(lam, bootstrap):
    """All 8 outcomes of 3 turns with 2 actions, each as often as the policy (1/4, 3/4) samples it in 64 rollouts."""
    outcomes = list(product(WEIGHT, repeat=TURNS))
    ids = torch.tensor([[1, *(token for a in h for token in (2 + a, 4))] for h in outcomes])
    turns = turn_boundaries(torch.tensor([0, 1, 0, 1, 0, 1, 0]).expand(len(ids), -1))
    at = boundary_positions(turns, torch.arange(len(ids)) * 7, tokens=ids.numel())
    times = torch.tensor([WEIGHT[a] for h in outcomes for a in h]).view(-1, TURNS).prod(1)
    sampled = torch.arange(len(ids)).repeat_interleave(times)
    sampled = (sampled[:, None] * TURNS + torch.arange(TURNS)).flatten()  # turns of 64 rollouts
    trajectory = torch.arange(64).repeat_interleave(TURNS)
    rewards = torch.tensor([reward(h[: t + 1]) for h in outcomes for t in range(TURNS)])[sampled]

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=6, hidden_size=24, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.1,
        )
    )  # fmt: skip
    readout = attach_value_readout(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=600)
    for _ in range(600):
        with readout.reading(at) as values:
            model(input_ids=ids, use_cache=False)
        v, q = values.state[sampled], values.action[sampled]
        old = (rewards, v.detach(), q.detach(), trajectory)
        g = lambda_returns(*old, gamma=GAMMA, lam=lam, bootstrap=bootstrap)
        y = sarsa_targets(rewards, q.detach(), trajectory, gamma=GAMMA)
        optimizer.zero_grad()
        every = dict(turns=len(v), q_weight=torch.ones_like(q), q_turns=len(q))
        sapo_value_loss(v, q, g, y, **every, v_coef=0.5, q_coef=0.5).loss.backward()
        optimizer.step()
        schedule.step()
    expected_v = torch.tensor([exact_v(h[:t]) for h in outcomes for t in range(TURNS)])[sampled]
    expected_q = torch.tensor([exact_q(h[: t + 1]) for h in outcomes for t in range(TURNS)])[sampled]
    assert (v - expected_v).abs().max() < 0.01
    assert (q - expected_q).abs().max() < 0.01
    assert expected_v.std() > 0.2 and expected_q.std() > 0.2
