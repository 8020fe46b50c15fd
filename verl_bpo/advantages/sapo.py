"""SAPO (Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842): causal boundaries, returns, normalisation.

Not "Soft Adaptive Policy Optimization" (a policy loss) nor "Search Agent Policy Optimization", which share the letters.

With turns t = 1..T of one trajectory, V_t read before action t and Q_t after it:

    G_t = r_t + gamma * ((1 - lambda) * X_{t+1} + lambda * G_{t+1})        X = Q (``sarsa``, the default) or V
    G_T = r_T                        terminated
    G_T = r_T + gamma * V_{T+1}      truncated by a limit, and the state after it was read
    G_T = Q_T                        truncated, and it was not: Q_T contains r_T already
    A_t = G_t - V_t                  then normalised over all turns of the global batch: :func:`normalise_turns`
    y_t = r_t + gamma * Q_{t+1}      target of Q_t; y_T = G_T. Where that is Q_T itself, turn T leaves the loss of Q

Turns come as flat tensors [M] with the id of the trajectory that each belongs to; the turns of a trajectory stand in
order, those of others may stand between them. For plain rollouts a trajectory is a row of the batch. On a tree it is the
rollout that sampled the turn: a turn shared by several leaves is one entry and its return follows the trunk that owns it,
an unbiased sample for whatever reason and however often it was forked. A mean over the forks would not be one where the
branch point was chosen by looking at the trunk's action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

import torch
from pydantic import Field, model_validator
from torch import Tensor

from verl_bpo.advantages.estimator import Estimate, Estimator, Values
from verl_bpo.options import ConfigError
from verl_bpo.tree.forest import Forest

ESTIMATOR = "SAPO"

Bootstrap = Literal["sarsa", "v"]
Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class TurnBoundaries:
    """Where the M actions of a batch lie, ordered by row, then position. Positions count from the row's first one.

    The state of a turn is read at ``start - 1``, the last position before its action; its action value at ``last``. Where
    ``start`` is 0 the state stands at the last position of the prompt, one before the mask's first.
    """

    row: Tensor
    """int64 [M]: 0..B-1."""
    start: Tensor
    """int64 [M]: position of the action's first token."""
    last: Tensor
    """int64 [M]: position of the action's last token, ``start`` for an action of one token."""
    turn: Tensor
    """int64 [M]: index of the turn in its row, from 0."""


def turn_boundaries(mask: Tensor, turn_id: Tensor | None = None, offsets: Tensor | None = None) -> TurnBoundaries:
    """Find the actions of a batch in its response mask.

    An action is a run of positions with mask 1 and, where ``turn_id`` is given, one id: two actions without an observation
    between them can be told apart only so. A row without a single 1 has no turn.

    Args:
        mask: [B, T], or packed [sum of the lengths]; nonzero at action tokens.
        turn_id: integers of the same shape; values at mask 0 don't matter.
        offsets: int64 [B + 1], for packed input only: row b holds the positions offsets[b] to offsets[b + 1] - 1.

    Raises:
        ValueError: shapes don't fit.
    """
    if turn_id is not None and turn_id.shape != mask.shape:
        raise ValueError(f"turn_id is {tuple(turn_id.shape)}, mask {tuple(mask.shape)}: they must have one shape")
    if (mask.dim() == 1) != (offsets is not None) or mask.dim() > 2:
        raise ValueError(f"mask is {tuple(mask.shape)}: give [B, T] without offsets or [tokens] with them")
    if offsets is None:
        offsets = torch.arange(mask.shape[0] + 1, device=mask.device) * mask.shape[1]
    elif offsets[0] != 0 or offsets[-1] != mask.numel() or (offsets.diff() < 0).any():
        raise ValueError(f"offsets must rise from 0 to {mask.numel()}, the length of mask")

    on = mask.flatten() != 0
    joined = on[1:] & on[:-1]
    if turn_id is not None:
        ids = turn_id.flatten()
        joined &= ids[1:] == ids[:-1]
    first_of_row = torch.zeros(on.numel() + 1, dtype=torch.bool, device=on.device).index_fill_(0, offsets, True)
    joined &= ~first_of_row[1:-1]

    edge = joined.new_zeros(min(on.numel(), 1))
    start = (on & ~torch.cat([edge, joined])).nonzero().squeeze(1)
    last = (on & ~torch.cat([joined, edge])).nonzero().squeeze(1)
    row = torch.searchsorted(offsets, start, right=True) - 1
    turns = row.bincount(minlength=offsets.numel() - 1)
    turn = torch.arange(start.numel(), device=on.device) - (turns.cumsum(0) - turns)[row]
    return TurnBoundaries(row=row, start=start - offsets[row], last=last - offsets[row], turn=turn)


