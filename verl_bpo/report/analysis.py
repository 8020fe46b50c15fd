"""One dumped tree, looked at: where its turns are drawn, who their siblings are, what was dumped of its advantages."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from verl_bpo.report.dump import DumpedTree
from verl_bpo.tree.topology import ROOT, Tree


@dataclass(frozen=True)
class RootSibling:
    """The first turn of a trajectory in one of the prompt's trees: the initial state belongs to all of them."""

    session: int
    node: int
    action: str
    value: float


class TreeView:
    """A tree with everything a reader asks of it. Lists have one entry per turn unless said otherwise."""

    def __init__(self, dumped: DumpedTree) -> None:
        self.record, self.advantages = dumped.record, dumped.advantages
        self.tree: Tree = (tree := dumped.tree)
        self.options = dumped.advantages.options if dumped.advantages else {}
        self.comparison = dumped.advantages.comparison if dumped.advantages else None
        """How the advantages came out, as the run dumped it; None where it didn't."""
        self.whole = self.options.get("baseline") == "trajectory"
        """Whole rollouts are compared, wherever they forked."""
        self.usable_trajectory = [t.usable for t in tree.trajectories]
        """Per trajectory."""
        self.usable = [self.usable_trajectory[n.trajectory] for n in tree.nodes]
        self.trunk = [tree.trajectories[n.trajectory].start != i for i, n in enumerate(tree.nodes)]
        """The turn continues its parent's trajectory."""
        self.depth: list[int] = []
        """Turns on the path to this one, itself included."""
        total: list[float] = []
        self.groups: dict[int, list[int]] = defaultdict(list)
        """Usable turns by the turn (or ROOT) that they were taken after."""
        for i, node in enumerate(tree.nodes):
            self.depth.append(1 + (self.depth[node.parent] if node.parent != ROOT else 0))
            total.append(node.reward + (total[node.parent] if node.parent != ROOT else 0.0))
            if self.usable[i]:
                self.groups[node.parent].append(i)
        self.leaf_return = [total[t.leaf] if u else None for t, u in zip(tree.trajectories, self.usable_trajectory)]
        """Per trajectory; None when it was lost."""
        own = [self.leaf_return[n.trajectory] for n in tree.nodes]
        self.value = self.comparison.value if self.comparison else own
        """The turn's return as a sibling; of its own leaf where the dump doesn't say. None when its trajectory was lost."""
        score = [n.score if n.score is not None else _mean(n.action_entropy) for n in tree.nodes]
        self.score = score
        """Branch score of the state, or where there is none the mean entropy (nats) of the action's tokens; or None."""

    @property
    def returns(self) -> list[float]:
        """Leaf returns of the usable trajectories."""
        return [r for r in self.leaf_return if r is not None]

    def siblings(self, parent: int) -> list[int]:
        """Usable turns taken after ``parent``, in this tree."""
        return self.groups.get(parent, [])

    def branch_points(self) -> list[int]:
        """Turns after which two or more usable actions were taken (ROOT not counted)."""
        return [p for p, members in sorted(self.groups.items()) if p != ROOT and len(members) > 1]

    def roots(self) -> list[RootSibling]:
        """What this tree adds to its prompt's group of first turns; of all rollouts' first turns if these are compared."""
        nodes, session = self.tree.nodes, self.record.session
        first = [t.start for t in self.tree.trajectories if t.usable] if self.whole else self.siblings(ROOT)
        return [RootSibling(session, i, nodes[i].action_text, self.value[i]) for i in first]

    def rows(self) -> list[int]:
        """[trajectories] row of each, from the top; -1 for one without turns. A trajectory lies in one row, its forks below
        it, those of the deepest branch point first, so that no two connections cross."""
        own, forks = defaultdict(list), defaultdict(list)
        for i, node in enumerate(self.tree.nodes):
            own[node.trajectory].append(i)
        for i, trajectory in enumerate(self.tree.trajectories):
            if trajectory.leaf >= 0:
                forks[trajectory.parent].append(i)
        rows, placed = [-1] * len(self.tree.trajectories), 0
        stack = forks[ROOT][::-1]
        while stack:
            trajectory = stack.pop()
            rows[trajectory], placed = placed, placed + 1
            stack += [fork for node in own[trajectory] for fork in reversed(forks.get(node, ()))]
        return rows

    def interest(self) -> float:
        """How much there is to see: the siblings' return variances, summed over branch points."""
        return sum(variance([self.value[i] for i in self.siblings(p)]) for p in [ROOT, *self.branch_points()])


def variance(values: list[float]) -> float:
    """Sample variance (n - 1); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
