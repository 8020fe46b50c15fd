"""Policies and critics of the lab: tables for tasks that repeat, small networks for fresh ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.lab.worlds import Family, Tasks


class Policy:
    """Softmax policy, stepped by Adam on the policy gradient."""

    def __init__(self, family: Family, learning_rate: float) -> None:
        self.fresh = family.fresh
        if family.fresh:
            self.net = nn.Sequential(
                nn.Linear(family.features + 3, 32), nn.Tanh(), nn.Linear(32, family.actions)
            ).double()
            nn.init.zeros_(self.net[2].weight)
            nn.init.zeros_(self.net[2].bias)
            weights = list(self.net.parameters())
        else:
            size = (family.tasks, family.states, family.actions)
            self.table = torch.zeros(size, dtype=torch.float64, requires_grad=True)
            weights = [self.table]
        self.adam = torch.optim.Adam(weights, lr=learning_rate, betas=(0.9, 0.99))

    def logits(self, tasks: Tasks) -> Tensor:
        return self.net(torch.from_numpy(tasks.context)) if self.fresh else self.table

    def probabilities(self, tasks: Tasks) -> np.ndarray:
        """[tasks, states, actions]."""
        with torch.no_grad():
            return self.logits(tasks).softmax(-1).numpy()

    def learn(self, tasks: Tasks, task: Tensor, state: Tensor, action: Tensor, advantage: Tensor, turns: int) -> None:
        """One step on the mean over ``turns`` of advantage times log-probability."""
        chosen = self.logits(tasks).log_softmax(-1)[task, state, action]
        self.adam.zero_grad()
        (-(advantage * chosen).sum() / max(turns, 1)).backward()
        self.adam.step()


class TableCritic:
    """V of every turn and state: the mean of past returns, then their moving mean."""

    def __init__(self, family: Family, noise: float, rng: np.random.Generator) -> None:
        size = (family.tasks, family.turns + 1, family.states)
        self.mean, self.seen = np.zeros(size), np.zeros(size)
        self.error = noise * rng.normal(size=size)
        """A fixed error of V, for critics that know less than a table does."""

    def values(self, tasks: Tasks) -> np.ndarray:
        return self.mean + self.error * (self.seen > 0)

    def learn(self, tasks: Tasks, task: np.ndarray, turn: np.ndarray, state: np.ndarray, returns: np.ndarray) -> None:
        for place in zip(task, turn, state, returns):
            at, found = place[:3], place[3]
            self.seen[at] += 1
            self.mean[at] += (found - self.mean[at]) * max(1 / self.seen[at], 0.02)


class NetworkCritic:
    """V by a small network on a state's features and turn."""

    def __init__(self, family: Family, passes: int = 8) -> None:
        self.turns, self.passes = family.turns, passes
        self.net = nn.Sequential(nn.Linear(family.features + 4, 32), nn.Tanh(), nn.Linear(32, 1)).double()
        nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=0.01)

    def _features(self, tasks: Tasks) -> Tensor:
        """[tasks, turns + 1, states, features + 4]."""
        context = torch.from_numpy(tasks.context)[:, None].expand(-1, self.turns + 1, -1, -1)
        turn = torch.linspace(0, 1, self.turns + 1, dtype=torch.float64)[None, :, None, None]
        return torch.cat([context, turn.expand(*context.shape[:3], 1)], -1)

    def values(self, tasks: Tasks) -> np.ndarray:
        with torch.no_grad():
            return self.net(self._features(tasks)).squeeze(-1).numpy()

    def learn(self, tasks: Tasks, task: np.ndarray, turn: np.ndarray, state: np.ndarray, returns: np.ndarray) -> None:
        seen, target = self._features(tasks)[task, turn, state], torch.from_numpy(returns)
        for _ in range(self.passes):
            self.adam.zero_grad()
            (self.net(seen).squeeze(-1) - target).square().mean().backward()
            self.adam.step()
