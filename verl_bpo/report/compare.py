"""``verl-bpo report RUNS...``: runs side by side, from what verl's loggers wrote."""

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
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
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

    @property
    def family(self) -> str:
        """``bpo``, ``sapo``, ``grpo``, ``rloo``, ``ppo``: the estimator, or else the first word of the name."""
        estimator = self.record.get("estimator") or re.split(r"[^a-z]", self.name.lower(), maxsplit=1)[0]
        return {"gae": "ppo"}.get(estimator, estimator)


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


def graded(totals: pd.DataFrame) -> bool:
    """Whether evaluations' rewards say more than their success. False where there are none."""
    return bool((totals["evaluated_reward"] - totals["evaluated"]).abs().max() > 1e-9)


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


def main(words: Sequence[str], out: str | Path, metric: str = "val") -> int:
    """Compare runs; see ``verl-bpo report --help``.

    Args:
        words: see :func:`read_runs`; several runs of one name (and environment and model) are its seeds.
        out: folder for ``index.html``, ``comparison.md``, ``comparison.csv``, ``differences.csv`` and the pictures.
        metric: see :func:`validation_columns`.

    Raises:
        FileNotFoundError, ValueError, ImportError: see :func:`read_runs`.
    """
    from verl_bpo.report.claims import differences
    from verl_bpo.report.page import Section, write_page

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


def _listing(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return "logged: " + ", ".join(names[:most]) + rest if names else "nothing was logged"
