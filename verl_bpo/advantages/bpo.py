"""BPO (Branching Policy Optimization): advantages of turns from the returns of their siblings.

At a branch point with state s_b, n siblings were sampled and rolled to their ends with returns R_1..R_n. Then

    A_i = R_i - mean_{j != i} R_j                                                  (leave-one-out)

is the advantage of every turn of sibling i from the branch point to the next one on its way (its *segment*): given s_b
the baseline is independent of what sibling i does, and E[A_i | s_b, a_i] = Q(s_b, a_i) - V(s_b).

Marked [ours] below is what goes beyond the paper. What holds under which condition is proved by exact enumeration in
``tests/advantages/test_bpo.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from verl_bpo.advantages.estimator import Comparison, Estimate, Estimator, Values
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.topology import ROOT

ESTIMATOR = "BPO"

Baseline = Literal["loo", "mean", "shrunk", "trajectory"]
Normalize = Literal["none", "sibling_std", "batch_std"]
LeafReturn = Literal["leaf", "tree_mean"]
Weighting = Literal["uniform", "path_probability"]
TrunkInSiblings = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Diagnostics:
    """What the sibling groups look like: the G branch points (the initial state too) with two or more usable siblings.

    Scalars are 0 where nothing defines them, never NaN.
    """

    group_size: Tensor
    """int64 [G]: usable siblings."""
    group_variance: Tensor
    """[G]: sample variance (n - 1) of the siblings' returns."""
    zero_advantage_share: Tensor
    """Share of groups whose siblings all have the same return: they teach nothing. 0 with ``center``, which moves them too."""
    prefix_explained_share: Tensor
    """Share of the return's variance within a prompt that the prefix up to the branch point explains, in [0, 1]: the
    estimate of Var(E[R | s_b]) / Var(R), which is the share of variance that the sibling baseline takes off the
    trajectory-level one. It is the one-way analysis-of-variance estimate (intraclass correlation) of the siblings' leaf
    returns, groups nested in prompts:

        within  = SS_within / sum_g (n_g - 1)
        between = (SS_between - sum_p (G_p - 1) * within) / sum_p (n_p - sum_{g in p} n_g^2 / n_p),  at least 0
        share   = between / (between + within)

    A trajectory counts among those that it started with only: a trunk's return, in every group on its way, would make
    their means look alike. The plain variance of group means would count the noise of a mean over few siblings as
    explained. 0 also when no prompt has two groups of two or more trajectories that started there."""
    advantage_mean: Tensor
    """Mean over valid turns, before ``normalize`` and ``center``."""
    advantage_std: Tensor
    """Standard deviation over valid turns, before ``normalize``."""


@dataclass(frozen=True)
class TurnAdvantages:
    """Per-turn result, in the dtype of the leaf returns."""

    advantage: Tensor
    """[N]; 0 where not valid."""
    weight: Tensor
    """[N]: what the turn's policy-gradient term is to be multiplied with; 0 where not valid."""
    valid: Tensor
    """bool [N]: False where nothing defines an advantage. Such turns must leave the loss and its denominator: a zero
    that stays in dilutes a token mean."""
    diagnostics: Diagnostics
    comparison: Comparison


