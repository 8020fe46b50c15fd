"""Tree-GRPO's advantages of whole episodes, within their tree and within their prompt; ARPO's are the second part alone.

Ji et al.: Tree Search for LLM Agent Reinforcement Learning (2025), arXiv 2509.21240. Of a leaf i with return R_i

    A_i = (R_i - mean of its tree's leaves) / std + (R_i - mean of its prompt's leaves) / std

and every turn on its path is trained with it: a turn that several leaves share once for each. That is the sum of their
advantages, whatever share of it ARPO (Dong et al.: Agentic Reinforced Policy Optimization (2025), arXiv 2507.19849)
attributes to each of them: its "hard" attribution, the mean for each, and its "soft" one, each with its own, differ by
clipping alone where the loss is a mean over tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from verl_bpo.advantages.estimator import Estimate, Estimator, Values
from verl_bpo.advantages.leaves import Leaves, relative
from verl_bpo.tree.forest import Forest

ESTIMATOR = "TreeGRPO"


class TreeGRPO(Estimator):
    """``algorithm.adv_estimator=tree_grpo``."""

    groups: Literal["both", "tree", "prompt"] = "both"
    """Whom a leaf is compared with: the leaves of its ``tree``, of all trees of its ``prompt``, as in ARPO, or the sum of
    ``both``."""
    shared: Literal["each", "once"] = "each"
    """How often a turn counts that several leaves share: once for ``each``, as in both papers, or ``once``, with
    their mean."""
    norm: Literal["std", "none"] = "std"
    """Divide by the group's sample standard deviation, or not."""

    def __call__(self, forest: Forest, values: Values | None = None) -> Estimate:
        leaves, std = Leaves(forest), self.norm == "std"
        ended = forest.usable.nonzero().squeeze(1)
        used = {"both": (leaves.tree, leaves.prompt), "tree": (leaves.tree,), "prompt": (leaves.prompt,)}[self.groups]
        parts = [relative(forest.leaf_return[ended], group[ended], std) for group in used]
        score, compared = torch.zeros_like(forest.leaf_return), torch.zeros_like(forest.usable)
        score[ended] = sum(part for part, _ in parts)
        compared[ended] = sum(size - 1 for _, size in parts) > 0

        valid = forest.usable[forest.trajectory] & (leaves.below(compared.to(score)) > 0)
        advantage = leaves.mean_below(score).masked_fill(~valid, 0)
        weight = (leaves.count if self.shared == "each" else torch.ones_like(leaves.count)).masked_fill(~valid, 0)
        count = valid.sum().clamp(min=1)
        metrics = {
            "tree_grpo/advantage_mean": float((advantage * weight).sum() / count),
            "tree_grpo/advantage_rms": float(((advantage * weight) ** 2).sum() / count) ** 0.5,
            "tree_grpo/leaves_below": float(leaves.count[valid].sum() / count),
        }
        return Estimate(advantage, weight, valid, metrics, degenerate=not bool(advantage.abs().sum() > 0))
