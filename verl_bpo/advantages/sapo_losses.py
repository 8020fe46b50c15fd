"""Value losses of SAPO (Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842; not verl's loss mode ``sapo``).

    L = L_ppo + c_v * mean_t loss(V_t, G_t) + c_q * mean_t loss(Q_t, y_t)

A turn counts once, whatever its length; in the mean of Q, the last turn of a trajectory that a limit cut counts not at all
where its target is Q itself. G and y: :mod:`verl_bpo.advantages.sapo`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def turn_value_loss(
    prediction: Tensor, target: Tensor, old: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Half the squared error of each turn, and where it was clipped.

    With ``clip`` PPO's pessimistic form: the larger of the errors of the prediction and of the prediction held within
    ``clip`` of ``old``, so that a turn whose value has moved further than that towards its target stops pulling.

    Args:
        prediction: [M], with gradient.
        target: [M], a constant.
        old: [M], the prediction when the batch was sampled. Used only with ``clip``.

    Returns:
        loss float [M], clipped bool [M].
    """
    error = (prediction - target) ** 2
    if clip is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    held = (old + (prediction - old).clamp(-clip, clip) - target) ** 2
    return 0.5 * torch.maximum(error, held), held > error


@dataclass(frozen=True)
class ValueLoss:
    """One batch's share of the means over ``turns``: shares of several batches add up."""

    loss: Tensor
    """Scalar with gradient: c_v * v_loss + c_q * q_loss."""
    v_loss: Tensor
    q_loss: Tensor
    v_clipped: Tensor
    """Share of turns whose V was clipped."""
    q_clipped: Tensor
    """Share of the turns that count for Q."""


def sapo_value_loss(
    v: Tensor,
    q: Tensor,
    v_target: Tensor,
    q_target: Tensor,
    *,
    turns: int,
    q_weight: Tensor,
    q_turns: int,
    v_coef: float,
    q_coef: float,
    v_old: Tensor | None = None,
    q_old: Tensor | None = None,
    clip: float | None = None,
) -> ValueLoss:
    """Losses of M turns out of ``turns``. Defined, and connected to the graph, also for M = 0.

    Args:
        v, q: [M], V_t and Q_t with gradient.
        v_target, q_target: [M], G_t and y_t.
        turns: number of turns that the mean of V is over: those of the whole mini-batch, on all ranks.
        q_weight: [M], 1 where the turn counts for Q and 0 where it does not.
        q_turns: sum of ``q_weight`` over the whole mini-batch, on all ranks.
        v_old, q_old: [M], what V and Q were when the targets were computed. Used only with ``clip``.
    """
    v_loss, v_clipped = turn_value_loss(v, v_target, v_old, clip)
    q_loss, q_clipped = (x * q_weight for x in turn_value_loss(q, q_target, q_old, clip))
    v_mean, v_share = (x.sum() / max(turns, 1) for x in (v_loss, v_clipped))
    q_mean, q_share = (x.sum() / max(q_turns, 1) for x in (q_loss, q_clipped))
    return ValueLoss(v_coef * v_mean + q_coef * q_mean, v_mean.detach(), q_mean.detach(), v_share, q_share)


def explained_variance(prediction: Tensor, target: Tensor) -> float:
    """1 - Var(target - prediction) / Var(target); 0 where the targets don't vary, so that there is nothing to explain."""
    if target.numel() < 2:
        return 0.0
    spread = target.var(correction=0)
    if spread <= 64 * torch.finfo(target.dtype).eps * target.square().mean():
        return 0.0
    return float(1 - (target - prediction).var(correction=0) / spread)
