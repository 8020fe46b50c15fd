"""BPO's advantages a second time, one turn after another, as their definition reads: what a run's own are checked against.

Nothing here is shared with ``verl_bpo/advantages``, which computes the same on tensors of a whole batch. Terms are those of
``sibling_advantages`` there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from verl_bpo.tree.topology import ROOT, Tree

SAME = 1e-12
"""Numbers whose difference is below this share of their size are the same number, summed in different orders."""


@dataclass(eq=False)
class _Turn:
    point: Hashable
    """Where it was taken: one for all turns that are siblings."""
    parent: _Turn | None
    trunk: bool
    """It continues its parent's trajectory."""
    usable: bool
    fair: bool
    leaf_return: float
    children: list[_Turn] = field(default_factory=list)
    siblings: list[_Turn] = field(default_factory=list)
    """All usable turns taken where it was, itself included."""
    counted: bool = False
    """It stands in its siblings' baselines."""
    value: float = 0.0
    """Its return as a sibling."""
    keeps: bool = False
    """A trunk that isn't fair and keeps the baseline that it has from above."""
    head: _Turn | None = None
    """First turn of its segment."""

    @property
    def peers(self) -> list[_Turn]:
        """The siblings that are compared with each other."""
        return [turn for turn in self.siblings if not turn.keeps]

    @property
    def others(self) -> list[_Turn]:
        """The fair siblings that it can be compared with."""
        if not self.usable or self.keeps or len(self.peers) < 2:
            return []
        return [turn for turn in self.siblings if turn.counted and turn is not self]


@dataclass(frozen=True)
class SlowAdvantages:
    """Of one tree. Lists have one entry per turn; ``advantage`` and ``weight`` are 0 where not ``valid``."""

    advantage: list[float]
    weight: list[float]
    valid: list[bool]


def slow_advantages(
    trees: Sequence[tuple[str, Tree]],
    *,
    baseline: str = "loo",
    normalize: str = "none",
    center: bool = False,
    leaf_return: str = "leaf",
    weighting: str = "uniform",
    trunk_in_siblings: str = "auto",
) -> list[SlowAdvantages]:
    """Advantages of the trees of one batch.

    Args:
        trees: (prompt, tree) each. First turns of one prompt's trees are siblings.
    """
    forest = [_turns(i, prompt, tree, baseline == "trajectory") for i, (prompt, tree) in enumerate(trees)]
    turns = [turn for own in forest for turn in own]
    groups: dict[Hashable, list[_Turn]] = defaultdict(list)
    for turn in turns:
        if turn.usable:
            groups[turn.point].append(turn)
    for turn in turns:
        turn.siblings = groups[turn.point]
        turn.fair = turn.fair or trunk_in_siblings == "always"
        turn.counted = turn.usable and turn.fair and not (trunk_in_siblings == "never" and turn.trunk)
    for turn in turns:
        turn.keeps = turn.usable and turn.trunk and not turn.fair and _has_baseline_above(turn)
    for turn in turns:  # parents first
        # An only child of the same trajectory continues its parent's segment, as does a trunk that keeps its baseline; any
        # other turn begins one.
        turn.head = turn.parent.head if turn.trunk and (len(turn.siblings) < 2 or turn.keeps) else turn
    for turn in reversed(turns):  # children first
        turn.value = _tree_mean(turn) if leaf_return == "tree_mean" else turn.leaf_return

    if baseline == "shrunk":
        below = _shrunk(turns, _explained_share(trees))
    else:
        below = {turn: _mean_of_siblings(turn, baseline) for turn in turns if turn.others}
    raw = {turn: turn.value - b for turn, b in below.items() if turn.others}
    valid = [turn for turn in turns if turn.head in raw]
    final = {head: a / _spread(head.peers) if normalize == "sibling_std" else a for head, a in raw.items()}
    if normalize == "batch_std":
        std = _deviation([raw[turn.head] for turn in valid])
        final = {head: a / std for head, a in final.items()}
    weight = {turn: _path_probability(turn) if weighting == "path_probability" else 1.0 for turn in valid}
    shift = 0.0
    if center and valid:
        total = math.fsum(weight.values())
        shift = math.fsum(weight[turn] * final[turn.head] for turn in valid) / total
    return [
        SlowAdvantages(
            [final[turn.head] - shift if turn.head in raw else 0.0 for turn in own],
            [weight.get(turn, 0.0) for turn in own],
            [turn.head in raw for turn in own],
        )
        for own in forest
    ]


