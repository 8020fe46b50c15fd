"""GiGPO's advantages a second time, path by path, as its formulas read: what a run's own are checked against.

Nothing here is shared with ``verl_bpo/advantages``. Numbers are those of the paper's formulas, see ``gigpo.py`` there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache

from verl_bpo.report.slow_bpo import SlowAdvantages
from verl_bpo.tree.topology import Tree

EPSILON = 1e-6


def slow_gigpo(
    trees: Sequence[tuple[str, Tree]],
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    norm: str = "std",
    states: str = "observation",
) -> list[SlowAdvantages]:
    """Advantages of the trees of one batch.

    Args:
        trees: (prompt, tree) each.
    """
    paths = {
        (number, index): tree.path(t.leaf)
        for number, (_, tree) in enumerate(trees)
        for index, t in enumerate(tree.trajectories)
        if t.usable
    }

    # (3), each path once.
    prompts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rollout in paths:
        prompts[trees[rollout[0]][0]].append(rollout)
    episode = {}
    for rollouts in prompts.values():
        returns = [math.fsum(trees[n][1].nodes[i].reward for i in paths[n, t]) for n, t in rollouts]
        episode |= dict(zip(rollouts, compared(returns, norm)))

    # Turns on a path to a leaf, each once, with the paths that they stand on.
    above: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for (number, index), path in paths.items():
        for node in path:
            above[number, node].append((number, index))

    @cache
    def to_go(number: int, node: int) -> float:
        """(5)."""
        tree = trees[number][1]
        after = [to_go(number, child) for child in tree.children(node) if (number, child) in above]
        return tree.nodes[node].reward + (gamma * math.fsum(after) / len(after) if after else 0.0)

    # (7).
    places: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for number, node in above:
        prompt, tree = trees[number]
        turn = tree.nodes[node]
        places[prompt, turn.observed if states == "observation" else turn.digest].append((number, node))
    step, size = {}, {}
    for turns in places.values():
        step |= dict(zip(turns, compared([to_go(*turn) for turn in turns], norm)))
        size |= dict.fromkeys(turns, len(turns))

    # (8).
    found = []
    for number, (prompt, tree) in enumerate(trees):
        own = SlowAdvantages([], [], [])
        for node, turn in enumerate(tree.nodes):
            valid = tree.trajectories[turn.trajectory].usable
            valid = valid and (len(prompts[prompt]) > 1 or size[number, node] > 1)
            advantage = 0.0
            if valid:
                mine = above[number, node]
                advantage = math.fsum(episode[path] for path in mine) / len(mine) + omega * step[number, node]
            own.advantage.append(advantage)
            own.weight.append(float(valid))
            own.valid.append(valid)
        found.append(own)
    return found


def compared(values: list[float], norm: str) -> list[float]:
    """Each less the mean, over the sample standard deviation if ``norm`` is ``std``; 0 for one alone or if all are equal."""
    largest = max(map(abs, values))
    if max(values) - min(values) <= 1e-12 * largest:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    spread = 1.0
    if norm == "std":
        spread = EPSILON + math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / spread if abs(v - mean) > 1e-12 * largest else 0.0 for v in values]
