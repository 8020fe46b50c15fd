"""The comparison as Markdown and as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from verl_bpo.report.runs import Run, ended
from verl_bpo.report.statistics import differences, noise

PAIRS = 15
"""Most pairs of methods on the page; ``differences.csv`` has all."""
NOTES = (
    "Mean ± standard deviation over seeds. Differences between methods are taken seed by seed, over the seeds that both "
    "have; in brackets the 95% interval of their mean. Of many pairs one in twenty has p < 0.05 by chance alone."
)
MoreTables = Callable[[Sequence[Run]], list[tuple[str, str]]]
"""Of the runs of one environment and model: (title, Markdown table, see :func:`markdown_table`) each."""


@dataclass(frozen=True)
class Section:
    """Runs of one environment and model."""

    title: str
    runs: Sequence[Run]
    table: str
    """Markdown."""
    pairs: pd.DataFrame
    """See :func:`verl_bpo.report.statistics.differences`."""
    pictures: Sequence[Path]
    """The curves and the ends."""


def write_page(sections: Sequence[Section], out: Path, more: MoreTables | None = None) -> str:
    """Write ``comparison.md`` and ``index.html``, with ``more`` tables under ours; returns the Markdown."""
    from jinja2 import Environment, PackageLoader

    parts = [
        (section, _tables(section) + (more(section.runs) if more else []), f"{_compared(section)}{_noise(section)}")
        for section in sections
    ]
    text = ""
    for section, tables, footnote in parts:
        text += f"## {section.title}\n\n" if section.title else ""
        text += "\n".join(f"{title}\n\n{table}" if title else table for title, table in tables)
        metrics = ", ".join(dict.fromkeys(r.metric for r in section.runs))
        text += f"\n{footnote}Validation: {metrics}.\n"
    text += f"\n{NOTES}\n"
    (out / "comparison.md").write_text(text, encoding="utf-8")
    page = Environment(loader=PackageLoader("verl_bpo.report", ""), autoescape=True).get_template("comparison.html")
    content = [
        {
            "title": section.title,
            "footnote": footnote,
            "tables": [(title, _cells(table)) for title, table in tables],
            "pictures": [base64.b64encode(picture.read_bytes()).decode() for picture in section.pictures],
        }
        for section, tables, footnote in parts
    ]
    (out / "index.html").write_text(page.render(sections=content, notes=NOTES), encoding="utf-8")
    return text


def _compared(section: Section) -> str:
    """What "the end" of a run is in the tables."""
    if len({r.name for r in section.runs}) < 2:
        return ""
    key, runs = ended(section.runs)
    if key == "val_last":
        return "Methods are compared by each run's last validation. "
    left_out = len(section.runs) - len(runs)
    rest = f" ({left_out} without one left out)" if left_out else ""
    return f"Methods are compared by the evaluation of each run's last checkpoint{rest}. "


def _noise(section: Section) -> str:
    """How large a difference means something; empty where that can't be told."""
    found = noise(section.runs)
    if found is None:
        return ""
    return (
        f"Noise: the end of a run, once method and seed are taken out, varies by {100 * found.deviation:.1f} points (standard "
        f"deviation, {found.methods} methods of {found.seeds} seeds). Two methods' means differ beyond chance from "
        f"{100 * found.least:.1f} points on (95%, one comparison); the chance of all these differences if no method differed "
        f"from another is p = {found.p_value:.2f} (two-way analysis of variance). "
    )


def _tables(section: Section) -> list[tuple[str, str]]:
    """(title, Markdown table) of all that is known of the runs."""
    tables = [("", section.table)]
    rewards = differences(section.runs, reward=True)
    for of, pairs in (("Differences", section.pairs), ("Differences of the mean reward", rewards)):
        if len(tested := pairs.dropna(subset="p_value")):
            shown = tested.sort_values("p_value", kind="stable").head(PAIRS)
            title = f"{of} at the end, the least likely by chance first: {len(shown)} of {len(pairs)} pairs"
            tables.append((title, markdown_table(*_differences(shown))))
    return tables


def _differences(pairs: pd.DataFrame) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows = [
        (
            f"{row.method} - {row.less}",
            f"{row.mean:+.1f} ± {row.spread:.1f}",
            f"{row.low:+.1f} to {row.high:+.1f}",
            f"{row.p_value:.2g}",
            str(row.seeds),
        )
        for row in pairs.itertuples()
    ]
    return ("in points", "mean ± sd", "95% of the mean", "p (t test)", "seeds"), rows


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown, which the page turns into its own."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _cells(table: str) -> list[list[str]]:
    """A Markdown table's rows, its head first."""
    lines = [line for line in table.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
