"""The tree critic [ours]: V is the baseline as far as it is right, siblings are where it is not, and all serve the return.

For every turn t of a trajectory that wasn't lost

    A_t = G_t - b_t,    G_t = mean over the children of the turn's end, recursively,    b_t = w V(s_t) + (1 - w) L_t

with V by the value readout before the batch was sampled, and L what the trees say of the state without the turn's own
return: the leave-one-out mean of its segment's siblings (:mod:`verl_bpo.advantages.bpo`), else of the prompt's other root
samples. Exact claims about it are proved by enumeration in ``tests/advantages/test_tree_critic.py``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from verl_bpo.advantages.bpo import sibling_advantages, sum_by, tree_means
from verl_bpo.advantages.estimator import Estimate, Estimator, Values
from verl_bpo.advantages.sapo import Fraction
from verl_bpo.advantages.sapo_losses import explained_variance
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.topology import ROOT

ESTIMATOR = "TreeCritic"
ROUNDING = 1e-9
"""A gate takes a smaller advantage for what rounding left of none."""


class TreeCritic(Estimator):
    """``algorithm.adv_estimator=tree_critic``."""

    PRESET: ClassVar[str] = "critic"
    NEEDS: ClassVar[frozenset[str]] = frozenset({"value"})

    weight_of_v: Fraction | None = None
    """w. None: the one that would have predicted the returns of the batch's other prompts best, 0 where there are none. An
    ignorant V then costs nothing. Turns that have siblings and others are measured apart."""
    children: Literal["all", "fair"] = "all"
    """Whose mean G is below a branch point that was chosen by what its trunk did: of ``all`` children, or the trunk's own
    continuation, the only ``fair`` return of what stands above."""
    gate: Literal["none", "prompt", "dead_zone", "trust"] = "trust"
    """A prompt without a win is left out by ``prompt`` and kept by ``none``. ``trust`` weighs it by the chance that V saw of
    a win among its n root samples, 1 - (1 - v)^n with v = V of the initial state less V's measured error, within [0, 1]: so
    that only failures teach that V, as far as it is right, did not expect. ``dead_zone``, for comparison, leaves out all turns
    whose advantage is smaller than the measured error of their baseline."""
    normalise: bool = False
    """Divide by the root mean square of the batch's advantages."""

    def __call__(self, forest: Forest, values: Values | None = None) -> Estimate:
        valid = forest.usable[forest.trajectory] & ~values.v.isnan()
        prompt = forest.prompt.unique(return_inverse=True)[1]
        earned = forest.earned_before
        fair = torch.ones_like(forest.fair) if self.children == "all" else forest.fair
        g = (tree_means(forest, fair) - earned).masked_fill(~valid, 0)
        v = values.v.masked_fill(~valid, 0)
        others, siblings = _others(forest, prompt, earned)
        known = valid & ~others.isnan()
        others = others.masked_fill(~known, 0)

        # Siblings at the turn's own state measure V there without bias: E[(G - V)(L - V)] is V's squared error.
        product, square = ((g - v) * (others - v)).masked_fill(~known, 0), ((others - v) ** 2).masked_fill(~known, 0)
        w = torch.ones_like(g)
        for where in (known & siblings, known & ~siblings):
            measured = 1 - _of_other_prompts(prompt, product * where) / _of_other_prompts(prompt, square * where)
            measured = measured.nan_to_num(0.0, posinf=0.0, neginf=0.0).clamp(0, 1)
            w = torch.where(where, measured if self.weight_of_v is None else self.weight_of_v, w)
        advantage = (g - w * v - (1 - w) * others).masked_fill(~valid, 0)
        error = _squared_error(prompt, product, known & siblings, (g - v) ** 2, valid)
        weight = self._gated(forest, prompt, v, advantage, torch.where(w > 0, w * error, 0), error, valid)

        count = valid.sum().clamp(min=1)
        size = (weight * advantage**2).sum() / weight.sum().clamp(min=1)
        metrics = {
            "tree_critic/weight_of_v": float((w * known).sum() / known.sum().clamp(min=1)),
            "tree_critic/v_error": float(error[valid & error.isfinite()].sum() / count) ** 0.5,
            "tree_critic/trained_share": float(weight.sum() / count),
            "tree_critic/advantage_mean": float(advantage.sum() / count),
            "tree_critic/advantage_rms": float(size) ** 0.5,
            "tree_critic/explained_by_v": explained_variance(v[known], g[known]),
            "tree_critic/explained_by_others": explained_variance(others[known], g[known]),
            "tree_critic/explained_by_both": explained_variance((g - advantage)[known], g[known]),
        }
        degenerate = not bool(size > 0)
        if self.normalise and not degenerate:
            advantage = advantage / size.sqrt()
        return Estimate(advantage.masked_fill(weight == 0, 0), weight, weight > 0, metrics, degenerate=degenerate)

    def _gated(
        self, forest: Forest, prompt: Tensor, v: Tensor, advantage: Tensor, zone: Tensor, error: Tensor, valid: Tensor
    ) -> Tensor:
        """[N]: what each turn weighs; ``zone`` is z^2."""
        weight = valid.to(advantage)
        if self.gate == "dead_zone":
            return weight * (advantage.abs() > zone.sqrt().clamp(min=ROUNDING))
        if self.gate == "none":
            return weight
        hopeless = sum_by(prompt, valid & forest.won[forest.trajectory])[prompt] == 0
        left = torch.zeros_like(weight)
        if self.gate == "trust":
            roots = valid & (forest.parent == ROOT)
            n = sum_by(prompt, roots)
            least = (v - error.sqrt()).clamp(0, 1).masked_fill(~roots, 0)
            left = (1 - (1 - sum_by(prompt, least) / n.clamp(min=1)) ** n)[prompt]
        return torch.where(hopeless, weight * left, weight)


