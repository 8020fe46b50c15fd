"""From a forest of turns and what the readout said about them to what SAPO's update needs. Pure data, no verl, no Ray.

SAPO: Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842; not verl's loss mode ``sapo``.
"""

from __future__ import annotations

import torch

from verl_bpo.advantages.sapo import SAPO, lambda_returns, normalise_turns, sarsa_targets
from verl_bpo.advantages.sapo_losses import explained_variance
from verl_bpo.tree.forest import Forest


def sapo_turns(
    forest: Forest, v: torch.Tensor, q: torch.Tensor, config: SAPO
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What the update needs of every turn.

    Args:
        forest: N turns of L trajectories.
        v, q: float64 [N], NaN at turns that no row trains (of trajectories lost to a failure).

    Returns:
        float64 [N] each, 0 where not trained: ``advantages``, ``returns`` (G), ``action_targets`` (y),
        ``action_weights`` (1 where y is a target; 0 where it is Q itself, at a bootstrapped end), ``old_state_values`` (V),
        ``old_action_values`` (Q); and metrics.
    """
    trained = ~v.isnan()
    reward, trajectory = forest.reward[trained], forest.trajectory[trained]
    v, q = v[trained], q[trained]
    last = torch.full((len(forest.truncated),), -1).scatter_reduce(0, trajectory, torch.arange(len(trajectory)), "amax")
    cut = forest.truncated & (last >= 0)
    learns = torch.ones_like(trained[trained])
    if config.truncation == "bootstrap":
        # The row ends with the last action: the state after it was never in the model's context.
        learns[last[cut]] = False
    else:
        cut = torch.zeros_like(cut)
    returns = lambda_returns(
        reward, v, q, trajectory, gamma=config.gamma, lam=config.lam, bootstrap=config.bootstrap, truncated=cut
    )
    targets = sarsa_targets(reward, q, trajectory, gamma=config.gamma, sarsa_lambda=config.sarsa_lambda, truncated=cut)
    advantage = returns - v
    normal = normalise_turns(advantage)
    realised = lambda_returns(reward, v, q, trajectory, gamma=config.gamma, lam=1.0, truncated=cut)
    count = max(len(v), 1)
    metrics = {
        "sapo/v_explained_variance": explained_variance(v, realised),
        "sapo/q_explained_variance": explained_variance(q[learns], realised[learns]),
        "sapo/v_mean": float(v.sum() / count),
        "sapo/q_mean": float(q.sum() / count),
        "sapo/return_mean": float(realised.sum() / count),
        "sapo/td_error": float((targets - q)[learns].abs().sum() / learns.sum().clamp(min=1)),
        "sapo/advantage_mean": float(normal.mean),
        "sapo/advantage_std": float(normal.std),
        "sapo/degenerate": float(normal.degenerate),
        "sapo/truncated_turns": float((forest.truncated & (last >= 0)).sum()) / count,
        "sapo/turns": float(len(v)),
    }
    per_turn = {
        "advantages": normal.advantage if config.normalise else advantage,
        "returns": returns,
        "action_targets": targets,
        "action_weights": learns.to(targets),
        "old_state_values": v,
        "old_action_values": q,
    }
    out = {key: torch.zeros_like(forest.reward).masked_scatter(trained, x) for key, x in per_turn.items()}
    return out, metrics