@torch.no_grad()
def lambda_returns(
    reward: Tensor,
    value: Tensor,
    q: Tensor,
    trajectory: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: Bootstrap = "sarsa",
    truncated: Tensor | None = None,
    value_at_end: Tensor | None = None,
) -> Tensor:
    """G of every turn, float [M] in the dtype of ``reward``. See the module for the formula and for trees.

    lambda = 1 gives the discounted return, lambda = 0 gives r_t + gamma * X_{t+1}; with ``bootstrap='v'`` G_t - V_t is
    GAE(gamma, lambda) over turns. V and Q are those of the policy that sampled: constants, no gradient flows.

    Args:
        reward: [M], r_t: everything that the environment paid for turn t.
        value: [M], V_t. Used only with ``bootstrap='v'``.
        q: [M], Q_t. Used only with ``bootstrap='sarsa'``.
        trajectory: int64 [M], 0..R-1.
        gamma: discount of a turn, in [0, 1].
        lam: lambda, in [0, 1].
        bootstrap: what stands for the rest after the next turn began.
        truncated: bool [R], False for trajectories that ended by the task's own rules. None: all of them did.
        value_at_end: [R], V_{T+1}, read after the last observation; ignored where not truncated. None: nobody read it, and
            Q_T stands for all of G_T.

    Raises:
        ValueError: an argument lies outside its range, or ``value_at_end`` comes without ``truncated``.
    """
    if bootstrap not in get_args(Bootstrap):
        raise ValueError(f"bootstrap={bootstrap!r} is not one of {', '.join(get_args(Bootstrap))}")
    for key, x in (("gamma", gamma), ("lam", lam)):
        if not 0 <= x <= 1:
            raise ValueError(f"{key}={x} must lie in [0, 1]")
    if truncated is None and value_at_end is not None:
        raise ValueError("value_at_end needs truncated: it holds only for trajectories that a limit cut")

    following = _following(trajectory)
    ends = following < 0
    estimate = (q if bootstrap == "sarsa" else value).to(reward.dtype)
    at_end = reward
    if truncated is not None:
        cut = q.to(reward.dtype) if value_at_end is None else reward + gamma * value_at_end.to(reward.dtype)[trajectory]
        at_end = torch.where(truncated[trajectory], cut, reward)
    g = torch.where(ends, at_end, reward + gamma * (1 - lam) * estimate[following])

    # The sum over the turns ahead, for all turns at once: each round reaches twice as far, log2(T) rounds.
    decay = gamma * lam
    while not ends.all():
        g = torch.where(ends, g, g + decay * g[following])
        decay *= decay
        following = torch.where(ends, following, following[following])
        ends = following < 0
    return g


def sarsa_targets(
    reward: Tensor,
    q: Tensor,
    trajectory: Tensor,
    *,
    gamma: float,
    sarsa_lambda: float = 0.0,
    truncated: Tensor | None = None,
    value_at_end: Tensor | None = None,
) -> Tensor:
    """Targets y of the action values, [M]: on-policy SARSA, or SARSA(lambda) with ``sarsa_lambda`` above 0.

    The recursion is that of G with ``bootstrap='sarsa'`` and a lambda of its own, so arguments and errors are those of
    :func:`lambda_returns`.
    """
    return lambda_returns(
        reward, q, q, trajectory, gamma=gamma, lam=sarsa_lambda, truncated=truncated, value_at_end=value_at_end
    )


@dataclass(frozen=True)
class NormalisedTurns:
    advantage: Tensor
    """[M]: mean 0 and standard deviation 1 over the turns that count; 0 where the weight is 0."""
    mean: Tensor
    """Scalar: mean before."""
    std: Tensor
    """Scalar: standard deviation before, 0 where ``degenerate``."""
    degenerate: bool
    """No spread to divide by: no turn, one turn, or all advantages equal. Every advantage is 0 then; worth a warning."""


@torch.no_grad()
def normalise_turns(advantage: Tensor, weight: Tensor | None = None) -> NormalisedTurns:
    """Batch normalisation over the turns of the global batch; a turn counts once, whatever its length.

    Args:
        advantage: [M], all turns of the batch, not of one worker. May be anything where the weight is 0.
        weight: [M], None for 1. 0 (or False: a mask of valid turns will do) leaves a turn out. A turn of a tree that is
            listed k times, once for each row that repeats it, counts once with weight 1/k.
    """
    weight = torch.ones_like(advantage) if weight is None else weight.to(advantage.dtype)
    counts = weight > 0
    kept = advantage.masked_fill(~counts, 0)
    total = weight.sum()
    mean = (weight * kept).sum() / torch.where(total > 0, total, 1)
    centred = (kept - mean).masked_fill(~counts, 0)
    std = ((weight * centred**2).sum() / torch.where(total > 0, total, 1)).sqrt()
    # What rounding leaves of equal numbers is no spread.
    degenerate = bool(std <= 64 * torch.finfo(std.dtype).eps * kept.abs().sum() / counts.sum().clamp(min=1))
    if degenerate:
        return NormalisedTurns(torch.zeros_like(advantage), mean, torch.zeros_like(std), True)
    return NormalisedTurns(centred / std, mean, std, False)


