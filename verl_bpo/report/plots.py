"""Pictures of runs: curves against each cost, and where the runs end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from verl_bpo.report.runs import AXES, Run, ended, mean_curve, shared

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")


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
