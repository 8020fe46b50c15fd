"""Confidence intervals of success rates."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np


def wilson(successes: float, episodes: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927; Brown, Cai and DasGupta 2001, formula 4).

    On a fixed panel of tasks it covers the chance in the episodes, and errs on the wide side: episodes of one task are
    more alike than the formula takes them to be.
    """
    if episodes == 0:
        return 0.0, 1.0
    z, p = NormalDist().inv_cdf((1 + level) / 2), successes / episodes
    centre = p + z * z / (2 * episodes)
    half = z * (p * (1 - p) / episodes + z * z / (4 * episodes**2)) ** 0.5
    scale = 1 + z * z / episodes
    return float(max(0.0, (centre - half) / scale)), float(min(1.0, (centre + half) / scale))


def task_bootstrap(per_task: Sequence[Sequence[float]], level: float = 0.95, draws: int = 10000) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over tasks, tasks drawn whole (Efron and Tibshirani 1993, chapter 13):
    covers the choice of tasks too. Deterministic.

    Args:
        per_task: values of each task's episodes; tasks weigh the same.
    """
    means = np.array([np.mean(values) for values in per_task])
    if len(means) == 0:
        return 0.0, 1.0
    picks = np.random.default_rng(0).integers(len(means), size=(draws, len(means)))
    low, high = np.quantile(means[picks].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
