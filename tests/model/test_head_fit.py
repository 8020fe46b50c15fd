"""Value heads solved by ridge regression, on made-up hidden states."""

import pytest
import torch

from verl_bpo.advantages.sapo_losses import explained_variance
from verl_bpo.model.head_fit import WIDEST, HeadFit
from verl_bpo.model.support import UnsupportedModel


def made_up(turns: int, width: int, seed: int, noise: float = 1.0):
    """Correlated features of unequal size, and returns that are linear in them but for noise. The world is always the same."""
    world = torch.Generator().manual_seed(0)
    mix = torch.randn(width, width, generator=world) * torch.logspace(0, -2, width)
    weights = torch.randn(width, generator=world)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(turns, width, generator=g) @ mix + 3
    signal = (x - 3) @ weights
    return x, signal / signal.std() + noise * torch.randn(turns, generator=g) + 0.7


def values(heads, x):
    return x @ heads["weight"][0] + heads["bias"][0], x @ heads["weight"][1] + heads["bias"][1]


def test_after_three_batches_v_explains_four_fifths_of_what_an_offline_fit_does():
    width = 64
    fit = HeadFit(width)
    for step in range(3):
        x, y = made_up(400, width, seed=step + 1)
        fit.begin(step)
        fit.add(x, x, y)
        heads = fit.finish()
    many, target = made_up(20000, width, seed=100)
    z = torch.cat([many, torch.ones(len(many), 1)], 1)
    offline = torch.linalg.lstsq(z, target[:, None]).solution[:, 0]
    unseen, realised = made_up(5000, width, seed=200)
    best = explained_variance(torch.cat([unseen, torch.ones(5000, 1)], 1) @ offline, realised)
    v, q = values(heads, unseen)
    assert best == pytest.approx(0.5, abs=0.03)
    assert explained_variance(v, realised) > 0.8 * best
    torch.testing.assert_close(v, q)


def test_where_returns_are_noise_v_says_their_mean():
    fit = HeadFit(32)
    g = torch.Generator().manual_seed(3)
    for step in range(4):
        x, y = torch.randn(200, 32, generator=g), torch.rand(200, generator=g)
        fit.begin(step)
        fit.add(x, x, y)
        heads = fit.finish()
    v, _ = values(heads, torch.randn(5000, 32, generator=g))
    assert float(v.mean()) == pytest.approx(0.5, abs=0.03) and float(v.std()) < 0.03
    assert min(fit.ridge) >= 10


def test_a_given_strength_is_the_textbooks_ridge():
    x, y = made_up(100, 5, seed=1)
    fit = HeadFit(5, ridge=0.3)
    fit.begin(1)
    fit.add(x, x.flip(0), y)
    heads = fit.finish()
    centred, target = (x - x.mean(0)).double(), (y - y.mean()).double()
    strength = 0.3 * (centred**2).sum(0).mean()
    weights = torch.linalg.inv(centred.T @ centred + strength * torch.eye(5)) @ centred.T @ target
    torch.testing.assert_close(heads["weight"][0].double(), weights, rtol=1e-5, atol=1e-6)
    assert float(values(heads, x)[0].mean()) == pytest.approx(float(y.mean()), abs=1e-5)


def test_parts_of_a_step_and_ranks_add_up():
    x, y = made_up(90, 8, seed=2)
    whole, parts, first, second = (HeadFit(8) for _ in range(4))
    for fit in (whole, parts, first, second):
        fit.begin(1)
    whole.add(x, x, y)
    once = whole.finish()
    for rows in torch.arange(90).split(30):
        parts.add(x[rows], x[rows], y[rows])
        in_parts = parts.finish()
    first.add(x[:20], x[:20], y[:20])
    second.add(x[20:], x[20:], y[20:])
    on_ranks = first.finish(lambda sums: sums.add_(second.part))
    for heads in (in_parts, on_ranks):
        for name in heads:
            torch.testing.assert_close(heads[name], once[name], rtol=1e-6, atol=1e-7)


def test_older_steps_fade():
    """After the world has turned around, V follows it."""
    fit = HeadFit(8, memory=2)
    for step in range(8):
        x, y = made_up(100, 8, seed=step)
        fit.begin(step)
        fit.add(x, x, y if step < 4 else -y)
        heads = fit.finish()
    x, y = made_up(1000, 8, seed=50)
    assert explained_variance(values(heads, x)[0], -y) > 0.4


def test_a_batch_without_turns_or_with_broken_numbers_changes_nothing():
    fit = HeadFit(4)
    fit.begin(1)
    heads = fit.finish()
    assert not heads["weight"].any() and not heads["bias"].any()
    x, y = made_up(50, 4, seed=1)
    fit.add(x, x, y)
    before = fit.finish()
    fit.begin(2)
    fit.add(x.log(), x, y)
    assert not x.log().isfinite().all()
    for name, heads in fit.finish().items():
        torch.testing.assert_close(heads, before[name], rtol=1e-5, atol=1e-6)


def test_what_is_saved_goes_on_as_if_nothing_had_happened():
    x, y = made_up(100, 6, seed=1)
    fit, resumed = HeadFit(6), HeadFit(6)
    for step in (1, 2):
        fit.begin(step)
        fit.add(x, x, y + step)
        fit.finish()
    resumed.load_state(fit.state())
    found = []
    for each in (fit, resumed):
        each.begin(3)
        each.add(x, x, -y)
        found.append(each.finish())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_model_too_wide_for_the_matrices_is_refused():
    with pytest.raises(UnsupportedModel, match="set bpo.sapo.head_fit=adam"):
        HeadFit(WIDEST + 1)