def sibling_advantages(
    forest: Forest,
    *,
    baseline: Baseline = "loo",
    normalize: Normalize = "none",
    center: bool = False,
    leaf_return: LeafReturn = "leaf",
    weighting: Weighting = "uniform",
    trunk_in_siblings: TrunkInSiblings = "auto",
) -> TurnAdvantages:
    """Advantages of all turns of a forest.

    *Siblings* are the usable turns with one parent (in the initial state: of one prompt). Two or more of them start new
    segments. An only child continues its parent's segment and has its advantage if it belongs to the same trajectory;
    otherwise (a lone fork or root sample) it is not valid. *Fair* siblings, whose action was drawn
    from the policy given the state alone, may stand in a baseline.

    A trunk that isn't fair, since choosing the branch point looked at what it did there or led to, is not compared with its
    forks: it continues its parent's segment, so that its baseline doesn't depend on its action. Only where that segment
    has no baseline it takes the forks' mean, and is biased; nothing else would train it.

    Args:
        forest: the turns.
        baseline: of sibling i. ``loo``: mean return of the other fair siblings, unbiased. ``mean``: of all n fair
            siblings, which shrinks the advantage by (n-1)/n. Without any other fair sibling it is not valid, in any.
            ``shrunk`` [ours]: a mean over few siblings is a noisy estimate of V(s_b), and where prefixes explain little
            of the return, other branches know as much about it. With m the mean that ``loo`` takes, over k siblings, it is

                b = w m + (1 - w) b_above,    w = p / (p + s),    p = rho + u_above,    s = (1 - rho) / k,    u = w s

            where b_above is the baseline of the segment that the group hangs from (w = 1 if there is none) and rho the
            batch's ``prefix_explained_share``: a Kalman filter down the path, in which V changes by rho from one branch
            point to the next and a return measures it up to 1 - rho, in units of the return's variance. rho = 1 is
            ``loo``; with rho = 0 all of these returns weigh the same. b_above comes from branches that leave the path
            before s_b, so that the expected policy gradient is that of ``loo``, but for a term of order 1/N through
            rho; the advantage itself then expects Q(s_b, a) less something that depends on what stands above, not on a.
            ``trajectory``, for comparison with the sibling baseline on the same trees: all turns of a rollout, from
            where it forked, have its return minus the mean over the other usable rollouts of its prompt, as if each had
            started in the initial state. That is biased on trees, since forks of a turn stand in its baseline; without
            forks it is ``loo``.
        normalize: ``sibling_std`` divides by the sample standard deviation (n-1) of the returns that are compared in the
            group. ``batch_std`` divides by that of all valid turns' advantages, each turn counted once, without
            centring. Where that standard deviation is 0 nothing is divided (among equal returns the advantage is 0).
            Neither is unbiased.
        center: [ours] subtract the mean over all valid turns (weighted by ``weighting``), after ``normalize``. Where failed
            trajectories are longer than successful ones, most turns have negative advantages, and the loss mostly makes
            what was sampled less likely, whatever it was. A constant that doesn't depend on the batch leaves the
            expected gradient as it is; the batch's own mean biases it by a term of order 1/N. Groups whose returns are
            all equal are moved by the constant like any other. Where an action decides whether its turn is valid, as in
            the prefix of a single backbone that is masked until it branches, the constant is no baseline and biases.
        leaf_return: return of a sibling. ``leaf``: of its own trajectory's leaf. ``tree_mean`` [ours]: the mean over
            its usable children's, recursively, which has less variance and the same expectation while all children are
            fair draws. At a branch point where one isn't (see ``Forest.fair``) only the trunk's own continuation has
            that expectation: it alone is taken, unless ``trunk_in_siblings='always'``.
        weighting: ``uniform``: 1. ``path_probability`` [ours]: product of 1/siblings over the path from the initial
            state, both ends included. Only the latter makes the sum over turns of weight * advantage * grad log pi an
            unbiased estimate of the policy gradient, and only if branch points are chosen from the state alone, every
            turn is valid, with ``loo`` and without ``normalize``. A failed sibling counts in no product; turns forked
            below it have the factor of the siblings that it leaves.
        trunk_in_siblings: who stands in the baselines. ``auto``: the fair. ``always``: all; if the trunk's action had a say in
            choosing the branch point, this shifts the advantages of all its forks by one constant. ``never``: the
            fair, but no trunk.

    Among fair siblings E[A_i | s_b, a_i] = Q(s_b, a_i) - V(s_b); with ``auto`` also for forks of a trunk that isn't a fair
    draw. What such a choice leaves biased is how often each state is trained, not the direction at a state.

    Raises:
        ValueError: an option has an unknown value.
    """
    for key, value, allowed in (
        ("baseline", baseline, Baseline),
        ("normalize", normalize, Normalize),
        ("leaf_return", leaf_return, LeafReturn),
        ("weighting", weighting, Weighting),
        ("trunk_in_siblings", trunk_in_siblings, TrunkInSiblings),
    ):
        if value not in get_args(allowed):
            raise ValueError(f"{key}={value!r} is not one of {', '.join(get_args(allowed))}")

    if baseline == "trajectory":
        roots = torch.where(forest.trunk, forest.parent, ROOT)
        forest = replace(forest, parent=roots, fair=torch.ones_like(forest.fair))
        baseline = "loo"
    trunk, fair = forest.trunk, forest.fair
    usable = forest.usable[forest.trajectory]
    if trunk_in_siblings == "always":
        fair = torch.ones_like(fair)
    counted = usable & fair
    if trunk_in_siblings == "never":
        counted = counted & ~trunk

    point = _branch_point(forest)
    siblings = sum_by(point, usable)[point]
    leaf = forest.leaf_return[forest.trajectory].masked_fill(~usable, 0)
    returns = tree_means(forest, fair) if leaf_return == "tree_mean" else leaf

    keeps = _keeps_its_baseline(forest, usable & trunk & ~fair, usable & (siblings > 1), counted, point)
    peers = siblings - sum_by(point, keeps)[point]

    # From here on: members m of the G groups of two or more siblings that are compared with each other.
    member = (usable & ~keeps & (peers > 1)).nonzero().squeeze(1)
    _, group = point[member].unique(return_inverse=True)
    n = group.bincount()
    r, in_baseline = returns[member], counted[member].to(returns.dtype)
    # Deviations from the group's mean, so that large equal returns don't cancel badly.
    deviation = r - (sum_by(group, r) / n)[group]
    equal = sum_by(group, deviation.abs()) <= noise(r) * sum_by(group, r.abs())
    deviation = deviation.masked_fill(equal[group], 0)
    variance = sum_by(group, deviation**2) / (n - 1)

    n_fair = sum_by(group, in_baseline)[group]
    others = n_fair - in_baseline
    total = sum_by(group, in_baseline * deviation)[group]
    if baseline == "mean":
        advantage_m = deviation - total / n_fair.clamp(min=1)
    else:
        advantage_m = deviation - (total - in_baseline * deviation) / others.clamp(min=1)
    # A segment has what its first turn has.
    head = _segment_head(forest, trunk & ((siblings <= 1) | keeps))
    explained = prefix_explained_share(forest)
    if baseline == "shrunk":
        advantage_m = advantage_m + _shrinkage(forest, head, member, r, advantage_m, others, explained)
    raw_m = advantage_m.masked_fill(others == 0, 0)
    std_m = variance.sqrt()[group]
    scaled_m = raw_m / torch.where(std_m > 0, std_m, 1) if normalize == "sibling_std" else raw_m

    valid = torch.zeros_like(usable).index_put((member,), others > 0)[head]
    raw = torch.zeros_like(returns).index_put((member,), raw_m)[head]
    compared = torch.zeros_like(head).index_put((member,), (n_fair if baseline == "mean" else others).long())[head]
    itself = torch.arange(head.numel(), device=head.device)
    comparison = Comparison(
        head=torch.where(usable, head, itself),
        value=returns.masked_fill(~usable, torch.nan),
        baseline=(returns[head] - raw).masked_fill(~valid, torch.nan),
        compared=compared.masked_fill(~valid, 0),
        fair=counted,
    )
    advantage = torch.zeros_like(returns).index_put((member,), scaled_m)[head]

    count = valid.sum().clamp(min=1)
    mean = raw.sum() / count
    std = (((raw - mean).masked_fill(~valid, 0) ** 2).sum() / count).sqrt()
    std = std.masked_fill(std <= noise(raw) * mean.abs(), 0)
    if normalize == "batch_std":
        advantage = advantage / torch.where(std > 0, std, 1)

    weight = torch.ones_like(advantage)
    if weighting == "path_probability":
        weight = _product_along_path(forest.parent, 1 / siblings.clamp(min=1).to(weight.dtype))
    if center:
        share = weight.masked_fill(~valid, 0)
        advantage = advantage - (share * advantage).sum() / share.sum().clamp(min=noise(share))
        advantage = advantage.masked_fill(~valid, 0)

    return TurnAdvantages(
        advantage=advantage,
        weight=weight.masked_fill(~valid, 0),
        valid=valid,
        diagnostics=Diagnostics(
            group_size=n,
            group_variance=variance,
            zero_advantage_share=0 * equal.sum() if center else equal.sum() / max(equal.numel(), 1),
            prefix_explained_share=explained,
            advantage_mean=mean,
            advantage_std=std,
        ),
        comparison=comparison,
    )


