"""What the papers claim, beside what the runs at hand show.

The papers' numbers are those that their abstracts and introductions give; both are of other models and of other scales.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_bpo.report.runs import Run, ended, mean_curve, shared
from verl_bpo.report.statistics import Difference, by_name, difference

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
    groups = by_name(runs)
    family = {name: _family(group[0]) for name, group in groups.items()}
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


def _family(run: Run) -> str:
    """``bpo``, ``sapo``, ``grpo``, ``rloo``, ``ppo``: the estimator, or else the first word of the name."""
    estimator = run.record.get("estimator") or re.split(r"[^a-z]", run.name.lower(), maxsplit=1)[0]
    return {"gae": "ppo"}.get(estimator, estimator)
