"""What runs of the lab come to: numbers with intervals, a table and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab.methods import METHODS


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95% interval, by Student's t over seeds."""
    from scipy.stats import t

    n, mean = len(values), float(np.mean(values))
    return mean, float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5) if n > 1 else float("nan")


def measures(run: dict[str, list[float]], level: float, updates: int) -> dict[str, float]:
    """A run's numbers. One that never reaches ``level`` counts as ``updates`` + 1 and one update's steps more than it took;
    a run that ended early keeps its last success in the area."""
    success, steps = np.array(run["success"]), run["steps"]
    hit = int(np.argmax(success >= level)) if (success >= level).any() else None
    area = (success.sum() + (updates - len(success)) * success[-1]) / updates
    return {
        "updates": updates + 1 if hit is None else hit + 1,
        "steps": steps[-1] * (1 + 1 / len(steps)) if hit is None else steps[hit],
        "reached": float(hit is not None),
        "final": float(success[-1]),
        "area": float(area),
        "explained": float(np.mean(run["explained"])),
    }


def summary(config: dict[str, Any], runs: dict[str, dict[str, list]]) -> dict[str, Any]:
    """family -> method -> measure -> [mean, half interval]; ``less``: updates fewer than the first method's, by seed."""
    out: dict[str, Any] = {}
    for family, methods in runs.items():
        keys = config | config["families"][family]
        out[family] = {}
        first = None
        for method, found in methods.items():
            rows = [measures(run, keys["level"], keys["updates"]) for run in found]
            first = first or rows
            for row, base in zip(rows, first):
                row["less"] = base["updates"] - row["updates"]
            out[family][method] = {"seeds": len(rows)} | {k: interval([r[k] for r in rows]) for k in rows[0]}
    return out


def table(config: dict[str, Any], found: dict[str, Any]) -> str:
    """Markdown, one table a family."""
    lines = []
    for family, methods in found.items():
        lines += [f"## {family}", "", f"`{config['families'][family]}`", ""]
        lines += [
            "| method | updates | fewer than the first | env steps / 1000 | final | area | reached | V explains |",
            "|---|" + "---:|" * 7,
        ]
        for method, x in methods.items():
            v = "{:.2f} ± {:.2f}".format(*x["explained"]) if METHODS[method].critic else "-"
            shown = [
                (x["updates"], 1),
                (x["less"], 1),
                ([y / 1000 for y in x["steps"]], 1),
                (x["final"], 3),
                (x["area"], 3),
            ]
            cells = [f"{mean:.{digits}f} ± {half:.{digits}f}" for (mean, half), digits in shown]
            lines.append(" | ".join([f"| {METHODS[method].title}", *cells, f"{x['reached'][0]:.0%}", f"{v} |"]))
        lines.append("")
    return "\n".join(lines)


def picture(runs: dict[str, dict[str, list]], file: Path) -> None:
    """Mean success by update; a run that ended keeps its last success."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(runs), figsize=(6 * len(runs), 4), squeeze=False)
    for axis, (family, methods) in zip(axes[0], runs.items()):
        longest = max(len(run["success"]) for found in methods.values() for run in found)
        for method, found in methods.items():
            curves = [np.pad(run["success"], (0, longest - len(run["success"])), mode="edge") for run in found]
            axis.plot(range(1, longest + 1), np.mean(curves, 0), label=METHODS[method].title.replace("`", ""))
        axis.set(title=family, xlabel="updates", ylabel="success")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def write_report(config: dict[str, Any], runs: dict[str, dict[str, list]], stem: Path) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    found = summary(config, runs)
    stem.with_suffix(".json").write_text(json.dumps({"config": config, "summary": found}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(table(config, found))
    picture(runs, stem.with_suffix(".png"))
