"""Runs as numbers and curves, from what verl's loggers wrote; and which of them can be compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from verl_bpo.report.logs import Log, find_logs

TRAIN_SUCCESS = "tree/success"
AXES = {
    "env_steps": "environment steps",
    "generated_tokens": "generated tokens",
    "updates": "policy updates",
    "hours": "wall time (hours)",
}
"""Column of a curve's x axis: its label."""
VALIDATION = re.compile(r"val-(?:core|aux)/.+/(success|acc|reward)/mean@\d+")


@dataclass(frozen=True)
class Run:
    """One run. ``curve`` has a row a logged step (the index), in order, and the columns of :data:`AXES`, ``val`` and
    ``train`` (NaN where not logged). ``totals`` are the run's
    numbers of the table, NaN where not logged.
    """

    name: str
    metric: str
    curve: pd.DataFrame
    totals: dict[str, float]
    path: Path = Path()
    record: dict[str, Any] = field(default_factory=dict)
    """What benchmarks/paper recorded of it; empty for other runs."""

    @property
    def setting(self) -> str:
        """Only runs of one environment and model are compared with each other."""
        return " / ".join(self.record[k] for k in ("environment", "model") if k in self.record)

    @property
    def seed(self) -> int | None:
        return self.record.get("seed")


def validation_columns(frame: pd.DataFrame, metric: str = "val") -> list[str]:
    """The columns to average for a run's validation success.

    Args:
        frame: a run's metrics.
        metric: ``val`` looks for verl's validation means: of ``success``, else ``acc``, else ``reward``, over all data
            sources. Anything else is a metric's own name.

    Raises:
        ValueError: nothing was logged by that name; the message lists what was.
    """
    if metric != "val":
        if metric in frame and frame[metric].notna().any():
            return [metric]
        last = metric.rsplit("/", 1)[-1]
        near = [c for c in frame if last in c or c.startswith(metric.split("/")[0] + "/")]
        raise ValueError(f"no metric {metric!r} was logged; " + _listing(near or list(frame)))
    found: dict[str, list[str]] = {}
    for column in frame:
        if (match := VALIDATION.fullmatch(column)) and frame[column].notna().any():
            found.setdefault(match[1], []).append(column)
    for variable in ("success", "acc", "reward"):
        if variable in found:
            return found[variable]
    raise ValueError(
        "no validation success was logged (val-*/<source>/success|acc|reward/mean@n): validate in the run "
        "(trainer.test_freq) or choose another --metric; " + _listing(list(frame))
    )


def load_run(name: str, log: Log, metric: str = "val") -> Run:
    """The numbers and curves of a log.

    Raises:
        ValueError: see :func:`validation_columns`; the message names the file.
    """
    frame, path = log.frame, log.path
    try:
        columns = validation_columns(frame, metric)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None

    def column(key: str) -> pd.Series:
        return frame[key] if key in frame else pd.Series(np.nan, index=frame.index)

    def cumulative(key: str) -> pd.Series:
        values = column(key)
        # Validation before training is logged alone, when nothing was spent yet.
        return values.ffill().fillna(0.0) if values.notna().any() else values

    seconds = column("timing_s/step")
    curve = pd.DataFrame(
        {
            **{key: cumulative(f"compute/{key}") for key in ("env_steps", "generated_tokens", "updates")},
            "hours": seconds.fillna(0.0).cumsum() / 3600 if seconds.notna().any() else seconds,
            "val": frame[columns].mean(axis=1),
            "train": column(TRAIN_SUCCESS),
        }
    )
    val, norm = curve["val"].dropna(), column("actor/grad_norm").dropna()
    last = {
        key: cumulative(f"compute/{key}").iloc[-1]
        for key in ("env_steps", "generated_tokens", "prefill_tokens", "cached_tokens", "updates")
    }
    evaluation = log.record.get("evaluation", {})
    totals = {
        "steps": float(frame.index.max()),
        "val_first": val.iloc[0],
        "val_last": val.iloc[-1],
        "val_best": val.max(),
        "train_last": curve["train"].dropna().iloc[-1] if curve["train"].notna().any() else np.nan,
        **{key: last[key] for key in ("env_steps", "generated_tokens", "prefill_tokens")},
        "cached_share": last["cached_tokens"] / max(last["cached_tokens"] + last["prefill_tokens"], 1),
        "updates": last["updates"],
        "grad_norm_mean": norm.mean(),
        "grad_norm_relative_variance": norm.var(ddof=1) / norm.mean() ** 2 if len(norm) > 1 and norm.mean() else np.nan,
        "hours": curve["hours"].iloc[-1],
        "seconds_per_step": seconds.mean(),
        "evaluated": evaluation.get("success", {}).get("mean", np.nan),
        "evaluated_reward": evaluation.get("reward", np.nan),
    }
    return Run(name, " + ".join(columns), curve, totals, path, log.record)


