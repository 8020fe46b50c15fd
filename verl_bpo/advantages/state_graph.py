"""State graph [ours]: trajectories that come to one state at one time are branches of it that cost nothing.

A sandbox says in which state each action was taken. The turns of a prompt that were taken in one state after equally many
turns are one *place*; merged there, trajectories and forks make a graph without cycles. With P_t the return to go of turn t,
and V of a place the mean of P over its turns,

    P_t = r_t + V(place that t leads to)          at the end of an episode r_t
    A_t = P_t - b_t
    b_t = (sum of P over the place's other turns + prior * b_before) / (their number + prior)

where b_before is what the turn before leaves of its baseline, b less its reward; initial states, where there is none, take
the mean of the others. So V is what a tree's mean return is, and b its siblings' mean: on a tree whose states never meet
again this is BPO with tree-mean returns, shrunk towards the baseline above.

Time is part of a place because wasted turns are part of what there is to learn: where a limit ends episodes, the same state is
worth less later. Where a branch point was chosen by what its trunk did there or led to, the trunk stands in no baseline and
keeps the one from before, as in BPO; and its forks, which are there because of how it ended, stand in no V. What is exact is
proved by enumeration in ``tests/advantages/test_state_graph.py``.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from verl_bpo.advantages.bpo import by_level, levels, noise, sum_by
from verl_bpo.advantages.estimator import Estimate, Estimator, Values
from verl_bpo.advantages.gigpo import States, states_of
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.topology import ROOT

ESTIMATOR = "StateGraph"


class StateGraph(Estimator):
    """``algorithm.adv_estimator=state_graph``."""

    states: States = "digest"
    """What makes two states the same: the environment's ``digest``, or the text that was ``observation``, which may mix up
    states that look alike."""
    prior: Annotated[float, Field(ge=0)] = 1.0
    """How many turns the baseline of the turn before counts for. 0: it is asked only where a state has no other turn."""
    pooled: bool = True
    """P goes on with the mean of all turns at the next place. Off: with the turn's own trajectory alone, unbiased also where a
    state doesn't say all that its future depends on, at a higher variance."""

    def __call__(self, forest: Forest, values: Values | None = None) -> Estimate:
        usable = forest.usable[forest.trajectory]
        place = places(forest, states_of(forest, self.states))
        rounds = by_level(forest.parent)
        below = usable & (forest.parent != ROOT)
        """Turns that another turn led to."""

        counted = usable & ~_chosen_for_an_outcome(forest, below)
        # A place that nothing else came to: what was forked there is all that is known of it.
        counted |= usable & (sum_by(place, counted) == 0)[place]
        members = sum_by(place, counted)
        children = torch.zeros_like(place).index_add_(0, forest.parent[below], torch.ones_like(place[below]))
        reward = forest.reward.to(forest.leaf_return.dtype)
        p = reward.masked_fill(~usable, 0)
        total = p.new_zeros(len(members))
        for turns in reversed(rounds):  # deepest first: what is below a turn is known when it is met
            total.index_add_(0, place[turns], p[turns] * counted[turns])
            led = turns[below[turns]]
            worth = (total / members.clamp(min=1))[place[led]] if self.pooled else p[led]
            above = forest.parent[led]
            p.index_add_(0, above[usable[above]], (worth / children[above])[usable[above]])

        fair = usable & forest.fair
        others = (sum_by(place, fair)[place] - fair.long()).masked_fill(~forest.fair, 0)
        rest = (sum_by(place, p * fair)[place] - p * fair).masked_fill(~forest.fair, 0)
        baseline = torch.full_like(p, torch.nan)
        for turns in rounds:
            up = forest.parent[turns]
            before = torch.where(up == ROOT, torch.nan, baseline[up] - reward[up])
            known, weight = ~before.isnan(), torch.full_like(before, self.prior)
            weight = torch.where(known & (others[turns] == 0), 1.0, torch.where(known, weight, 0.0))
            count = others[turns] + weight
            baseline[turns] = (rest[turns] + weight * before.nan_to_num(0.0)) / count.masked_fill(count == 0, torch.nan)

        valid = usable & ~baseline.isnan()
        advantage = (p - baseline).masked_fill(~valid, 0)
        advantage = advantage.masked_fill(advantage.abs() <= noise(p) * p.abs().max() if p.numel() else ~valid, 0)
        later = valid & below
        return Estimate.even(
            "state_graph",
            advantage,
            valid,
            met_again=float((later & (others > 0)).sum() / later.sum().clamp(min=1)),
            others=float(others[valid].sum() / valid.sum().clamp(min=1)),
        )


def _chosen_for_an_outcome(forest: Forest, below: Tensor) -> Tensor:
    """bool [N]: first turns of forks whose branch point was chosen by what its trunk did there or led to; of the turns
    ``below`` another one, bool [N]."""
    unfair = torch.zeros_like(below)
    unfair[forest.parent[below & ~forest.fair]] = True
    return below & ~forest.trunk & unfair[forest.parent]


def places(forest: Forest, state: Tensor) -> Tensor:
    """int64 [N]: equal for turns of one prompt that were taken in one ``state``, [N], after equally many turns. The initial
    state of a prompt is one, whatever is said of it."""
    told = torch.where(forest.parent == ROOT, ROOT, state)
    return torch.stack([forest.prompt, levels(forest.parent), told], 1).unique(dim=0, return_inverse=True)[1]
