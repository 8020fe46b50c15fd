"""Boundaries, lambda-returns and normalisation of SAPO (arXiv 2608.19842) against slow readings of the formulas."""

from __future__ import annotations

import random

import pytest
import torch

from verl_bpo.advantages.sapo import lambda_returns, normalise_turns, sarsa_targets, turn_boundaries

F64 = {"dtype": torch.float64}


def as_lists(b) -> list[tuple]:
    return list(zip(b.row.tolist(), b.start.tolist(), b.last.tolist(), b.turn.tolist()))


# --- boundaries ---------------------------------------------------------------------------------------------------


def slow_boundaries(mask: list[list[int]], ids: list[list[int]]) -> list[tuple]:
    out = []
    for row, (m, i) in enumerate(zip(mask, ids)):
        turn, position = 0, 0
        while position < len(m):
            end = position
            while m[position] and end + 1 < len(m) and m[end + 1] and i[end + 1] == i[position]:
                end += 1
            if m[position]:
                out.append((row, position, end, turn))
                turn += 1
            position = end + 1
    return out


def random_rows(seed: int, lengths: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random(seed)
    mask = [[int(rng.random() < 0.6) for _ in range(n)] for n in lengths]
    ids = [[rng.randint(0, 1) for _ in range(n)] for n in lengths]
    return mask, ids


@pytest.mark.parametrize("with_id", [False, True])
def test_padded_boundaries_equal_a_walk_over_the_mask(with_id):
    for seed in range(100):
        mask, ids = random_rows(seed, [seed % 13] * (seed % 4 + 1))
        ids = ids if with_id else [[0] * len(m) for m in mask]
        found = turn_boundaries(torch.tensor(mask), torch.tensor(ids) if with_id else None)
        assert as_lists(found) == slow_boundaries(mask, ids)


@pytest.mark.parametrize("with_id", [False, True])
def test_packed_boundaries_equal_a_walk_over_each_row(with_id):
    for seed in range(100):
        rng = random.Random(seed)
        lengths = [rng.choice([0, 1, 2, 9]) for _ in range(rng.randint(1, 5))]
        mask, ids = random_rows(seed, lengths)
        ids = ids if with_id else [[0] * len(m) for m in mask]
        flat, flat_ids = (torch.tensor([x for row in rows for x in row], dtype=torch.int64) for rows in (mask, ids))
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        found = turn_boundaries(flat, flat_ids if with_id else None, offsets)
        assert as_lists(found) == slow_boundaries(mask, ids)


def test_response_without_actions_has_no_turn():
    assert as_lists(turn_boundaries(torch.tensor([[0, 0, 0], [0, 1, 1]]))) == [(1, 1, 2, 0)]
    assert as_lists(turn_boundaries(torch.zeros(2, 0))) == []
    assert as_lists(turn_boundaries(torch.zeros(0), offsets=torch.tensor([0, 0]))) == []


def test_action_cut_at_the_end_of_its_row_does_not_run_into_the_next_row():
    assert as_lists(turn_boundaries(torch.tensor([[0, 1], [1, 0]]))) == [(0, 1, 1, 0), (1, 0, 0, 0)]


@pytest.mark.parametrize(
    "args, message",
    [
        ((torch.ones(2, 3), torch.ones(3, 2)), "one shape"),
        ((torch.ones(3),), "with them"),
        ((torch.ones(1, 3), None, torch.tensor([0, 3])), "with them"),
        ((torch.ones(3), None, torch.tensor([0, 2])), "rise from 0 to 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        turn_boundaries(*args)


# --- returns ------------------------------------------------------------------------------------------------------


class Batch:
    """Ragged turns of R trajectories in random interleaving; some trajectories have no turn."""

    def __init__(self, seed: int, dtype=torch.float64) -> None:
        rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
        turns = [rng.choice([0, 1, 1, 2, 7]) for _ in range(rng.randint(1, 6))]
        order = [r for r, n in enumerate(turns) for _ in range(n)]
        rng.shuffle(order)
        self.trajectory = torch.tensor(order, dtype=torch.int64)
        self.reward, self.value, self.q = torch.randn(3, len(order), generator=g, dtype=torch.float64).to(dtype)
        self.truncated = torch.rand(len(turns), generator=g) < 0.5
        self.value_at_end = torch.randn(len(turns), generator=g, dtype=torch.float64).to(dtype)
        # What is not truncated has no state after its end.
        self.value_at_end[~self.truncated] = float("nan")

    def ends(self) -> dict:
        return {"truncated": self.truncated, "value_at_end": self.value_at_end}

    def slow(self, gamma: float, lam: float, x: torch.Tensor) -> list[float]:
        out = [0.0] * len(self.trajectory)
        for r in range(len(self.truncated)):
            g = x_next = float(self.value_at_end[r]) if self.truncated[r] else 0.0
            for i in reversed((self.trajectory == r).nonzero().flatten().tolist()):
                g = out[i] = float(self.reward[i]) + gamma * ((1 - lam) * x_next + lam * g)
                x_next = float(x[i])
        return out


@pytest.mark.parametrize("bootstrap", ["sarsa", "v"])
@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_lambda_returns_equal_the_backward_recursion(gamma, lam, bootstrap):
    for seed in range(30):
        b = Batch(seed)
        g = lambda_returns(b.reward, b.value, b.q, b.trajectory, gamma=gamma, lam=lam, bootstrap=bootstrap, **b.ends())
        assert g.tolist() == pytest.approx(b.slow(gamma, lam, b.q if bootstrap == "sarsa" else b.value), abs=1e-12)
        y = sarsa_targets(b.reward, b.q, b.trajectory, gamma=gamma, sarsa_lambda=lam, **b.ends())
        assert y.tolist() == pytest.approx(b.slow(gamma, lam, b.q), abs=1e-12)


def three_turns(**kwargs) -> list[float]:
    reward, value, q = torch.tensor([[1.0, 2.0, 4.0], [10.0, 20.0, 40.0], [100.0, 200.0, 400.0]], **F64)
    return lambda_returns(reward, value, q, torch.zeros(3, dtype=torch.int64), gamma=0.5, **kwargs).tolist()


def test_lambda_1_is_the_discounted_return():
    assert three_turns(lam=1.0) == [1 + 2 / 2 + 4 / 4, 2 + 4 / 2, 4]


@pytest.mark.parametrize("bootstrap, following", [("sarsa", (200, 400)), ("v", (20, 40))])
def test_lambda_0_is_reward_plus_discounted_next_value(bootstrap, following):
    assert three_turns(lam=0.0, bootstrap=bootstrap) == [1 + following[0] / 2, 2 + following[1] / 2, 4]


def test_truncated_trajectory_bootstraps_with_the_value_at_its_end_and_a_terminated_one_does_not():
    reward, x = torch.tensor([1.0, 1.0], **F64), torch.zeros(2, **F64)
    ends = {"truncated": torch.tensor([True, False]), "value_at_end": torch.tensor([8.0, 8.0], **F64)}
    for g in (
        lambda_returns(reward, x, x, torch.tensor([0, 1]), gamma=0.5, lam=0.7, **ends),
        sarsa_targets(reward, x, torch.tensor([0, 1]), gamma=0.5, **ends),
    ):
        assert g.tolist() == [5, 1]


@pytest.mark.parametrize("bootstrap", ["sarsa", "v"])
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_without_a_value_at_its_end_a_truncated_trajectory_returns_its_last_action_value(gamma, lam, bootstrap):
    for seed in range(30):
        b = Batch(seed)
        x = b.q if bootstrap == "sarsa" else b.value
        expected = [0.0] * len(b.trajectory)
        for r in range(len(b.truncated)):
            turns = (b.trajectory == r).nonzero().flatten().tolist()
            for at, i in reversed(list(enumerate(turns))):
                if at == len(turns) - 1:
                    expected[i] = float(b.q[i] if b.truncated[r] else b.reward[i])
                else:
                    after = turns[at + 1]
                    expected[i] = float(b.reward[i] + gamma * ((1 - lam) * x[after] + lam * expected[after]))
        g = lambda_returns(
            b.reward, b.value, b.q, b.trajectory, gamma=gamma, lam=lam, bootstrap=bootstrap, truncated=b.truncated
        )
        assert g.tolist() == pytest.approx(expected, abs=1e-12)
        if bootstrap == "sarsa":
            y = sarsa_targets(b.reward, b.q, b.trajectory, gamma=gamma, sarsa_lambda=lam, truncated=b.truncated)
            assert torch.equal(y, g)


def test_advantage_with_v_bootstrap_is_generalised_advantage_estimation():
    gamma, lam = 0.9, 0.6
    for seed in range(10):
        b = Batch(seed)
        g = lambda_returns(b.reward, b.value, b.q, b.trajectory, gamma=gamma, lam=lam, bootstrap="v", **b.ends())
        for r in range(len(b.truncated)):
            turns = b.trajectory == r
            end = b.value_at_end[r] if b.truncated[r] else torch.zeros((), **F64)
            v = torch.cat([b.value[turns], end[None]])
            delta = b.reward[turns] + gamma * v[1:] - v[:-1]
            gae = [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:].tolist())) for t in range(len(delta))]
            assert (g - b.value)[turns].tolist() == pytest.approx(gae, abs=1e-12)


def test_shared_turn_of_a_tree_follows_its_own_trajectory_whatever_the_forks_return():
    # Trunk 0 - 1 - 2 (trajectory 0) with a fork after turn 0: turns 3, 4 (trajectory 1), sampled in between.
    trajectory = torch.tensor([0, 0, 1, 0, 1])
    reward, value, q = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), **F64)
    tree = lambda_returns(reward, value, q, trajectory, gamma=0.9, lam=0.5)
    for own in (trajectory == 0, trajectory == 1):
        alone = lambda_returns(reward[own], value[own], q[own], torch.zeros_like(trajectory[own]), gamma=0.9, lam=0.5)
        assert tree[own].tolist() == pytest.approx(alone.tolist(), abs=1e-12)