def graded(totals: pd.DataFrame) -> bool:
    """Whether evaluations' rewards say more than their success. False where there are none."""
    return bool((totals["evaluated_reward"] - totals["evaluated"]).abs().max() > 1e-9)


def mean_curve(runs: Sequence[Run], column: str, axis: str) -> pd.DataFrame:
    """Mean over seeds of ``column`` against a cost: the costs (index) at which any seed logged it, with ``mean``, ``low`` and
    ``high`` (one standard deviation).

    Seeds log at different costs: each is read off between its own points, and the curve ends where the first seed ends, since
    a mean over fewer would jump there. Empty where a seed logged none.
    """
    curves = [r.curve[[axis, column]].dropna().groupby(axis)[column].last() for r in runs]
    empty = pd.DataFrame({"mean": [], "low": [], "high": []}, dtype=float)
    if any(c.empty for c in curves):
        return empty
    first, last = max(c.index[0] for c in curves), min(c.index[-1] for c in curves)
    grid = np.unique(np.concatenate([c.index.to_numpy(dtype=float) for c in curves]))
    grid = grid[(first <= grid) & (grid <= last)]
    if not grid.size:
        return empty
    values = np.stack([np.interp(grid, c.index.to_numpy(dtype=float), c.to_numpy(dtype=float)) for c in curves])
    mean, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(grid))
    return pd.DataFrame({"mean": mean, "low": mean - spread, "high": mean + spread}, index=grid)


def shared(*groups: Sequence[Run]) -> list[Sequence[Run]]:
    """The groups' runs of the seeds that all of them have, since some seeds are harder than others. All runs where seeds
    aren't known, or where none is shared."""
    seeds = [[r.seed for r in group] for group in groups]
    common = set(seeds[0]).intersection(*seeds[1:]) - {None}
    if not common or any(len(set(s)) < len(s) for s in seeds):
        return list(groups)
    return [[r for r in group if r.seed in common] for group in groups]


def ended(runs: Sequence[Run]) -> tuple[str, Sequence[Run]]:
    """By which number of :attr:`Run.totals` ends are compared, and the runs that have it: the last checkpoint's evaluation
    once a run of each name has one (the others may still be going on), else the last validation, which all have."""
    evaluated = [r for r in runs if not np.isnan(r.totals["evaluated"])]
    if {r.name for r in evaluated} == {r.name for r in runs}:
        return "evaluated", evaluated
    return "val_last", runs


def read_runs(words: Sequence[str], metric: str = "val") -> list[Run]:
    """Runs as the command line gives them: ``NAME=PATH``, or ``PATH`` of what has names of its own or is named by its file.

    Raises:
        FileNotFoundError, ValueError, ImportError: there is no run, or one without the metric; the message names it.
    """
    runs = []
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or Path(word).exists():
            name, path = "", word
        if equals and not (name or path == word) or not path:
            raise ValueError(f"{word!r} is not NAME=PATH, such as bpo=outputs/bpo.jsonl")
        for log in find_logs(path):
            runs.append(load_run(name or log.record.get("method") or log.path.stem, log, metric))
    return runs


def _listing(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return "logged: " + ", ".join(names[:most]) + rest if names else "nothing was logged"