class BPO(Estimator):
    """``algorithm.adv_estimator=bpo``: Branching Policy Optimization."""

    KEYS: ClassVar[str] = "advantage"
    PRESET: ClassVar[str] = "paper"
    NEEDS: ClassVar[frozenset[str]] = frozenset({"siblings"})

    baseline: Baseline = "loo"
    """Siblings' baseline: ``loo`` leaves the sibling itself out (unbiased); ``mean`` shrinks by (n-1)/n.
    ``shrunk``: ``loo`` drawn towards the baseline above the branch point, the more the less prefixes explain of the return.
    ``trajectory``, for comparison: the prompt's other rollouts, wherever they forked."""
    normalize: Normalize = "none"
    """``none``, divide by the ``sibling_std`` of each group, or by the ``batch_std`` over all turns."""
    center: bool = False
    """Subtract the mean over the batch's turns. Where failures are longer than successes, most advantages are negative, and
    learning then mostly pushes down whatever was sampled."""
    leaf_return: LeafReturn = "leaf"
    """Return of a sibling: its own trajectory's ``leaf``, or ``tree_mean``, the mean over its children, recursively."""
    weighting: Weighting = "uniform"
    """``uniform``: every tree token weighs the same. ``path_probability``: a turn weighs the product of 1/siblings on
    its path, which alone makes the policy gradient unbiased, at a higher variance."""
    trunk_in_siblings: TrunkInSiblings = "auto"
    """May a trunk's own return stand in its forks' baselines: ``always``, ``never``, or ``auto``: only where the branch
    point was chosen from the state alone."""

    def __call__(self, forest: Forest, values: Values | None = None) -> Estimate:
        """Siblings' returns; see :func:`sibling_advantages`."""
        result = sibling_advantages(forest, **self.model_dump())
        found = result.diagnostics
        metrics = {
            "bpo/advantage_mean": float(found.advantage_mean),
            "bpo/advantage_std": float(found.advantage_std),
            "bpo/sibling_return_variance": _mean(found.group_variance),
            "bpo/prefix_explained_share": float(found.prefix_explained_share),
            "bpo/zero_advantage_groups": float(found.zero_advantage_share),
            "bpo/sibling_groups": float(found.group_size.numel()),
            "bpo/group_size": _mean(found.group_size.double()),
            "bpo/turns_without_siblings": 1.0 - _mean(result.valid.double()),
        }
        return Estimate(result.advantage, result.weight, result.valid, metrics, result.comparison)


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