def test_float32_returns_agree_with_float64_over_long_trajectories():
    reward, value, q = torch.randn(3, 500, generator=torch.Generator().manual_seed(0), **F64)
    trajectory = torch.arange(500) % 2
    exact = lambda_returns(reward, value, q, trajectory, gamma=1.0, lam=0.98)
    single = lambda_returns(reward.float(), value.float(), q.float(), trajectory, gamma=1.0, lam=0.98)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-4)


def test_values_that_are_not_numbers_stay_in_their_trajectory():
    x = torch.tensor([1.0, 2.0, float("nan"), float("nan")], **F64)
    g = lambda_returns(x, x, x, torch.tensor([0, 0, 1, 1]), gamma=1.0, lam=0.5)
    assert g[:2].tolist() == [3, 2]


def test_no_gradient_flows_through_returns():
    q = torch.zeros(2, requires_grad=True)
    assert not sarsa_targets(torch.zeros(2), q, torch.tensor([0, 0]), gamma=1.0).requires_grad


def test_batch_without_turns_has_no_returns():
    empty = torch.zeros(0)
    g = lambda_returns(empty, empty, empty, empty.long(), gamma=1.0, lam=0.9)
    assert g.shape == (0,)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gamma": 1.1}, "gamma=1.1"),
        ({"lam": -0.1}, "lam=-0.1"),
        ({"bootstrap": "q"}, "bootstrap='q'"),
        ({"value_at_end": torch.tensor([1.0])}, "value_at_end needs truncated"),
    ],
)
def test_argument_outside_its_range_is_refused_by_name(change, message):
    x = torch.zeros(1)
    with pytest.raises(ValueError, match=message):
        lambda_returns(x, x, x, torch.tensor([0]), **{"gamma": 1.0, "lam": 0.9, **change})


