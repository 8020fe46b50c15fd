"""What the papers claim, beside what the runs at hand show.

The papers' numbers are those that their abstracts and introductions give; both are of other models and of other scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from verl_bpo.report.runs import Run, ended, graded, mean_curve, shared

BPO = "BPO (Branching Policy Optimization): WebShop, ALFWorld, SWE-bench Verified; Qwen2.5-7B, Llama-3.1-8B"
SAPO = "SAPO (arXiv 2608.19842): ALFWorld and WebShop, Qwen2.5-1.5B and 7B, mean"
NO_BRANCHING = ("grpo", "rloo")


@dataclass(frozen=True)
class Claim:
    """One row: what is claimed, by whom, the paper's number, ours, and the seeds ours is of."""

    what: str
    source: str
    paper: str
    ours: str
    seeds: int


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
    groups = _by_name(runs)
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


def updates_to(runs: Sequence[Run], level: float) -> float | None:
    """Policy updates at which the seeds' mean validation curve first reaches ``level``; None if it never does."""
    mean = mean_curve(runs, "val", "updates")["mean"]
    reached = np.flatnonzero(mean >= level)
    if not reached.size:
        return None
    there, before = reached[0], max(reached[0] - 1, 0)
    return float(np.interp(level, mean.iloc[[before, there]], mean.index[[before, there]]))


def claims(runs: Sequence[Run]) -> list[Claim]:
    """All claims that the runs of one environment and model have something to say on."""
    key, runs = ended(runs)
    groups = _by_name(runs)
    family = {name: group[0].family for name, group in groups.items()}
    named = lambda *families: [n for n in groups if family[n] in families]  # noqa: E731
    found = []
    baselines = named(*NO_BRANCHING)
    if baselines:
        alike = zip(baselines, shared(*(groups[n] for n in baselines)), strict=True)
        means = {n: float(np.mean([r.totals[key] for r in group])) for n, group in alike}
        best = max(baselines, key=lambda n: means[n])
        for name in named("bpo"):
            for other in sorted(baselines, key=lambda n: -means[n]):
                found += _bpo(name, groups[name], other, groups[other], key, other == best)
    for name in named("sapo"):
        for other in named("ppo", "grpo"):
            paper = {"ppo": "+15.1", "grpo": "+12.1"}[family[other]]
            ours = difference(groups[name], groups[other], key)
            found.append(Claim(f"{name} - {other}, success in points", SAPO, paper, _points(ours), ours.seeds))
        for other in named("ppo"):
            mine, theirs = shared(groups[name], groups[other])
            ratio, seeds = _ratio(mine, theirs, "seconds_per_step"), min(len(mine), len(theirs))
            ours = "not logged" if np.isnan(ratio) else f"{ratio - 1:+.1%}"
            found.append(Claim(f"{name} against {other}, time per iteration", SAPO, "-33.2%", ours, seeds))
    return found


def _bpo(name: str, runs: Sequence[Run], other: str, baseline: Sequence[Run], key: str, best: bool) -> list[Claim]:
    runs, baseline = shared(runs, baseline)
    gain = difference(runs, baseline, key)
    seeds = gain.seeds
    title = f"{name} - {other}{' (best baseline)' if best else ''}, success in points"
    out = [Claim(title, BPO, "+3.6 to +6.1", _points(gain), seeds)]
    level = mean_curve(baseline, "val", "updates")["mean"].max()
    theirs, mine = updates_to(baseline, level), updates_to(runs, level)
    if np.isnan(level):
        ours = "not logged"
    elif mine is None:
        ours = f"not reached ({level:.1%}, {other}: {theirs:.3g} updates)"
    elif not theirs:
        ours = f"{other} never rose above its start"
    else:
        ours = f"{mine / theirs - 1:+.0%} ({mine:.3g} against {theirs:.3g} updates to {level:.1%})"
    out.append(Claim(f"{name}: updates to {other}'s best mean level", BPO, "-38%", ours, seeds))
    ratio = _ratio(runs, baseline, "grad_norm_relative_variance")
    ours = "not logged" if np.isnan(ratio) else f"x {ratio:.2f}"
    title = f"{name} against {other}, variance of the gradient norm over the run, relative"
    out.append(Claim(title, BPO, "halved", ours, seeds))
    return out


def _ratio(runs: Sequence[Run], others: Sequence[Run], key: str) -> float:
    mine, theirs = (np.mean([r.totals[key] for r in group]) for group in (runs, others))
    return float(mine / theirs) if theirs else np.nan


def _points(found: Difference) -> str:
    text = f"{100 * found.mean:+.1f}"
    if not np.isnan(found.spread):
        text += f" ± {100 * found.spread:.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    return text + ("" if np.isnan(found.p_value) else f", p = {found.p_value:.2g}")


def _by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return groups