class SAPO(Estimator):
    """``algorithm.adv_estimator=sapo``: Single-rollout Autoregressive Policy Optimization (arXiv 2608.19842). Not verl's
    policy loss of the same name."""

    KEYS: ClassVar[str] = "sapo"
    NEEDS: ClassVar[frozenset[str]] = frozenset({"value"})

    gamma: Fraction = 1.0
    """Discount of a turn."""
    lam: Fraction = 0.95
    """lambda of the returns G that advantages and the state values' targets are made of."""
    bootstrap: Bootstrap = "sarsa"
    """What stands in G for the rest after the next turn began: ``sarsa``, its action value Q, or ``v``, its state value."""
    sarsa_lambda: Fraction = 0.0
    """lambda of the action values' targets: 0 is SARSA's one step."""
    truncation: Literal["bootstrap", "terminal"] = "terminal"
    """A trajectory cut by a limit: ``terminal`` counts nothing after it, so running out of turns is a failure, as it is for
    every other estimator here. ``bootstrap`` takes the last turn's action value Q for its return, and that turn teaches Q
    nothing: for limits that are no part of the task. Where episodes fail only by running out, it leaves nothing that holds
    the values down."""
    normalise: bool = True
    """Advantages to mean 0 and standard deviation 1 over all turns of the batch."""
    v_coef: NotNegative = 0.5
    """c_v: weight of the state values' loss beside the policy's."""
    q_coef: NotNegative = 0.5
    """c_q: weight of the action values' loss beside the policy's."""
    value_clip: Above0 | None = 0.5
    """How far a value may move from what it was when the batch was sampled before its loss is clipped. None: any."""
    value_grad_scale: NotNegative = 1.0
    """Factor on the value losses' gradient into the backbone: 1 shares it (the paper), 0 leaves the heads a probe."""
    head_fit: Literal["adam", "ridge"] = "adam"
    """How the heads learn: by ``adam``, with the losses above, or solved after each update as a ``ridge`` regression of
    returns (tree means) on hidden states. The losses then train the backbone alone."""
    head_memory: Annotated[int, Field(ge=1)] = 8
    """``ridge``: training steps that count. One weighs 1 - 1 / head_memory of the next."""
    head_ridge: Above0 | None = None
    """``ridge``: its strength in means of the hidden states' variances. None: the one that predicted new batches best."""
    head_lr: Above0 | None = None
    """``adam``: learning rate of the heads. None: 0.1 over the hidden size, so that one step of Adam moves a value by about
    0.1 at most, whatever the model's width."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Training steps in which only the heads learn, before the policy starts to."""

    @model_validator(mode="after")
    def _check(self) -> SAPO:
        if self.head_fit == "ridge" and (self.gamma != 1 or self.truncation != "terminal"):
            raise ConfigError(
                f"bpo.sapo.head_fit=ridge fits undiscounted returns of whole trajectories: set bpo.sapo.gamma=1 (is "
                f"{self.gamma:g}) and bpo.sapo.truncation=terminal (is {self.truncation})"
            )
        return self

    def __call__(self, forest: Forest, values: Values | None = None) -> Estimate:
        """A = G - V, normalised over the turns of the batch."""
        trained = ~values.v.isnan()
        advantage = (values.returns - values.v).masked_fill(~trained, 0)
        normal = normalise_turns(advantage, trained)
        metrics = {
            "sapo/advantage_mean": float(normal.mean),
            "sapo/advantage_std": float(normal.std),
            "sapo/degenerate": float(normal.degenerate),
        }
        advantage = normal.advantage if self.normalise else advantage
        return Estimate(advantage, trained.to(advantage), trained, metrics, degenerate=normal.degenerate)


def _following(trajectory: Tensor) -> Tensor:
    """int64 [M]: index of the next turn of the same trajectory, -1 at its last."""
    order = trajectory.argsort(stable=True)
    ranked = trajectory[order]
    same = ranked[1:] == ranked[:-1]
    following = torch.full_like(trajectory, -1)
    following[order[:-1][same]] = order[1:][same]
    return following