# --- normalisation ------------------------------------------------------------------------------------------------


def test_normalised_turns_have_mean_0_and_standard_deviation_1():
    result = normalise_turns(torch.tensor([1.0, 2.0, 6.0], **F64))
    assert not result.degenerate
    assert float(result.mean) == 3
    assert float(result.std) == pytest.approx((14 / 3) ** 0.5)
    assert result.advantage.tolist() == pytest.approx([x / (14 / 3) ** 0.5 for x in (-2, -1, 3)])


def test_turn_listed_once_for_each_row_of_a_tree_counts_once():
    once = normalise_turns(torch.tensor([1.0, 2.0, 6.0], **F64)).advantage
    listed = torch.tensor([1.0, 2.0, 6.0, 1.0, 1.0], **F64)
    weight = torch.tensor([1 / 3, 1, 1, 1 / 3, 1 / 3], **F64)
    assert normalise_turns(listed, weight).advantage[:3].tolist() == pytest.approx(once.tolist(), abs=1e-12)


def test_turn_left_out_changes_nothing_and_is_0():
    result = normalise_turns(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([True, False, True]))
    assert result.advantage.tolist() == [-1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [[], [0.7], [0.1] * 3, [0.1 + 0.2, 0.3]], ids=["none", "one", "equal", "rounded"])
def test_turns_without_spread_are_0_and_flagged(advantage, dtype):
    result = normalise_turns(torch.tensor(advantage, dtype=dtype))
    assert result.degenerate
    assert result.advantage.tolist() == [0] * len(advantage)
    assert float(result.std) == 0
    assert result.mean.isfinite()