def _others(forest: Forest, prompt: Tensor, earned: Tensor) -> tuple[Tensor, Tensor]:
    """L [N], the return still to come in the mean of others, NaN where there are none; and bool [N]: they are siblings at the
    turn's own state."""
    compared = sibling_advantages(forest, leaf_return="tree_mean").comparison
    turn = torch.arange(len(prompt), device=prompt.device)
    root = turn
    while (inner := forest.parent[root] != ROOT).any():
        root = torch.where(inner, forest.parent[root], root)
    starts = (forest.parent == ROOT) & forest.usable[forest.trajectory]
    returns = tree_means(forest, forest.fair).masked_fill(~starts, 0)
    own = starts[root]
    total = sum_by(prompt, returns)[prompt] - returns[root]
    elsewhere = total / (sum_by(prompt, starts)[prompt] - own.long())
    others = torch.where(
        compared.baseline.isnan(), elsewhere.masked_fill(~elsewhere.isfinite(), torch.nan), compared.baseline
    )
    return others - earned, (compared.head == turn) & ~compared.baseline.isnan()


def _of_other_prompts(prompt: Tensor, x: Tensor) -> Tensor:
    """[N]: sum of ``x`` over the turns of all prompts but the turn's own; 0, not rounding, where there is nothing."""
    sums = sum_by(prompt, x.double())
    rest = sums.sum() - sums
    return rest.masked_fill(rest.abs() <= 1e-12 * sums.abs().sum(), 0)[prompt]


def _squared_error(prompt: Tensor, product: Tensor, measured: Tensor, residual: Tensor, valid: Tensor) -> Tensor:
    """[N]: V's squared error in the other prompts: mean of ``product`` where it was ``measured``; where nothing was, of the
    squared ``residual``, which counts the noise of returns too; infinite where there is no other prompt."""
    found = torch.full_like(residual, torch.inf)
    for x, where in ((residual, valid), (product, measured)):
        count = _of_other_prompts(prompt, where)
        mean = _of_other_prompts(prompt, x * where) / count
        found = torch.where(count > 0, mean.clamp(min=0), found)
    return found
