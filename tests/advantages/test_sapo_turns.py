"""What SAPO (Single-rollout Autoregressive Policy Optimization) makes of a batch of rollouts, single or trees."""

import pytest
import torch

from verl_bpo.advantages.sapo import SAPO, turn_boundaries
from verl_bpo.advantages.sapo_losses import sapo_value_loss
from verl_bpo.advantages.sapo_turns import sapo_targets
from verl_bpo.config.schema import build
from verl_bpo.options import ConfigError
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.rows import tree_rows
from verl_bpo.tree.topology import ROOT, Node, Tree

nan = float("nan")


def sapo_turns(trees, v, q, config):
    """What the trainer makes of the targets and the estimate: per turn, 0 where not trained; and the metrics."""
    values, metrics = sapo_targets(trees, v, q, config)
    estimate = config(trees, values)
    return {**values.for_loss(), "advantages": estimate.advantage}, metrics | estimate.metrics


def chain(rewards, end="terminated"):
    tree = Tree(prompt_ids=[1])
    index = tree.add_trajectory()
    parent = ROOT
    for i, reward in enumerate(rewards):
        last = i == len(rewards) - 1
        parent = tree.add_node(
            Node(parent, index, [5, 6], [-1.0] * 2, [0.5] * 2, [] if last else [7], reward=reward, score=0.5)
        )
    tree.trajectories[index].end = end
    return tree


def forked(trunk_end="terminated"):
    """A trunk of two turns with returns 1, and two forks of one turn after its first with returns 0."""
    tree = chain([0.0, 1.0], trunk_end)
    for _ in range(2):
        index = tree.add_trajectory(0)
        tree.add_node(Node(0, index, [9], [-1.0], [0.5], reward=0.0, score=0.5))
        tree.trajectories[index].end = "terminated"
    return tree


def batch(*trees):
    named = {f"p_{i}": tree for i, tree in enumerate(trees)}
    return Forest.of(named, dict.fromkeys(named, "p"))


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


EXACT = dict(gamma=0.5, lam=1.0, normalise=False)


def test_advantages_are_discounted_returns_minus_values():
    v, q = values(0.1, 0.2, 0.3), values(0.4, 0.5, 0.6)
    out, metrics = sapo_turns(batch(chain([1.0, 0.0, 2.0])), v, q, SAPO(**EXACT))
    torch.testing.assert_close(out["returns"], values(1.5, 1.0, 2.0))
    torch.testing.assert_close(out["advantages"], values(1.4, 0.8, 1.7))
    torch.testing.assert_close(out["action_targets"], values(1.25, 0.3, 2.0))
    assert torch.equal(out["old_state_values"], v) and torch.equal(out["old_action_values"], q)
    assert metrics["sapo/td_error"] == pytest.approx((0.85 + 0.2 + 1.4) / 3)
    assert metrics["sapo/truncated_turns"] == 0


def test_normalisation_is_over_the_turns_of_all_trajectories():
    out, metrics = sapo_turns(
        batch(chain([1.0]), chain([0.0, 0.0, 1.0])), values(0, 0, 0, 0), values(0, 0, 0, 0), SAPO(gamma=0.0)
    )
    torch.testing.assert_close(out["advantages"], values(1.0, -1.0, -1.0, 1.0))
    assert (metrics["sapo/advantage_mean"], metrics["sapo/advantage_std"]) == (0.5, 0.5)
    assert metrics["sapo/degenerate"] == 0


def test_a_truncated_trajectory_ends_there_or_goes_on_with_the_last_action_value():
    trees = batch(chain([0.0, 0.0], "truncated"), chain([0.0], "terminated"))
    v, q = values(0.2, 0.2, 0.2), values(0.6, 0.8, 0.7)
    out, metrics = sapo_turns(trees, v, q, SAPO(**EXACT, truncation="bootstrap"))
    torch.testing.assert_close(out["returns"], values(0.4, 0.8, 0.0))
    torch.testing.assert_close(out["action_targets"], values(0.4, 0.8, 0.0))
    torch.testing.assert_close(out["action_weights"], values(1.0, 0.0, 1.0))
    assert metrics["sapo/truncated_turns"] == pytest.approx(1 / 3)
    out, _ = sapo_turns(trees, v, q, SAPO(**EXACT))
    torch.testing.assert_close(out["returns"], values(0.0, 0.0, 0.0))
    torch.testing.assert_close(out["action_weights"], values(1.0, 1.0, 1.0))


