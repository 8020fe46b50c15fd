"""From a forest of turns and what the readout said about them to what the readout is to learn. Pure data, no verl, no Ray.

SAPO: Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842; not verl's loss mode ``sapo``.
"""

from __future__ import annotations

import torch

from verl_bpo.advantages.bpo import prefix_explained_share, task_explained_share
from verl_bpo.advantages.estimator import Values
from verl_bpo.advantages.sapo import SAPO, lambda_returns, sarsa_targets
from verl_bpo.advantages.sapo_losses import explained_variance
from verl_bpo.tree.forest import Forest


def sapo_targets(forest: Forest, v: torch.Tensor, q: torch.Tensor, config: SAPO) -> tuple[Values, dict[str, float]]:
    """What the readout is to learn of every turn, and how well it knows it already.

    Args:
        forest: N turns of L trajectories.
        v, q: float64 [N], NaN at turns that no row trains (of trajectories lost to a failure).
    """
    trained = ~v.isnan()
    reward, trajectory = forest.reward[trained], forest.trajectory[trained]
    v_t, q_t = v[trained], q[trained]
    last = torch.full((len(forest.truncated),), -1).scatter_reduce(0, trajectory, torch.arange(len(trajectory)), "amax")
    cut = forest.truncated & (last >= 0)
    learns = torch.ones_like(trained[trained])
    if config.truncation == "bootstrap":
        # The row ends with the last action: the state after it was never in the model's context.
        learns[last[cut]] = False
    else:
        cut = torch.zeros_like(cut)
    returns = lambda_returns(
        reward, v_t, q_t, trajectory, gamma=config.gamma, lam=config.lam, bootstrap=config.bootstrap, truncated=cut
    )
    targets = sarsa_targets(
        reward, q_t, trajectory, gamma=config.gamma, sarsa_lambda=config.sarsa_lambda, truncated=cut
    )
    realised = lambda_returns(reward, v_t, q_t, trajectory, gamma=config.gamma, lam=1.0, truncated=cut)
    count = max(len(v_t), 1)
    metrics = {
        "sapo/explainable_task": float(task_explained_share(forest)),
        "sapo/explainable_siblings": float(prefix_explained_share(forest)),
        "sapo/v_explained_variance": explained_variance(v_t, realised),
        "sapo/q_explained_variance": explained_variance(q_t[learns], realised[learns]),
        "sapo/v_mean": float(v_t.sum() / count),
        "sapo/q_mean": float(q_t.sum() / count),
        "sapo/return_mean": float(realised.sum() / count),
        "sapo/td_error": float((targets - q_t)[learns].abs().sum() / learns.sum().clamp(min=1)),
        "sapo/truncated_turns": float((forest.truncated & (last >= 0)).sum()) / count,
        "sapo/turns": float(len(v_t)),
    }

    def whole(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(v, float("nan")).masked_scatter(trained, x.to(v))

    return Values(v, q, whole(returns), whole(targets), whole(learns)), metrics