def _turns(number: int, prompt: str, tree: Tree, whole: bool) -> list[_Turn]:
    """A tree's turns. ``whole``: each rollout, wherever it forked, counts as if it had started in the initial state."""
    returns = [tree.trajectory_return(t) if t.usable else 0.0 for t in tree.trajectories]
    out: list[_Turn] = []
    for i, (node, fair) in enumerate(zip(tree.nodes, tree.fair())):
        trajectory = tree.trajectories[node.trajectory]
        trunk = trajectory.start != i
        root = node.parent == ROOT or (whole and not trunk)
        turn = _Turn(
            point=("prompt", prompt) if root else (number, node.parent),
            parent=None if root else out[node.parent],
            trunk=trunk,
            usable=trajectory.usable,
            fair=fair or whole,
            leaf_return=returns[node.trajectory],
        )
        if turn.parent is not None:
            turn.parent.children.append(turn)
        out.append(turn)
    return out


def _has_baseline_above(turn: _Turn) -> bool:
    """Whether an earlier turn of its trajectory has fair siblings to be compared with."""
    while turn.trunk:
        turn = turn.parent
        if turn.usable and any(other.counted and other is not turn for other in turn.siblings):
            return True
    return False


def _tree_mean(turn: _Turn) -> float:
    """Mean over the usable children, whose values are known; of the trunk alone where a child is no fair draw."""
    below = [child for child in turn.children if child.usable]
    own = [child for child in below if child.trunk]
    if not own:
        return turn.leaf_return
    if not all(child.fair for child in below):
        below = own
    return _mean([child.value for child in below])


def _mean_of_siblings(turn: _Turn, baseline: str) -> float:
    """Mean return of the fair siblings, its own among them with ``mean`` alone."""
    if _all_the_same([s.value for s in turn.peers]):
        return turn.value
    own = [turn] if baseline == "mean" and turn.counted else []
    return _mean([sibling.value for sibling in turn.others + own])


def _shrunk(turns: list[_Turn], rho: float) -> dict[_Turn, float]:
    """Per first turn of a segment: b = w m + (1 - w) b_above, w = p / (p + s), p = rho + u_above, s = (1 - rho) / k, u = w s.

    Segments without siblings to compare with have what is above them.
    """
    found: dict[_Turn, tuple[float, float]] = {}
    for turn in turns:  # parents first
        if turn.head is not turn:
            continue
        above = found.get(turn.parent.head) if turn.parent is not None else None
        if not turn.others:
            if above is not None:
                found[turn] = above
            continue
        m, s = _mean([sibling.value for sibling in turn.others]), (1 - rho) / len(turn.others)
        if above is None:
            found[turn] = m, s
        else:
            p = rho + above[1]
            w = p / (p + s)
            found[turn] = w * m + (1 - w) * above[0], w * s
    return {turn: b for turn, (b, _) in found.items()}


def _explained_share(trees: Sequence[tuple[str, Tree]]) -> float:
    """rho: the share of the return's variance within a prompt that the prefix explains, by one-way analysis of variance over
    the groups of two or more usable trajectories that started at one point."""
    starts: dict[str, dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, (prompt, tree) in enumerate(trees):
        for t in tree.usable():
            starts[prompt][ROOT if t.parent == ROOT else (number, t.parent)].append(tree.trajectory_return(t))
    prompts = [[g for g in groups.values() if len(g) > 1] for groups in starts.values()]
    free = sum(len(groups) - 1 for groups in prompts if groups)
    everything = [r for groups in prompts for g in groups for r in g]
    if not free or all(_all_the_same([r for g in groups for r in g]) for groups in prompts):
        return 0.0
    ss_within = ss_between = scale = 0.0
    for groups in prompts:
        members = [r for g in groups for r in g]
        for g in groups:
            ss_within += math.fsum((r - _mean(g)) ** 2 for r in g)
            ss_between += len(g) * (_mean(g) - _mean(members)) ** 2
        if members:
            scale += len(members) - sum(len(g) ** 2 for g in groups) / len(members)
    within = ss_within / (len(everything) - sum(len(groups) for groups in prompts))
    between = max(0.0, (ss_between - free * within) / scale)
    return between / (between + within)


def _path_probability(turn: _Turn | None) -> float:
    """Product of 1 / siblings from the initial state to the turn."""
    probability = 1.0
    while turn is not None:
        probability /= max(1, len(turn.siblings))
        turn = turn.parent
    return probability


def _spread(group: list[_Turn]) -> float:
    """Sample standard deviation of a group's returns; 1 where they are all the same."""
    values = [turn.value for turn in group]
    if _all_the_same(values):
        return 1.0
    return math.sqrt(math.fsum((v - _mean(values)) ** 2 for v in values) / (len(values) - 1))


def _deviation(values: list[float]) -> float:
    """Standard deviation; 1 where all values are the same."""
    if _all_the_same(values):
        return 1.0
    return math.sqrt(math.fsum((v - _mean(values)) ** 2 for v in values) / len(values))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _all_the_same(values: Sequence[float]) -> bool:
    return not values or max(values) - min(values) <= SAME * max(map(abs, values))
