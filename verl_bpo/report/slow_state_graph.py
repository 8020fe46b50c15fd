"""The state graph's advantages a second time, place by place, as its definition reads: what a run's own are checked against.

Nothing here is shared with ``verl_bpo/advantages``; for the definition see ``state_graph.py`` there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache

from verl_bpo.report.slow_bpo import SlowAdvantages
from verl_bpo.tree.topology import ROOT, Tree

Turn = tuple[int, int]
"""Number of the tree, of the node."""


def slow_state_graph(
    trees: Sequence[tuple[str, Tree]], *, states: str = "digest", prior: float = 1.0, pooled: bool = True
) -> list[SlowAdvantages]:
    """Advantages of the trees of one batch.

    Args:
        trees: (prompt, tree) each.
    """
    fair: dict[Turn, bool] = {}
    chosen: set[Turn] = set()
    """Forks whose branch point was chosen by how its trunk went on."""
    place: dict[Turn, Hashable] = {}
    at: dict[Hashable, list[Turn]] = defaultdict(list)
    used: set[Turn] = set()
    for number, (prompt, tree) in enumerate(trees):
        for node, (turn, is_fair) in enumerate(zip(tree.nodes, tree.fair())):
            state = turn.observed if states == "observation" else turn.digest
            depth = len(tree.path(node))
            place[number, node] = (prompt, depth, None if depth == 1 else state)
            fair[number, node] = is_fair
            if tree.trajectories[turn.trajectory].usable:
                used.add((number, node))
                at[place[number, node]].append((number, node))

    for number, (_, tree) in enumerate(trees):
        for node in range(len(tree.nodes)):
            children = [child for child in tree.children(node) if (number, child) in used]
            if not all(fair[number, child] for child in children):
                forks = [c for c in children if tree.nodes[c].trajectory != tree.nodes[node].trajectory]
                chosen |= {(number, child) for child in forks}

    @cache
    def to_go(turn: Turn) -> float:
        number, node = turn
        tree = trees[number][1]
        after = [(number, child) for child in tree.children(node) if (number, child) in used]
        worth = [value(place[child]) if pooled else to_go(child) for child in after]
        return tree.nodes[node].reward + (mean(worth) if worth else 0.0)

    @cache
    def value(where: Hashable) -> float:
        return mean([to_go(t) for t in at[where] if t not in chosen] or [to_go(t) for t in at[where]])

    @cache
    def baseline(turn: Turn) -> float | None:
        number, node = turn
        parent = trees[number][1].nodes[node].parent
        before = None if parent == ROOT else baseline((number, parent))
        if before is not None:
            before -= trees[number][1].nodes[parent].reward
        others = [to_go(t) for t in at[place[turn]] if t != turn and fair[t]] if fair[turn] else []
        if before is None or not others:
            return mean(others) if others else before
        return (math.fsum(others) + prior * before) / (len(others) + prior)

    largest = max((abs(to_go(turn)) for turn in used), default=0.0)
    found = []
    for number, (_, tree) in enumerate(trees):
        own = SlowAdvantages([], [], [])
        for node in range(len(tree.nodes)):
            turn = (number, node)
            expected = baseline(turn) if turn in used else None
            advantage = 0.0 if expected is None else to_go(turn) - expected
            own.advantage.append(advantage if abs(advantage) > 1e-14 * largest else 0.0)
            own.weight.append(float(expected is not None))
            own.valid.append(expected is not None)
        found.append(own)
    return found


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