def _branch_point(forest: Forest) -> Tensor:
    """[N]: one id for all turns that are siblings."""
    prompt = forest.prompt.unique(return_inverse=True)[1]
    return torch.where(forest.parent == ROOT, forest.parent.numel() + prompt, forest.parent)


def tree_means(forest: Forest, fair: Tensor) -> Tensor:
    """[N]: mean over the usable children's returns, recursively, leaf returns at leaves; of the trunk's continuation alone
    where a child isn't ``fair``, bool [N]. 0 where not usable."""
    trunk, usable = forest.trunk, forest.usable[forest.trajectory]
    point = _branch_point(forest)
    siblings = sum_by(point, usable)[point]
    returns = forest.leaf_return[forest.trajectory].masked_fill(~usable, 0)
    continued = sum_by(point, usable & trunk)[point] > 0
    unfair = sum_by(point, usable & ~fair)[point] > 0
    share = torch.where(unfair, trunk.to(returns.dtype), 1 / siblings.clamp(min=1).to(returns.dtype))
    # No usable trunk goes on from the parent: it failed, or it is a leaf and has its own return.
    share = share.masked_fill(~(usable & continued), 0)
    leaf = torch.ones_like(usable)
    leaf[forest.parent[trunk]] = False
    means = returns.masked_fill(~leaf, 0)
    for turns in reversed(by_level(forest.parent)[1:]):
        means.index_add_(0, forest.parent[turns], share[turns] * means[turns])
    return means


def _keeps_its_baseline(forest: Forest, unfair: Tensor, compared: Tensor, counted: Tensor, point: Tensor) -> Tensor:
    """[N]: trunks that aren't fair and whose trajectory has a baseline from above the branch point."""
    has_baseline = (compared & (sum_by(point, counted)[point] > counted.long())).nonzero().squeeze(1)
    turn = torch.arange(point.numel(), device=point.device)
    first = torch.full_like(forest.usable, point.numel(), dtype=torch.long)
    first = first.scatter_reduce(0, forest.trajectory[has_baseline], turn[has_baseline], "amin")
    return unfair & (first[forest.trajectory] < turn)


def _segment_head(forest: Forest, continues: Tensor) -> Tensor:
    """[N]: first turn of each turn's segment, by pointer jumping (log2 of the depth rounds)."""
    head = torch.where(continues, forest.parent, torch.arange(continues.numel(), device=continues.device))
    while not torch.equal(jump := head[head], head):
        head = jump
    return head


