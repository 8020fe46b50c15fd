"""What the episodes of an evaluation come to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from verl_bpo.commands.evaluation.episodes import Episode
from verl_bpo.report.intervals import task_bootstrap, wilson


def summary(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Success with 95% intervals, over all and per task type, and means of an episode's other numbers.

    ``wilson`` takes the tasks as given, ``bootstrap`` covers their choice too (see :mod:`verl_bpo.report.intervals`).
    """
    kinds: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.task_type is not None:
            kinds[episode.task_type].append(episode)
    count = max(len(episodes), 1)
    return {
        "success": _success(episodes),
        "task_types": {kind: _success(kinds[kind]) for kind in sorted(kinds)},
        "reward": sum(e.reward for e in episodes) / count,
        "turns": sum(e.turns for e in episodes) / count,
        "tokens": sum(e.tokens for e in episodes) / count,
        "invalid_share": sum(e.invalid for e in episodes) / max(sum(e.turns for e in episodes), 1),
        "truncated": sum(e.end == "truncated" for e in episodes) / count,
    }


def _success(episodes: Sequence[Episode]) -> dict[str, Any]:
    per_task: dict[int, list[float]] = defaultdict(list)
    for e in episodes:
        per_task[e.task].append(float(e.success))
    won = sum(e.success for e in episodes)
    return {
        "mean": won / max(len(episodes), 1),
        "episodes": len(episodes),
        "tasks": len(per_task),
        "wilson": wilson(won, len(episodes)),
        "bootstrap": task_bootstrap(list(per_task.values())),
    }
