"""``verl-bpo report compare``: runs side by side, from the files that verl's ``file`` logger wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

TRAIN_SUCCESS = "tree/success"
AXES = {
    "env_steps": "environment steps",
    "generated_tokens": "generated tokens",
    "updates": "policy updates",
    "hours": "wall time (hours)",
}
"""Column of a curve's x axis: its label."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
DASHES = ("-", "--", ":", "-.")
VALIDATION = re.compile(r"val-(?:core|aux)/.+/(success|acc|reward)/mean@\d+")


@dataclass(frozen=True)
class Run:
    """One metrics file, a row a logged step (the index), in order.

    ``curve`` has the columns of :data:`AXES`, ``val`` and ``train`` (NaN where not logged). ``totals`` are the run's
    numbers of the table, NaN where not logged.
    """

    name: str
    metric: str
    curve: pd.DataFrame
    totals: dict[str, float]


def read_metrics(path: str | Path) -> pd.DataFrame:
    """All metrics of a run: index step, one column a metric.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no metrics.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give the file that VERL_FILE_LOGGER_PATH named in the run")
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            rows.append({"step": record["step"], **record["data"]})
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a run that was killed, or of one still writing
    if not rows:
        raise ValueError(
            f"{path} holds no metrics: is it a file of verl's file logger (trainer.logger=[console,file])?"
        )
    frame = pd.DataFrame(rows).apply(pd.to_numeric, errors="coerce")
    return frame.groupby("step").last()  # validation may be logged on a line of its own


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


def load_run(name: str, path: str | Path, metric: str = "val") -> Run:
    """Read one run.

    Raises:
        FileNotFoundError, ValueError: see :func:`read_metrics` and :func:`validation_columns`; the message names the file.
    """
    frame = read_metrics(path)
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
    }
    return Run(name, " + ".join(columns), curve, totals)


HEADINGS = {
    "seeds": "seeds",
    "steps": "steps",
    "val": "validation first → last",
    "val_best": "best",
    "env_steps": "env steps",
    "generated_tokens": "generated tokens",
    "prefill_tokens": "prefill tokens",
    "cached_share": "cached share",
    "updates": "updates",
    "grad_norm_mean": "grad norm mean",
    "grad_norm_relative_variance": "grad norm var / mean²",
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
    lines = ["| run | " + " | ".join(HEADINGS.values()) + " |", "|---|" + "---:|" * len(HEADINGS)]
    for name, row in numbers.iterrows():
        cells = [str(int(row["seeds"]))]
        for key in list(HEADINGS)[1:]:
            cells.append(f"{_cell(row, 'val_first')} → {_cell(row, 'val_last')}" if key == "val" else _cell(row, key))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def mean_curve(runs: Sequence[Run], column: str) -> pd.DataFrame:
    """Mean over seeds of a curve's axes, and ``mean``, ``low``, ``high`` (one standard deviation) of ``column``, at the
    steps that every seed logged: a mean over fewer would jump where a seed ends."""
    curves = [r.curve[r.curve[column].notna()] for r in runs]
    steps = curves[0].index
    for curve in curves[1:]:
        steps = steps.intersection(curve.index)
    stacked = pd.concat([c.loc[steps] for c in curves])
    grouped = stacked.groupby(level=0)
    out = grouped[list(AXES)].mean()
    out["mean"] = grouped[column].mean()
    spread = grouped[column].std(ddof=1).fillna(0.0)
    out["low"], out["high"] = out["mean"] - spread, out["mean"] + spread
    return out


def plot(runs: Sequence[Run], out: str | Path) -> None:
    """Success against each cost, one line a name (``curves.png``)."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, PercentFormatter

    names = list(dict.fromkeys(r.name for r in runs))
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    grid = figure.subplots(2, 2, sharey=True)
    highest = max(r.curve[["val", "train"]].max().max() for r in runs)
    lowest = min(r.curve[["val", "train"]].min().min() for r in runs)
    share = lowest >= 0 and highest <= 1
    train = any(r.curve["train"].notna().any() for r in runs)
    handles = []
    for number, name in enumerate(names):
        seeds = [r for r in runs if r.name == name]
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        label = name if len(seeds) == 1 else f"{name} (mean of {len(seeds)} seeds, band: ± one standard deviation)"
        handles.append(Line2D([], [], color=colour, ls=dash, lw=2.2, marker="o", ms=4, label=label))
        curves = {"val": mean_curve(seeds, "val")}
        if any(r.curve["train"].notna().any() for r in seeds):
            curves["train"] = mean_curve(seeds, "train")
        for axis, axes in zip(AXES, grid.flat):
            for kind, curve in curves.items():
                x = curve[axis]
                if x.notna().any():
                    style = {"lw": 2.2, "marker": "o", "ms": 4} if kind == "val" else {"lw": 1, "alpha": 0.45}
                    axes.plot(x, curve["mean"], color=colour, ls=dash, **style)
                    if kind == "val" and len(seeds) > 1:
                        axes.fill_between(x, curve["low"], curve["high"], color=colour, alpha=0.15, lw=0)
    for (axis, label), axes in zip(AXES.items(), grid.flat):
        axes.set_xlabel(label)
        if not any(r.curve[axis].notna().any() for r in runs):
            axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color="#5c5b57")
            axes.set_xticks([])
        axes.set_xlim(left=0)
        if axis != "hours":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if share:
            axes.set_ylim(-0.02, 1.02)
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(color="#e4e3de", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    for axes in grid[:, 0]:
        axes.set_ylabel("success" if share else "validation metric")
    if train:
        handles.append(Line2D([], [], color="#5c5b57", lw=1, alpha=0.6, label="thin: training leaves, forks included"))
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 2), frameon=False)
    figure.savefig(out, dpi=150, facecolor="white")


def main(pairs: Sequence[str], out: str | Path, metric: str = "val") -> int:
    """Compare runs; see ``verl-bpo report compare --help``.

    Args:
        pairs: ``NAME=FILE``; files of one NAME are its seeds.
        out: folder for ``comparison.md``, ``comparison.csv`` and ``curves.png``.
        metric: see :func:`validation_columns`.

    Raises:
        FileNotFoundError, ValueError: a file or metric is missing or empty, or a pair isn't ``NAME=FILE``.
    """
    runs = []
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise ValueError(f"{pair!r} is not NAME=FILE, such as bpo=outputs/bpo.jsonl")
        runs.append(load_run(name, path, metric))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    numbers = table(runs)
    metrics = ", ".join(dict.fromkeys(r.metric for r in runs))
    text = markdown(numbers) + f"\nValidation: {metrics}.\n"
    (out / "comparison.md").write_text(text, encoding="utf-8")
    numbers.to_csv(out / "comparison.csv")
    plot(runs, out / "curves.png")
    print(text)
    print(f"written to {out}: comparison.md, comparison.csv, curves.png")
    return 0


def _cell(row: pd.Series, key: str) -> str:
    mean, spread = row[key], row[f"{key}_std"]
    if pd.isna(mean):
        return "–"
    return _format(key, mean) if pd.isna(spread) else f"{_format(key, mean)} ± {_format(key, spread)}"


def _format(key: str, value: float) -> str:
    if key in ("steps", "env_steps", "generated_tokens", "prefill_tokens", "updates"):
        return f"{value:,.0f}"
    if key == "cached_share":
        return f"{value:.0%}"
    return f"{value:.2f}" if key == "hours" else f"{value:.3f}"


def _listing(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return "logged: " + ", ".join(names[:most]) + rest if names else "nothing was logged"
