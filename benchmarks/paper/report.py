"""``verl-bpo report compare`` on a study's runs, with the papers' claims, the evaluations and where the numbers are from.

python benchmarks/paper/report.py runs/paper --out runs/paper/report    # at any time, also while runs go on
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from benchmarks.paper.claims import claims  # noqa: E402
from verl_bpo.report import compare  # noqa: E402
from verl_bpo.report.page import markdown_table  # noqa: E402
from verl_bpo.report.runs import Run  # noqa: E402

CLAIMS = "The papers' claims: of other models and scales, so that ours show whether an effect is there, not its size"


def tables(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(title, Markdown table) of what a study's runs have beyond what any runs have."""
    found = []
    rows = [(c.what, c.paper, c.ours, str(c.seeds), c.source) for c in claims(runs)]
    if rows:
        found.append((CLAIMS, markdown_table(("claim", "paper", "here", "seeds", "the paper's setting"), rows)))
    evaluated = [r for r in runs if "evaluation" in r.record]
    if evaluated:
        found.append(("Evaluation of the last checkpoints", markdown_table(*_evaluations(evaluated))))
    recorded = [r for r in runs if r.record.get("attempts")]
    if recorded:
        found.append(("Runs", markdown_table(*_provenance(recorded))))
    return found


def _evaluations(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows = []
    for run in runs:
        found = run.record["evaluation"]
        kinds = found["task_types"] if len(found["task_types"]) > 1 else {}
        for kind, row in {"all": found["success"], **kinds}.items():
            low, high = row["wilson"]
            interval = f"{row['mean']:.1%} [{low:.1%}, {high:.1%}]"
            rows.append((run.name, str(run.seed), kind, interval, str(row["episodes"]), str(row["tasks"])))
    return ("run", "seed", "task type", "success [95%, Wilson]", "episodes", "tasks"), rows


def _provenance(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows = []
    for run in runs:
        last = run.record["attempts"][-1]
        commit = last.get("commit", "")[:10] + (" + changes" if last.get("changed_files") else "")
        versions = ", ".join(
            f"{k} {v}" for k, v in last.get("versions", {}).items() if k in ("verl", "torch", "verl_bpo")
        )
        state = "done" if run.record["done"] else "unfinished"
        hours = sum(a.get("seconds", 0) for a in run.record["attempts"]) / 3600
        rows.append(
            (run.name, str(run.seed), state, str(len(run.record["attempts"])), f"{hours:.2f}", commit, versions)
        )
    return ("run", "seed", "state", "attempts", "hours with start", "commit", "versions"), rows


def main(words: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=str, help="folders of runs, as of verl-bpo report compare")
    parser.add_argument("--out", type=Path, required=True, help="folder for tables and pictures")
    arguments = parser.parse_args(words)
    try:
        return compare.main(arguments.runs, arguments.out, more=tables)
    except (FileNotFoundError, ValueError, ImportError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
