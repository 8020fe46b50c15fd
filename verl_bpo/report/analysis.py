"""One dumped tree, looked at: where its turns are drawn, who their siblings are, how each advantage came out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from verl_bpo.report.dump import TreeRecord
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

    def __init__(self, record: TreeRecord) -> None:
        self.record = record
        self.tree: Tree = (tree := record.tree)
        self.options = record.advantages.options if record.advantages else {}
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
        self.fair = self._fair()
        """May stand in its siblings' baseline."""
        self.value = self._values()
        """The turn's return as a sibling, by ``leaf_return`` of the options; None when its trajectory was lost."""
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

    def explain(self, roots: list[RootSibling]) -> list[Explanation]:
        """How each turn's advantage comes out of its siblings' returns, recomputed from their definition.

        Args:
            roots: the prompt's group of first turns, of all its trees.
        """
        fair = {p: [self.value[m] for m in members if self.fair[m]] for p, members in self.groups.items()}
        sizes = {p: len(members) for p, members in self.groups.items()}
        fair[ROOT], sizes[ROOT] = [r.value for r in roots], len(roots)
        out: list[Explanation] = []
        for i, node in enumerate(self.tree.nodes):
            if not self.usable[i]:
                out.append(Explanation(i, None, None, 0))
            elif self.whole:
                out.append(out[node.parent] if self.trunk[i] else self._compare(i, fair[ROOT]))
            elif sizes[node.parent] > 1:
                out.append(self._compare(i, fair[node.parent]))
            elif self.trunk[i]:
                out.append(out[node.parent])
            else:
                out.append(Explanation(i, self.value[i], None, 0))
        return out

    def _compare(self, i: int, fair: list[float]) -> Explanation:
        """Turn ``i`` against the ``fair`` returns of its group, its own among them if it is fair."""
        if len(fair) == self.fair[i]:
            return Explanation(i, self.value[i], None, 0)
        if self.fair[i] and self.options.get("baseline") != "mean":
            return Explanation(i, self.value[i], (sum(fair) - self.value[i]) / (len(fair) - 1), len(fair) - 1)
        return Explanation(i, self.value[i], sum(fair) / len(fair), len(fair))

    def interest(self) -> float:
        """How much there is to see: the siblings' return variances, summed over branch points."""
        return sum(variance([self.value[i] for i in self.siblings(p)]) for p in [ROOT, *self.branch_points()])

    def _fair(self) -> list[bool]:
        rule = "always" if self.whole else self.options.get("trunk_in_siblings", "auto")
        exchangeable = [
            rule == "always" or not trunk or (rule != "never" and self.tree.trunk_exchangeable.get(node.parent, True))
            for trunk, node in zip(self.trunk, self.tree.nodes)
        ]
        return [usable and fair for usable, fair in zip(self.usable, exchangeable)]

    def _values(self) -> list[float | None]:
        nodes = self.tree.nodes
        values = [self.leaf_return[n.trajectory] for n in nodes]
        if self.whole or self.options.get("leaf_return") != "tree_mean":
            return values
        # A trunk that is no fair draw carries the state's value alone, even where "never" keeps it out of baselines.
        always = self.options.get("trunk_in_siblings") == "always"
        for i in reversed(range(len(nodes))):
            below = self.siblings(i)
            own = [c for c in below if self.trunk[c]]
            if self.usable[i] and own:
                if not always and not self.tree.trunk_exchangeable.get(i, True):
                    below = own
                values[i] = sum(values[c] for c in below) / len(below)
        return values


@dataclass(frozen=True)
class Explanation:
    """``advantage = value - baseline``, before any normalisation. With ``baseline=shrunk`` below a turn: before the siblings'
    mean is drawn towards the baseline above, which takes all trees of the step."""

    head: int
    """First turn of the segment: the turn whose siblings decide."""
    value: float | None
    """Its return."""
    baseline: float | None
    """Mean return of the ``compared`` siblings; None where nothing defines an advantage."""
    compared: int

    @property
    def advantage(self) -> float | None:
        return None if self.baseline is None else self.value - self.baseline


def variance(values: list[float]) -> float:
    """Sample variance (n - 1); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
