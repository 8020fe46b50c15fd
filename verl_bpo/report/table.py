"""The table of runs, one row a name."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from verl_bpo.report.runs import Run, graded

HEADINGS = {
    "seeds": "seeds",
    "steps": "steps",
    "val": "validation first → last",
    "val_best": "best",
    "evaluated": "evaluated at the end",
    "evaluated_reward": "reward, evaluated",
    "env_steps": "env steps",
    "generated_tokens": "generated tokens",
    "prefill_tokens": "prefill tokens",
    "cached_share": "cached share",
    "updates": "updates",
    "grad_norm_mean": "grad norm mean",
    "grad_norm_relative_variance": "grad norm var / mean²",
    "seconds_per_step": "seconds a step",
    "hours": "wall time (h)",
}


def table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a name: ``seeds``, and of each number its mean and, as ``<number>_std``, its spread over seeds (sample
    standard deviation; NaN for a single seed)."""
    totals = pd.DataFrame([{"run": r.name, **r.totals} for r in runs])
    grouped = totals.groupby("run", sort=False)
    mean, std = grouped.mean(), grouped.std(ddof=1)
    out = pd.DataFrame({"seeds": grouped.size()})
    for key in mean:
        out[key], out[f"{key}_std"] = mean[key], std[key]
    return out


def markdown(numbers: pd.DataFrame) -> str:
    """The table for people: ``mean ± spread`` where there are several seeds, ``–`` where nothing was logged."""
    keys = [key for key in HEADINGS if key != "evaluated_reward" or graded(numbers)]
    lines = ["| run | " + " | ".join(HEADINGS[key] for key in keys) + " |", "|---|" + "---:|" * len(keys)]
    for name, row in numbers.iterrows():
        cells = [str(int(row["seeds"]))]
        for key in keys[1:]:
            cells.append(f"{_cell(row, 'val_first')} → {_cell(row, 'val_last')}" if key == "val" else _cell(row, key))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: pd.Series, key: str) -> str:
    mean, spread = row[key], row[f"{key}_std"]
    if pd.isna(mean):
        return "–"
    return _format(key, mean) if pd.isna(spread) else f"{_format(key, mean)} ± {_format(key, spread)}"


def _format(key: str, value: float) -> str:
    if key in ("steps", "env_steps", "generated_tokens", "prefill_tokens", "updates"):
        return f"{value:,.0f}"
    if key == "seconds_per_step":
        return f"{value:.1f}"
    if key == "cached_share":
        return f"{value:.0%}"
    return f"{value:.2f}" if key == "hours" else f"{value:.3f}"
