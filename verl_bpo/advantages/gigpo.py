"""GiGPO: whole episodes compared with each other, and actions taken in the same state.

Feng, Xue, Liu, An: Group-in-Group Policy Optimization for LLM Agent Training (2025), arXiv 2505.10978. Of a prompt's N
rollouts

    A^E(tau_i) = (R(tau_i) - mean_j R(tau_j)) / F_norm                            (3)
    R_t = sum over k >= t of gamma^(k-t) r_k                                      (5)
    A^S(a_t) = (R_t - mean of R over the turns taken in the same state) / F_norm  (7)
    A(a_t) = A^E(tau) + omega A^S(a_t)                                            (8)

with the standard deviation of the group as F_norm, or 1. Numbers of formulas are those that the authors' code gives.

On trees [ours]: a rollout is a path from the initial state to a leaf. A turn that several share is trained once, with the mean
of their A^E, and stands once in the group of its state, with R_t a mean over what followed it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from verl_bpo.advantages.estimator import Estimate, Estimator, Values
from verl_bpo.advantages.leaves import Leaves, relative
from verl_bpo.options import ConfigError
from verl_bpo.tree.forest import Forest

ESTIMATOR = "GiGPO"

States = Literal["observation", "digest"]
Discount = Annotated[float, Field(ge=0, le=1)]


class GiGPO(Estimator):
    """``algorithm.adv_estimator=gigpo``."""

    omega: Annotated[float, Field(ge=0)] = 1.0
    """Weight of A^S."""
    gamma: Discount = 0.95
    """Discount of the returns that A^S compares. Episodes are compared undiscounted."""
    norm: Literal["std", "none"] = "std"
    """F_norm: the group's sample standard deviation, or 1."""
    states: States = "observation"
    """What makes two states the same: the text of the ``observation``, as in the paper, or the environment's ``digest``, which
    goes by the state itself."""

    def __call__(self, forest: Forest, values: Values | None = None) -> Estimate:
        leaves, state = Leaves(forest), states_of(forest, self.states)
        usable, std = forest.usable[forest.trajectory], self.norm == "std"

        rollouts = forest.usable.nonzero().squeeze(1)
        score, others = relative(forest.leaf_return[rollouts], leaves.prompt[rollouts], std)
        episode = leaves.mean_below(torch.zeros_like(forest.leaf_return).index_put((rollouts,), score))
        compared = leaves.below(torch.zeros_like(forest.leaf_return).index_put((rollouts,), (others > 1).to(score))) > 0

        turns = (leaves.count > 0).nonzero().squeeze(1)
        place = torch.stack([forest.prompt[turns], state[turns]], 1).unique(dim=0, return_inverse=True)[1]
        step, size = torch.zeros_like(episode), torch.zeros_like(state)
        step[turns], size[turns] = relative(leaves.returns_to_go(self.gamma)[turns], place, std)

        valid = usable & (compared | (size > 1))
        advantage = (episode + self.omega * step).masked_fill(~valid, 0)
        count = valid.sum().clamp(min=1)
        return Estimate.even(
            "gigpo",
            advantage,
            valid,
            episode_rms=float((episode[valid] ** 2).sum() / count) ** 0.5,
            step_rms=float((step[valid] ** 2).sum() / count) ** 0.5,
            state_group_size=float(size[valid].sum() / count),
            lone_states=float(((size == 1) & valid).sum() / count),
        )


def states_of(forest: Forest, states: States) -> Tensor:
    """int64 [N]: equal numbers in one prompt are equal states.

    Raises:
        ConfigError: the turns' states aren't known.
    """
    known = {"observation": forest.observed, "digest": forest.digest}[states]
    used = forest.usable[forest.trajectory]
    if known is None or (known[used] < 0).any():
        raise ConfigError(f"bpo.estimator.states={states}: these rollouts don't say in which states turns were taken")
    return known
