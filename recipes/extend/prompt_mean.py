"""An advantage estimator of your own: each trajectory's return less the mean of its prompt's, scaled."""

import torch

from verl_bpo.advantages.estimator import Estimate, Estimator


class PromptMean(Estimator):
    scale: float = 1.0
    """Factor on every advantage. A field is a key: bpo.estimator.scale."""

    def __call__(self, forest, values=None):
        valid = forest.usable[forest.trajectory]  # [turns]: lost trajectories teach nothing
        returns = forest.leaf_return[forest.trajectory].masked_fill(~valid, 0)
        starts = valid & ~forest.trunk  # one turn a trajectory, so that long ones count once
        total, count = (
            returns.new_zeros(int(forest.prompt.max()) + 1).index_add_(0, forest.prompt[starts], x[starts])
            for x in (returns, torch.ones_like(returns))
        )
        mean = (total / count.clamp(min=1))[forest.prompt]
        advantage = (self.scale * (returns - mean)).masked_fill(~valid, 0)
        return Estimate(advantage, valid.to(advantage), valid, {"prompt_mean/spread": float(advantage.abs().mean())})
