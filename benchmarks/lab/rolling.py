"""Rolling trees of the lab: :class:`verl_bpo.tree.rollout.TreeRollout` without waiting, sandboxes and tokens.

Trajectories have the budget in the order of their numbers there, so rolling them one after the other gives the same trees.
tests/benchmarks/test_lab.py compares the two.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch

from benchmarks.lab.worlds import Tasks
from verl_bpo.tree.branching import Branching
from verl_bpo.tree.budget import Budget
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.selectors import Choosing, DecisionPoint, NoBranching, Ranking
from verl_bpo.tree.topology import ROOT

Draw = Callable[[int, int], float]
"""(trajectory, depth) -> a number in [0, 1)."""


@dataclass
class World:
    """One task under one policy and critic, as plain lists."""

    following: list
    final: list
    cumulative: list
    """[states][actions]: the policy's distribution function."""
    entropy: list
    value: list
    """[turns + 1][states]."""
    turns: int


def world_of(tasks: Tasks, k: int, policy: np.ndarray, values: np.ndarray) -> World:
    cumulative = policy[k].cumsum(-1)
    cumulative[:, -1] = 1.0
    entropy = -(policy[k] * np.log(policy[k] + 1e-300)).sum(-1)
    lists = (
        tasks.following[k].tolist(),
        tasks.final.tolist(),
        cumulative.tolist(),
        entropy.tolist(),
        values[k].tolist(),
    )
    return World(*lists, tasks.family.turns)


