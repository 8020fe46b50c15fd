"""HGPO: actions taken in the same state after the same last states, for histories of several lengths.

He et al.: Hierarchy-of-Groups Policy Optimization for Long-Horizon Agentic Tasks (2026), arXiv 2602.22817, as their code
has it. For k = 1 to K + 1 two turns of a prompt are of one group if their last k states are the same, the present one among
them. With R_t as in GiGPO

    A_k = (R_t - mean of the group) / its population standard deviation
    A   = sum over k of w_k A_k,    w_k = (k + 1)^alpha / sum of these

over the groups of two or more in which A_k isn't 0. There is no comparison of episodes. On trees [ours] a turn that
several paths share stands once in its groups, as in :mod:`verl_bpo.advantages.gigpo`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from verl_bpo.advantages.estimator import Estimate, Estimator, Values
from verl_bpo.advantages.gigpo import Discount, States, states_of
from verl_bpo.advantages.leaves import Leaves, relative
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.topology import ROOT

ESTIMATOR = "HGPO"


class HGPO(Estimator):
    """``algorithm.adv_estimator=hgpo``."""

    history: Annotated[int, Field(ge=0)] = 2
    """K: earlier states that a group may have in common beside the present one."""
    alpha: Annotated[float, Field(ge=0)] = 1.0
    """How much more a longer history weighs: 0 weighs all alike."""
    gamma: Discount = 0.95
    """Discount of returns."""
    norm: Literal["std", "none"] = "std"
    """Divide by the group's population standard deviation, or not."""
    states: States = "observation"
    """What makes two states the same, as for ``gigpo``."""

    def __call__(self, forest: Forest, values: Values | None = None) -> Estimate:
        leaves, state = Leaves(forest), states_of(forest, self.states)
        turns = (leaves.count > 0).nonzero().squeeze(1)
        returns = leaves.returns_to_go(self.gamma)[turns]
        total, weights = torch.zeros_like(returns), torch.zeros_like(returns)
        compared = torch.zeros_like(turns, dtype=torch.bool)
        for k, (group, known) in enumerate(_histories(forest, state, self.history + 1), start=1):
            here = known[turns].nonzero().squeeze(1)
            found, size = relative(returns[here], group[turns[here]], self.norm == "std", population=True)
            share = (k + 1) ** self.alpha * (found != 0)
            total[here] += share * found
            weights[here] += share
            compared[here] |= size > 1

        usable = forest.usable[forest.trajectory]
        valid = usable & torch.zeros_like(usable).index_put((turns,), compared)
        advantage = torch.zeros_like(leaves.count).index_put((turns,), total / weights.clamp(min=1))
        advantage = advantage.masked_fill(~valid, 0)
        share = float(valid.sum() / usable.sum().clamp(min=1))
        return Estimate.even("hgpo", advantage, valid, compared_share=share)


def _histories(forest: Forest, state: Tensor, longest: int) -> list[tuple[Tensor, Tensor]]:
    """Per k from 1 to ``longest``: int64 [N], one number for all turns of a prompt whose last k states are the same; and
    bool [N], whether there are as many."""
    found, group, at = [], forest.prompt, torch.arange(len(state), device=state.device)
    known = torch.ones_like(forest.usable[forest.trajectory])
    for _ in range(longest):
        group = torch.stack([group, state[at]], 1).unique(dim=0, return_inverse=True)[1]
        found.append((group, known))
        known = known & (forest.parent[at] != ROOT)
        at = torch.where(known, forest.parent[at], at)
    return found
