"""Root-to-leaf paths as rollouts: what estimators that compare whole episodes have in common on trees.

A trajectory that wasn't lost is one rollout, from the initial state to its leaf, wherever it forked. Without forks that is
what plain trajectories are.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from verl_bpo.advantages.bpo import by_level, noise, sum_by
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.topology import ROOT

EPSILON = 1e-6
"""Added to standard deviations, as the papers' code does."""


class Leaves:
    """The paths of a forest. A turn that several of them share stands in each."""

    def __init__(self, forest: Forest) -> None:
        self.forest = forest

    @cached_property
    def prompt(self) -> Tensor:
        """int64 [L]: of each trajectory; 0 where it has no turn."""
        trajectory = self.forest.trajectory
        return torch.zeros_like(self.forest.depth).index_put((trajectory,), self.forest.prompt)

    @cached_property
    def tree(self) -> Tensor:
        """int64 [L]: of each trajectory."""
        trees = torch.zeros_like(self.forest.depth)
        for number, turns in enumerate(self.forest.turns.values()):
            trees[self.forest.trajectory[turns]] = number
        return trees

    @cached_property
    def last(self) -> Tensor:
        """bool [N]: the turn is the last of a trajectory that wasn't lost."""
        ended = torch.ones_like(self.forest.usable[self.forest.trajectory])
        ended[self.forest.parent[self.forest.trunk]] = False
        return ended & self.forest.usable[self.forest.trajectory]

    @cached_property
    def _rounds(self) -> list[Tensor]:
        """The turns below other turns, deepest first."""
        return list(reversed(by_level(self.forest.parent)[1:]))

    def below(self, x: Tensor) -> Tensor:
        """[L] -> [N]: sum over the leaves at and below each turn."""
        total = x[self.forest.trajectory].masked_fill(~self.last, 0)
        for turns in self._rounds:
            total.index_add_(0, self.forest.parent[turns], total[turns])
        return total

    @cached_property
    def count(self) -> Tensor:
        """[N]: leaves at and below each turn; 0 where all are lost."""
        return self.below(torch.ones_like(self.forest.leaf_return))

    def mean_below(self, x: Tensor) -> Tensor:
        """[L] -> [N]: mean over the leaves at and below each turn; 0 where there is none."""
        return self.below(x) / self.count.clamp(min=1)

    def returns_to_go(self, gamma: float) -> Tensor:
        """[N]: R_t = r_t + gamma * mean of R over the turns that follow and lead to a leaf; 0 where all leaves are lost."""
        forest, leads = self.forest, self.count > 0
        reward = forest.reward.to(forest.leaf_return.dtype).masked_fill(~leads, 0)
        followed = forest.parent[leads & (forest.parent != ROOT)]
        children = torch.zeros_like(reward).index_add_(0, followed, torch.ones_like(reward[followed]))
        found = reward.clone()
        for turns in self._rounds:
            turns = turns[leads[turns]]
            at = forest.parent[turns]
            found.index_add_(0, at, gamma * found[turns] / children[at])
        return found


def relative(x: Tensor, group: Tensor, std: bool, population: bool = False) -> tuple[Tensor, Tensor]:
    """``x`` less the mean of its group, over the group's standard deviation if ``std``; 0 in a group of one.

    Args:
        x: [M].
        group: int64 [M], any numbers.
        population: the deviation is that of the group as a whole population, not of a sample.

    Returns:
        [M] the above, and int64 [M]: members of the group.
    """
    group = group.unique(return_inverse=True)[1]
    n = sum_by(group, torch.ones_like(group))
    deviation = x - (sum_by(group, x) / n)[group]
    # What rounding leaves of a member that is its group's mean is 0: HGPO counts the groups in which there is something.
    deviation = deviation.masked_fill(deviation.abs() <= (noise(x) * sum_by(group, x.abs()))[group], 0)
    if std:
        free = n if population else (n - 1).clamp(min=1)
        spread = (sum_by(group, deviation**2) / free).sqrt()
        deviation = deviation / (spread + EPSILON)[group]
    return deviation, n[group]