def converged(trees, states, config, sweeps=300, rate=1.0):
    """V and Q a state (one action each) after ``sweeps`` steps of the losses' own gradients, and what the last one moved."""
    at = torch.tensor(states)
    table = torch.zeros(2, max(states) + 1, dtype=torch.float64, requires_grad=True)
    for _ in range(sweeps):
        before = table.detach().clone()
        v, q = table[:, at]
        out, _ = sapo_turns(trees, v.detach(), q.detach(), config)
        weight = out["action_weights"]
        loss = sapo_value_loss(
            v, q, out["returns"], out["action_targets"], turns=len(at), q_weight=weight, q_turns=int(weight.sum()),
            v_coef=1.0, q_coef=1.0,
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(loss.loss, table)
        table = (before - rate * gradient).requires_grad_()
    return *table.detach(), float((table.detach() - before).abs().max())


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam, bootstrap, sarsa_lambda", [(0.95, "sarsa", 0.0), (0.0, "v", 0.0), (1.0, "v", 0.7)])
def test_on_a_chain_cut_anywhere_values_converge_to_those_of_the_uncut_chain(gamma, lam, bootstrap, sarsa_lambda):
    """States 0, 1, 2 in a row with rewards 1, 0.5, 2, then the end: whole, cut after one turn, cut after two."""
    trees = batch(chain([1.0, 0.5, 2.0]), chain([1.0], "truncated"), chain([1.0, 0.5], "truncated"))
    config = SAPO(
        gamma=gamma, lam=lam, bootstrap=bootstrap, sarsa_lambda=sarsa_lambda, truncation="bootstrap", normalise=False
    )
    v, q, moved = converged(trees, [0, 1, 2, 0, 0, 1], config)
    exact = values(1 + gamma * (0.5 + gamma * 2), 0.5 + gamma * 2, 2.0)
    torch.testing.assert_close(q, exact, atol=1e-6, rtol=0)
    torch.testing.assert_close(v, exact, atol=1e-6, rtol=0)
    assert moved < 1e-9


def test_a_state_at_which_everything_is_cut_teaches_nothing_and_nothing_grows():
    """A loop that is always cut at once: what follows was never seen, so the values stay where they are."""
    trees = batch(*[chain([1.0], "truncated") for _ in range(3)])
    v, q, moved = converged(trees, [0, 0, 0], SAPO(truncation="bootstrap", normalise=False), sweeps=200)
    assert not v.any() and not q.any() and moved == 0


def test_only_the_last_turn_of_a_cut_trajectory_leaves_the_loss_of_action_values():
    """A trunk that was cut shares its first turn with two forks that ended by themselves; one of two whole trees."""
    config = SAPO(**EXACT, truncation="bootstrap")
    trees = batch(forked("truncated"), forked())
    v = q = torch.full((8,), 0.5, dtype=torch.float64)
    out, _ = sapo_turns(trees, v, q, config)
    torch.testing.assert_close(out["action_weights"], values(1, 0, 1, 1, 1, 1, 1, 1))
    torch.testing.assert_close(out["returns"][:2], values(0.25, 0.5))
    lost = batch(forked("failed"), forked("truncated"))
    out, _ = sapo_turns(lost, torch.cat([values(nan, nan), v[2:]]), torch.cat([values(nan, nan), q[2:]]), config)
    torch.testing.assert_close(out["action_weights"], values(0, 0, 1, 1, 1, 0, 1, 1))


def test_a_turn_shared_by_several_leaves_counts_once_and_each_row_trains_its_own_turns():
    tree = forked()
    trees, rows = batch(tree), tree_rows(tree)
    trained = [node for row in rows for node in row.spans.nodes]
    assert sorted(trained) == [0, 1, 2, 3]  # four turns, though three leaves run through the first
    out, metrics = sapo_turns(trees, values(0, 0, 0, 0), values(0, 0, 0, 0), SAPO(lam=1.0))
    assert metrics["sapo/turns"] == 4
    torch.testing.assert_close(out["returns"], values(1.0, 1.0, 0.0, 0.0))
    torch.testing.assert_close(out["advantages"], values(1.0, 1.0, -1.0, -1.0))


def test_turns_of_a_failed_trajectory_are_left_out():
    trees = batch(forked("failed"))
    out, metrics = sapo_turns(trees, values(nan, nan, 0.5, 0.1), values(nan, nan, 0.2, 0.2), SAPO(**EXACT))
    assert metrics["sapo/turns"] == 2
    torch.testing.assert_close(out["advantages"], values(0.0, 0.0, -0.5, -0.1))


@pytest.mark.parametrize("rewards", [[1.0], [0.0, 0.0], [1.0, 0.0]])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("truncation", ["terminal", "bootstrap"])
def test_one_trajectory_and_one_turn_give_numbers(rewards, end, truncation):
    zeros = torch.zeros(len(rewards), dtype=torch.float64)
    out, metrics = sapo_turns(batch(chain(rewards, end)), zeros, zeros, SAPO(truncation=truncation))
    assert all(x.isfinite().all() for x in out.values()) and all(x == x for x in metrics.values())
    assert metrics["sapo/degenerate"] == float(len(set(rewards)) == 1)


def test_a_batch_without_a_turn_gives_no_number_that_is_not_one():
    out, metrics = sapo_turns(batch(forked("failed")), *[torch.full((4,), nan, dtype=torch.float64)] * 2, SAPO())
    assert not any(x.any() for x in out.values())
    assert metrics["sapo/degenerate"] == 1 and all(x == x for x in metrics.values())


def test_a_row_leaves_the_boundaries_that_the_readout_finds():
    """The trainer marks turns as rows.py cut them; the readout finds them in the marks."""
    tree = forked()
    for row in tree_rows(tree):
        marks = row.spans.numbered().spread(torch.arange(1, len(row.spans.nodes) + 1))
        found = turn_boundaries((marks > 0).long()[None], marks[None])
        assert found.start.tolist() == row.spans.starts and (found.last + 1).tolist() == row.spans.ends


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("lam", 1.5, "bpo.sapo.lam=1.5 must be at most 1"),
        ("bootstrap", "td", "bpo.sapo.bootstrap='td' is not one of sarsa, v"),
        ("truncation", "cut", "is not one of bootstrap, terminal"),
        ("v_coef", -1, "bpo.sapo.v_coef=-1 must be at least 0"),
        ("value_clip", 0, "bpo.sapo.value_clip=0 must be above 0"),
        ("head_lr", 0, "bpo.sapo.head_lr=0 must be above 0"),
    ],
)
def test_a_bad_key_is_named(key, value, message):
    with pytest.raises(ConfigError, match=message):
        build({"sapo": {key: value}}, "plain")


def test_what_could_be_explained_is_logged_beside_what_v_explains():
    """Tasks that always end alike are explained by the task; within one task forks that end alike by where they began."""

    def logged(named):
        trees = Forest.of({f"{prompt}_{i}": tree for i, (prompt, tree) in enumerate(named)}, {
            f"{prompt}_{i}": prompt for i, (prompt, _) in enumerate(named)
        })  # fmt: skip
        zero = torch.zeros(len(trees.parent), dtype=torch.float64)
        _, metrics = sapo_targets(trees, zero, zero, SAPO())
        return metrics["sapo/explainable_task"], metrics["sapo/explainable_siblings"]

    assert logged([("p", chain([1.0])), ("p", chain([1.0])), ("q", chain([0.0])), ("q", chain([0.0]))]) == (1, 0)
    assert logged([("p", chain([1.0])), ("p", chain([0.0])), ("q", chain([1.0])), ("q", chain([0.0]))]) == (0, 0)
    assert logged([("p", chain([1.0]))]) == (0, 0)
    won = forked()
    for i in (2, 3):
        won.nodes[i].reward = 1.0
    task, siblings = logged([("p", won), ("p", forked())])
    assert task == 0 and siblings == pytest.approx(1)
