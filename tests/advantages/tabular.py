"""A small tabular decision process, and every tree that can be rolled in it, each with its probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

import torch
from torch import Tensor

from verl_bpo.tree.forest import Forest


@dataclass(frozen=True)
class Turn:
    state: int
    action: int
    reward: float
    children: tuple[Turn, ...] = ()
    """The trunk's continuation first, then the forks."""

    def trajectory_return(self) -> float:
        """Rewards from this turn to the end of the trajectory that it belongs to."""
        return self.reward + (self.children[0].trajectory_return() if self.children else 0.0)


Forks = Callable[[int, int, Turn], int]
"""(depth, nesting level of the trunk, the trunk's turn there with all that followed) -> number of forks."""


class TabularMDP:
    """Deterministic transitions and rewards, a softmax policy with one logit per state and action, fixed horizon."""

    def __init__(self, states: int = 4, actions: int = 2, horizon: int = 3, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.horizon, self.actions = horizon, actions
        self.next_state = torch.randint(states, (states, actions), generator=g)
        self.reward = torch.randn(states, actions, generator=g, dtype=torch.float64)
        self.logits = torch.randn(states, actions, generator=g, dtype=torch.float64)
        self.pi = self.logits.softmax(-1)

    def value(self, state: int, depth: int, pi: Tensor | None = None) -> Tensor:
        """V of ``state`` with ``horizon - depth`` turns to go."""
        pi = self.pi if pi is None else pi
        if depth == self.horizon:
            return torch.zeros((), dtype=torch.float64)
        return sum(pi[state, a] * self.action_value(state, a, depth, pi) for a in range(self.actions))

    def action_value(self, state: int, action: int, depth: int, pi: Tensor | None = None) -> Tensor:
        return self.reward[state, action] + self.value(int(self.next_state[state, action]), depth + 1, pi)

    def policy_gradient(self) -> Tensor:
        """dJ/dlogits [states, actions], by differentiating the exact value of the initial state 0."""
        logits = self.logits.clone().requires_grad_()
        self.value(0, 0, logits.softmax(-1)).backward()
        return logits.grad

    def score(self, state: int, action: int) -> Tensor:
        """d log pi(action | state) / dlogits [states, actions]."""
        out = torch.zeros_like(self.logits)
        out[state] = -self.pi[state]
        out[state, action] += 1
        return out

    def trees(self, forks: Forks, roots: int = 1) -> Iterator[tuple[float, tuple[Turn, ...]]]:
        """All outcomes of rolling ``roots`` trajectories from state 0 and the forks that ``forks`` asks for."""

        @cache
        def rollouts(state: int, depth: int, level: int) -> list[tuple[float, Turn]]:
            out = []
            for a in range(self.actions):
                p, r = float(self.pi[state, a]), float(self.reward[state, a])
                if depth + 1 == self.horizon:
                    out.append((p, Turn(state, a, r)))
                    continue
                below = int(self.next_state[state, a])
                for q, trunk in rollouts(below, depth + 1, level):
                    forked = rollouts(below, depth + 1, level + 1) if (k := forks(depth + 1, level, trunk)) else []
                    for alternatives in product(forked, repeat=k):
                        prob = p * q * prod(x for x, _ in alternatives)
                        out.append((prob, Turn(state, a, r, (trunk, *(t for _, t in alternatives)))))
            return out

        for samples in product(rollouts(0, 0, 0), repeat=roots):
            yield prod(x for x, _ in samples), tuple(t for _, t in samples)


def bare_forest(parent: Tensor, leaf_return: Tensor, **fields: Tensor) -> Forest:
    """A forest of which nothing is known but what sibling advantages go by."""
    leaf = torch.zeros(len(leaf_return), dtype=torch.bool)
    unknown = torch.full(parent.shape, float("nan"))
    given = {"parent": parent, "leaf_return": leaf_return, **fields}
    rest = {
        "reward": unknown,
        "score": unknown,
        "state_value": unknown,
        "truncated": leaf,
        "won": leaf,
        "depth": leaf.long(),
    }
    return Forest(**given, **rest)


@dataclass
class Outcomes:
    """All outcomes as one forest: outcome o is prompt o. Tensors over the turns [N] but for ``probability`` [O]."""

    forest: Forest
    probability: Tensor
    state: Tensor
    action: Tensor
    depth: Tensor
    forked: Tensor
    """The turn is one of several siblings below a turn (not in the initial state)."""

    def mean(self, x: Tensor) -> Tensor:
        """Expectation of the sum over a tree's turns of ``x`` [N, ...]."""
        return torch.tensordot(self.probability[self.forest.prompt], x, dims=1)

    def mean_given(self, x: Tensor, where: Tensor) -> float:
        """Mean of ``x`` [N] over the turns ``where``, outcomes weighted by probability."""
        p = self.probability[self.forest.prompt] * where
        return float((p * x).sum() / p.sum())


def enumerate_outcomes(mdp: TabularMDP, forks: Forks, roots: int = 1, fair: bool = True) -> Outcomes:
    """Every outcome of :meth:`TabularMDP.trees`; ``fair`` is the flag of trunks at branch points."""
    rows: list[tuple] = []
    returns: list[float] = []
    probability: list[float] = []

    def add(turn: Turn, parent: int, trajectory: int, depth: int, so_far: float, siblings: int, trunk: bool) -> None:
        rows.append(
            (parent, trajectory, len(probability), turn.state, turn.action, depth,
             siblings > 1 and parent >= 0, fair or siblings == 1 or not trunk)
        )  # fmt: skip
        index, so_far = len(rows) - 1, so_far + turn.reward
        if not turn.children:
            returns[trajectory] = so_far
        for i, child in enumerate(turn.children):
            if i:
                returns.append(0.0)
            own = trajectory if i == 0 else len(returns) - 1
            add(child, index, own, depth + 1, so_far, len(turn.children), i == 0)

    for prob, samples in mdp.trees(forks, roots):
        for sample in samples:
            returns.append(0.0)
            add(sample, -1, len(returns) - 1, 0, 0.0, len(samples), False)
        probability.append(prob)

    parent, trajectory, prompt, state, action, depth, forked, fair = (torch.tensor(c) for c in zip(*rows, strict=True))
    forest = bare_forest(
        parent=parent,
        trajectory=trajectory,
        prompt=prompt,
        leaf_return=torch.tensor(returns, dtype=torch.float64),
        usable=torch.ones(len(returns), dtype=torch.bool),
        fair=fair,
    )
    return Outcomes(forest, torch.tensor(probability, dtype=torch.float64), state, action, depth, forked)


def expected_gradient(mdp: TabularMDP, outcomes: Outcomes, coefficient: Tensor) -> Tensor:
    """E[sum over a tree's turns of coefficient * d log pi / dlogits], [states, actions]."""
    scores = torch.stack([torch.stack([mdp.score(s, a) for a in range(mdp.actions)]) for s in range(len(mdp.pi))])
    return outcomes.mean(coefficient[:, None, None] * scores[outcomes.state, outcomes.action])
