"""``verl-bpo report RUNS...``: runs side by side, from what verl's loggers wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from verl_bpo.report.claims import differences
from verl_bpo.report.page import Section, write_page
from verl_bpo.report.runs import AXES, Run, ended, graded, mean_curve, read_runs, shared

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")


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
    # Of more methods they would hide what counts.
    train = len(names) <= 3 and any(r.curve["train"].notna().any() for r in runs)
    band = len(names) <= 6 and len(names) < len(runs)
    longest = max((r.curve["hours"].max() for r in runs if r.curve["hours"].notna().any()), default=0)
    scales = {axis: (1, label) for axis, label in AXES.items()}
    if longest < 2:
        scales["hours"] = (60, "wall time (minutes)")
    handles = []
    for number, name in enumerate(names):
        seeds = [r for r in runs if r.name == name]
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        label = name if len(seeds) == 1 else f"{name} ({len(seeds)} seeds)"
        kinds = {"val": {"lw": 2.2, **({"marker": "o", "ms": 4} if len(seeds) == 1 else {})}}
        handles.append(Line2D([], [], color=colour, ls=dash, label=label, **kinds["val"]))
        if train:
            kinds["train"] = {"lw": 1, "alpha": 0.45}
        for (axis, (factor, _)), axes in zip(scales.items(), grid.flat):
            for kind, style in kinds.items():
                curve = mean_curve(seeds, kind, axis)
                x = curve.index * factor
                axes.plot(x, curve["mean"], color=colour, ls=dash, **style)
                if kind == "val" and len(seeds) > 1 and band:
                    axes.fill_between(x, curve["low"], curve["high"], color=colour, alpha=0.15, lw=0)
    for (axis, (_, label)), axes in zip(scales.items(), grid.flat):
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
    if len(names) < len(runs):
        label = "means over seeds" + (", bands of ± one standard deviation" if band else "")
        handles.append(Line2D([], [], ls="", label=label))
    columns = min(len(handles), 2 if len(handles) < 8 else 3)
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False)
    figure.savefig(out, dpi=150, facecolor="white")


def plot_ends(runs: Sequence[Run], out: str | Path) -> None:
    """Success at the end (``ends.png``): a row a name, best mean first, a mark a seed. A thin line joins the marks of one seed
    of :attr:`Run.record`: those runs started from one policy, so that it is their differences that count."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    key, runs = ended(runs)
    values = pd.DataFrame({"name": [r.name for r in runs], "end": [r.totals[key] for r in runs]})
    values["seed"] = [np.nan if r.seed is None else r.seed for r in runs]
    groups = shared(*([r for r in runs if r.name == name] for name in values["name"].unique()))
    alike = pd.DataFrame([{"name": r.name, "end": r.totals[key]} for group in groups for r in group])
    mean = alike.groupby("name", sort=False)["end"].mean().sort_values(ascending=False, kind="stable")
    label = "mean" if len(alike) == len(values) else "mean of the seeds that all have"
    values["row"] = values["name"].map({name: -i for i, name in enumerate(mean.index)})
    figure = Figure(figsize=(11, 1.3 + 0.36 * len(mean)), layout="constrained")
    axes = figure.subplots()
    handles = [Line2D([], [], color="#22211f", ls="", marker="|", ms=14, mew=2.2, label=label)]
    axes.plot(mean, range(0, -len(mean), -1), color="#22211f", ls="", marker="|", ms=14, mew=2.2, zorder=3)
    unknown = values[values["seed"].isna()]
    axes.plot(unknown["end"], unknown["row"], ls="", marker="o", ms=6, color="#5c5b57")
    for number, (seed, rows) in enumerate(values.sort_values("row", ascending=False).groupby("seed")):
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number // len(COLOURS) % len(MARKERS)]}
        axes.plot(rows["end"], rows["row"], lw=0.8, alpha=0.6, ms=6, **style)
        handles.append(Line2D([], [], lw=0.8, ms=6, label=f"seed {seed:.0f}", **style))
    axes.set_yticks(range(0, -len(mean), -1), mean.index)
    axes.set_ylim(0.5 - len(mean), 0.5)
    axes.set_xlabel({"evaluated": "success of the last checkpoint, evaluated", "val_last": "last validation"}[key])
    if values["end"].between(0, 1).all():
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="x", color="#e4e3de", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 7), frameon=False)
    figure.savefig(out, dpi=150, facecolor="white")


def main(words: Sequence[str], out: str | Path, metric: str = "val") -> int:
    """Compare runs; see ``verl-bpo report --help``.

    Args:
        words: see :func:`read_runs`; several runs of one name (and environment and model) are its seeds.
        out: folder for ``index.html``, ``comparison.md``, ``comparison.csv``, ``differences.csv`` and the pictures.
        metric: see :func:`validation_columns`.

    Raises:
        FileNotFoundError, ValueError, ImportError: see :func:`read_runs`.
    """
    runs, out = read_runs(words, metric), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    settings = list(dict.fromkeys(r.setting for r in runs))
    sections, frames, pairs = [], [], []
    for setting in settings:
        own = [r for r in runs if r.setting == setting]
        numbers = table(own)
        frames.append(numbers.assign(setting=setting) if setting else numbers)
        pairs.append(differences(own).assign(setting=setting))
        suffix = "" if len(settings) == 1 else f"-{re.sub('[^a-z0-9.]+', '-', setting.lower())}"
        pictures = [out / f"curves{suffix}.png", out / f"ends{suffix}.png"]
        plot(own, pictures[0])
        plot_ends(own, pictures[1])
        sections.append(Section(setting, own, markdown(numbers), pairs[-1], pictures))
    pd.concat(frames).to_csv(out / "comparison.csv")
    pd.concat(pairs).to_csv(out / "differences.csv", index=False)
    text = write_page(sections, out)
    print(text)
    written = [picture.name for s in sections for picture in s.pictures]
    print(f"written to {out}: index.html, comparison.md, comparison.csv, differences.csv, {', '.join(written)}")
    return 0


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
