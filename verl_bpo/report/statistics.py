"""Differences between methods, and the noise they stand out from, by seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from verl_bpo.report.runs import Run, ended, graded, shared


@dataclass(frozen=True)
class Difference:
    """Mean of some runs minus that of others, in the units of the number compared."""

    mean: float
    spread: float
    """Standard deviation of one seed's difference, here and in all numbers below NaN for a single seed."""
    low: float
    """Of the mean's 95% interval by Student's t."""
    high: float
    p_value: float
    """Two-sided, of no difference; NaN too where the spread is rounding."""
    seeds: int


def difference(runs: Sequence[Run], others: Sequence[Run], key: str) -> Difference:
    """Runs of the same seeds start from one policy: the seeds that both have are compared pair by pair. Where seeds aren't
    known, the two means are (Welch)."""
    runs, others = shared(runs, others)
    mine, theirs = ({r.seed: r.totals[key] for r in group} for group in (runs, others))
    if None not in mine and mine.keys() == theirs.keys() and len(mine) == len(runs) == len(others):
        pairs = np.array([mine[seed] - theirs[seed] for seed in mine])
        mean, seeds = float(pairs.mean()), len(pairs)
        spread, free = (float(pairs.std(ddof=1)), seeds - 1) if seeds > 1 else (np.nan, 1)
        error = spread / seeds**0.5
    else:
        a, b = (np.array([r.totals[key] for r in group]) for group in (runs, others))
        mean, seeds = float(a.mean() - b.mean()), min(len(a), len(b))
        spread, error, free = np.nan, np.nan, 1.0
        if seeds > 1:
            parts = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
            spread, error = float(np.sqrt(a.var(ddof=1) + b.var(ddof=1))), float(np.sqrt(parts.sum()))
            free = parts.sum() ** 2 / (parts**2 / (np.array([len(a), len(b)]) - 1)).sum() if error else 1.0
    half = float(stats.t.ppf(0.975, free)) * error
    p_value = float(2 * stats.t.sf(abs(mean) / error, free)) if error > 1e-9 else np.nan
    return Difference(mean, spread, mean - half, mean + half, p_value, seeds)


def differences(runs: Sequence[Run], reward: bool = False) -> pd.DataFrame:
    """Every method less every other, best mean first: ``method``, ``less``, ``seeds`` and the numbers of
    :class:`Difference`, in points.

    Args:
        reward: of the evaluations' mean reward in place of success. Empty where runs have none, or where the two are one.
    """
    key, runs = ended(runs)
    if reward:
        key, runs = "evaluated_reward", runs if graded(pd.DataFrame([r.totals for r in runs])) else []
    groups = by_name(runs)
    names = sorted(groups, key=lambda n: -np.mean([r.totals[key] for r in groups[n]]))
    rows = []
    for number, name in enumerate(names):
        for other in names[number + 1 :]:
            found = difference(groups[name], groups[other], key)
            points = {k: 100 * getattr(found, k) for k in ("mean", "spread", "low", "high")}
            rows.append({"method": name, "less": other, "seeds": found.seeds, **points, "p_value": found.p_value})
    return pd.DataFrame(rows, columns=["method", "less", "seeds", "mean", "spread", "low", "high", "p_value"])


@dataclass(frozen=True)
class Noise:
    """What is left of runs' final success once method and seed are taken out: the residuals of a two-way analysis of
    variance without interaction, one run a cell."""

    deviation: float
    """Standard deviation of a run."""
    least: float
    """Least significant difference (95%, two-sided) of two methods' means over the seeds."""
    p_value: float
    """F test of no difference between any methods: the chance of a spread of their means like this one or larger."""
    methods: int
    seeds: int


def noise(runs: Sequence[Run]) -> Noise | None:
    """Of the methods that have all seeds; None with fewer than two methods or seeds, or without any noise."""
    key, runs = ended(runs)
    frame = pd.DataFrame(
        {"name": [r.name for r in runs], "seed": [r.seed for r in runs], "end": [r.totals[key] for r in runs]}
    )
    if frame["seed"].isna().any() or frame.duplicated(["name", "seed"]).any():
        return None
    cells = frame.pivot(index="name", columns="seed", values="end").dropna().to_numpy()
    methods, seeds = cells.shape
    if min(methods, seeds) < 2:
        return None
    means = cells.mean(1, keepdims=True)
    residuals = cells - means - cells.mean(0, keepdims=True) + cells.mean()
    free = (methods - 1) * (seeds - 1)
    variance = float((residuals**2).sum() / free)
    between = float(seeds * ((means - cells.mean()) ** 2).sum() / (methods - 1))
    if variance < 1e-12:  # nothing but rounding
        return None
    p_value = float(stats.f.sf(between / variance, methods - 1, free))
    least = float(stats.t.ppf(0.975, free) * (2 * variance / seeds) ** 0.5)
    return Noise(variance**0.5, least, p_value, methods, seeds)


def by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one name, which are its seeds."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return groups