def _shrinkage(
    forest: Forest, head: Tensor, member: Tensor, r: Tensor, loo: Tensor, others: Tensor, explained: Tensor
) -> Tensor:
    """[members]: leave-one-out mean minus shrunk baseline, (1 - w) (m - b_above) of :func:`sibling_advantages`."""
    prompt = forest.prompt[member].unique(return_inverse=True)[1]
    # From the prompt's mean, so that returns that are all equal give exactly 0.
    from_mean = r - (sum_by(prompt, r) / prompt.bincount())[prompt]
    equal = sum_by(prompt, from_mean.abs()) <= noise(r) * sum_by(prompt, r.abs())
    m = from_mean.masked_fill(equal[prompt], 0) - loo

    # [N]: index into the members of the segment above that has a baseline; -1 if there is none.
    index = torch.full_like(head, ROOT).index_put_((member,), torch.arange(member.numel(), device=head.device))
    defined = torch.zeros_like(head, dtype=torch.bool).index_put_((member,), others > 0)
    outer = torch.where(forest.parent[head] == ROOT, ROOT, head[forest.parent[head]])
    while (skip := (outer != ROOT) & ~defined[outer]).any():
        outer = torch.where(skip, outer[outer], outer)
    above = torch.where(outer == ROOT, ROOT, index[outer])[member]

    b, u = torch.zeros_like(m), torch.zeros_like(m)
    measured = (1 - explained) / others.clamp(min=1)
    for now in by_level(above):
        up = above[now]
        p, s = explained + u[up], measured[now]
        w = torch.where(up == ROOT, 1, p / (p + s))
        b[now] = w * m[now] + (1 - w) * b[up]
        u[now] = w * s
    return m - b


def _product_along_path(parent: Tensor, factor: Tensor) -> Tensor:
    """[N]: product of ``factor`` over the path from the initial state to each turn, by pointer doubling."""
    while (inner := parent != ROOT).any():
        factor = torch.where(inner, factor * factor[parent], factor)
        parent = torch.where(inner, parent[parent], ROOT)
    return factor


def levels(parent: Tensor) -> Tensor:
    """int64 [N]: turns on the path from the initial state to each turn, itself included."""
    level = torch.ones_like(parent)
    while (inner := parent != ROOT).any():
        level = torch.where(inner, level + level[parent], level)
        parent = torch.where(inner, parent[parent], ROOT)
    return level


def by_level(parent: Tensor) -> tuple[Tensor, ...]:
    """The turns of each level, those taken in the initial state first."""
    level = levels(parent)
    return level.argsort().split(level.bincount().tolist()[1:])


def prefix_explained_share(forest: Forest) -> Tensor:
    """See :attr:`Diagnostics.prefix_explained_share`."""
    started = forest.usable[forest.trajectory] & ~forest.trunk
    return _explained_share(forest, _branch_point(forest), forest.prompt, started)


def task_explained_share(forest: Forest) -> Tensor:
    """Share of the return's variance that the prompt explains, by the same analysis of the trajectories that started in the
    initial state: what a mean of the prompt's other root samples could explain if it had no noise."""
    roots = forest.usable[forest.trajectory] & (forest.parent == ROOT)
    return _explained_share(forest, forest.prompt, torch.zeros_like(forest.prompt), roots)


def _explained_share(forest: Forest, point: Tensor, prompt: Tensor, started: Tensor) -> Tensor:
    """Intraclass correlation of trajectories' returns, by their first turns ``started``; groups ``point`` in ``prompt``."""
    leaf = forest.leaf_return[forest.trajectory].masked_fill(~started, 0)
    kept = (started & (sum_by(point, started)[point] > 1)).nonzero().squeeze(1)
    r, group, prompt = leaf[kept], *(x[kept].unique(return_inverse=True)[1] for x in (point, prompt))
    n_g, n_p = (x.bincount().to(r.dtype) for x in (group, prompt))  # a quotient of integers would be float32
    mean_g = sum_by(group, r) / n_g
    mean_p = sum_by(prompt, r) / n_p
    prompt_of_group = prompt.new_empty(len(n_g)).index_put_((group,), prompt)
    free = (prompt_of_group.bincount() - 1).sum()
    total = ((r - mean_p[prompt]) ** 2).sum()
    if free == 0 or total <= noise(r) ** 2 * (r**2).sum():
        return r.new_zeros(())
    within = ((r - mean_g[group]) ** 2).sum() / (n_g - 1).sum()
    between = (n_g * (mean_g - mean_p[prompt_of_group]) ** 2).sum() - free * within
    between = between.clamp(min=0) / (n_p - sum_by(prompt_of_group, n_g**2) / n_p).sum()
    return between / (between + within)


def sum_by(index: Tensor, x: Tensor) -> Tensor:
    """Sums of ``x`` by ``index``; bools are counted."""
    x = x.long() if x.dtype == torch.bool else x
    return x.new_zeros(int(index.max()) + 1 if index.numel() else 0).index_add_(0, index, x)


def noise(x: Tensor) -> float:
    """Relative difference up to which two means of the same numbers, summed in different orders, are the same."""
    return 64 * torch.finfo(x.dtype).eps