@dataclass
class Roller:
    """Rolls one tree. Use once. Fields as in :class:`~verl_bpo.tree.rollout.TreeRollout`."""

    world: World
    branch: Branching
    budget: Budget
    draw: Draw
    chance: Draw
    fill: bool = True
    least_forks: int = 2
    nodes: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(parent, trajectory, depth, state, action) of every turn."""
    starts: list[tuple[int, int, int]] = field(default_factory=list)
    """(parent, depth, nesting) of every trajectory."""
    states: list[int] = field(default_factory=list)
    """State that every trajectory starts in."""
    returns: list[float] = field(default_factory=list)
    fair: dict[int, bool] = field(default_factory=dict)
    lessons: list[float] = field(default_factory=list)

    def run(self) -> Roller:
        self.points: list[tuple[DecisionPoint, int]] = []
        self._roots(self.branch.root_samples)
        if isinstance(self.branch.selector, Ranking):
            self._fork_ranked()
        filling = self.fill and not (isinstance(self.branch.selector, NoBranching) and self.budget.unit == "leaves")
        while filling and self.budget.affordable(0):
            self._roots(self.budget.limit)
        return self

    def _add(self, parent: int, depth: int, nesting: int, state: int, wanted: int) -> int:
        granted = min(wanted, self.budget.affordable(depth))
        for _ in range(granted):
            self.budget.reserve(depth)
            self.starts.append((parent, depth, nesting))
            self.states.append(state)
        return granted

    def _roots(self, wanted: int) -> None:
        self._add(ROOT, 0, 0, 0, wanted)
        self._roll()

    def _group(self, depth: int) -> int:
        affordable = self.budget.affordable(depth)
        fits, least = min(self.branch.forks, affordable), min(self.least_forks, self.branch.forks)
        if not self.fill and affordable - fits < least:
            fits = affordable
        return fits if fits >= least else 0

    def _fork(self, point: DecisionPoint, state: int) -> None:
        parent = self.nodes[point.node][0]
        nesting = self.starts[point.trajectory][2] + 1
        granted = self._add(parent, point.depth, nesting, state, self._group(point.depth))
        if granted and parent != ROOT:
            self.fair[parent] = self.branch.state_only

    def _fork_ranked(self) -> None:
        selector = self.branch.selector
        for number in count() if selector.rounds is None else range(selector.rounds):
            here = {p.node: (p, state) for p, state in self.points if self._group(p.depth)}
            picked = selector.picked(
                [p for p, _ in here.values()], lambda i, number=number: self.chance(-1 - number, i)
            )
            if not picked:
                return
            for place in (here[p.node] for p in picked):
                if not selector.FORKS_AGAIN:
                    self.points.remove(place)
                self._fork(*place)
            self._roll()

    def _roll(self) -> None:
        """All trajectories that have not been rolled, in order; those that they fork come last."""
        while len(self.returns) < len(self.starts):
            self._trajectory(len(self.returns))

    def _trajectory(self, index: int) -> None:
        world, selector = self.world, self.branch.selector
        ranks = isinstance(selector, Ranking)
        parent, start, nesting = self.starts[index]
        state, depth = self.states[index], start
        looks = nesting < self.branch.depth and not isinstance(selector, NoBranching)
        offers_initial = index == 0 and getattr(selector, "OFFERS_INITIAL", False)
        found = []
        while True:
            action = bisect(world.cumulative[state], self.draw(index, depth))
            node = len(self.nodes)
            self.nodes.append((parent, index, depth, state, action))
            if looks and (depth > start or offers_initial):
                point = DecisionPoint(
                    depth, world.entropy[state], world.value[depth][state], self.chance(index, depth), index, node,
                    initial_entropy=world.entropy[0],
                )  # fmt: skip
                if ranks:
                    found.append((point, state))
                elif isinstance(selector, Choosing):
                    self.lessons += [x for x in [selector.lesson(point)] if x is not None]
                    if selector.chooses(point):
                        self._fork(point, state)
            parent, depth, state = node, depth + 1, world.following[state][action]
            if state < 0 or depth == world.turns:
                break
        self.returns.append(1.0 if state < 0 else world.final[state])
        self.points += [(replace(p, success=state < 0), s) for p, s in found]
        self.budget.settle(start, depth - start, depth - start)


def forest_of(rollers: list[Roller]) -> tuple[Forest, dict[str, torch.Tensor]]:
    """The forest of a batch, one prompt a roller; ``task``, ``depth``, ``state`` and ``action`` of its turns, by name."""
    columns: list[list] = [[] for _ in range(9)]
    returns, ends = [], []
    for task, roller in enumerate(rollers):
        shift, first = len(columns[0]), len(returns)
        begun = set()
        for parent, trajectory, depth, state, action in roller.nodes:
            starts = trajectory not in begun
            begun.add(trajectory)
            fair_draw = starts or roller.fair.get(parent, True)
            row = (
                parent + shift if parent != ROOT else ROOT, trajectory + first, task, fair_draw,
                roller.world.entropy[state], roller.world.value[depth][state], depth, state, action,
            )  # fmt: skip
            for column, x in zip(columns, row):
                column.append(x)
        returns += roller.returns
        last = dict.fromkeys(range(len(roller.returns)), 0)
        for _, trajectory, depth, _, _ in roller.nodes:
            last[trajectory] = depth + 1
        ends += last.values()
    parent, trajectory, prompt, fair, score, value, depth, state, action = columns
    owner = torch.tensor(trajectory)
    leaf, size = torch.tensor(returns, dtype=torch.float64), len(returns)
    at_end = torch.tensor(depth) + 1 == torch.tensor(ends)[owner]
    forest = Forest(
        parent=torch.tensor(parent),
        trajectory=owner,
        prompt=torch.tensor(prompt),
        fair=torch.tensor(fair),
        reward=leaf[owner] * at_end,
        score=torch.tensor(score, dtype=torch.float64),
        state_value=torch.tensor(value, dtype=torch.float64),
        leaf_return=leaf,
        usable=torch.ones(size, dtype=torch.bool),
        truncated=torch.zeros(size, dtype=torch.bool),
        won=leaf >= 1,
        depth=torch.tensor(ends),
        observed=torch.tensor(state),
    )
    named = {"task": prompt, "depth": depth, "state": state, "action": action}
    return forest, {name: torch.tensor(x) for name, x in named.items()}
