"""``verl-bpo report RUNS...``: runs side by side, from what verl's loggers wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from verl_bpo.report.page import MoreTables, Section, write_page
from verl_bpo.report.plots import plot, plot_ends
from verl_bpo.report.runs import read_runs
from verl_bpo.report.statistics import differences
from verl_bpo.report.table import markdown, table


def main(words: Sequence[str], out: str | Path, metric: str = "val", more: MoreTables | None = None) -> int:
    """Compare runs; see ``verl-bpo report --help``.

    Args:
        words: see :func:`verl_bpo.report.runs.read_runs`; several runs of one name (and environment and model) are its seeds.
        out: folder for ``index.html``, ``comparison.md``, ``comparison.csv``, ``differences.csv`` and the pictures.
        metric: see :func:`verl_bpo.report.runs.validation_columns`.
        more: tables of one's own for the page.

    Raises:
        FileNotFoundError, ValueError, ImportError: see :func:`verl_bpo.report.runs.read_runs`.
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
    text = write_page(sections, out, more)
    print(text)
    written = [picture.name for s in sections for picture in s.pictures]
    print(f"written to {out}: index.html, comparison.md, comparison.csv, differences.csv, {', '.join(written)}")
    return 0
