"""``verl-bpo report``: what to look at after a run. Its three commands import what they need when they run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

COMPARE = "compare"


def _trees(arguments: argparse.Namespace) -> int:
    from verl_bpo.report.dump import Dump
    from verl_bpo.report.trees import most_interesting, write_page

    dump = Dump(arguments.dump, arguments.step)
    overview = write_page(dump, arguments.out, arguments.limit)
    print(f"{arguments.out}: {overview.trees} trees, {min(overview.trees, arguments.limit)} of them to look at")
    if dump.left_out:
        print(f"left out: {dump.left_out} trees of an interrupted try, which the run did not learn from")
    if arguments.png:
        _need("matplotlib")
        from verl_bpo.report.picture import write_picture

        view, roots = most_interesting(dump, overview)
        write_picture(view, roots, arguments.png)
        print(f"{arguments.png}: {view.record.task}, step {view.record.step}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    _need("pandas", "matplotlib", "jinja2", "scipy")
    from verl_bpo.report.compare import main

    return main(arguments.runs, arguments.out, arguments.metric)


def _recompute(arguments: argparse.Namespace) -> int:
    from verl_bpo.report.recompute import main

    return main(arguments.dump)


def _need(*modules: str) -> None:
    from importlib.util import find_spec

    missing = [m for m in modules if find_spec(m) is None]
    if missing:
        raise ImportError(f"{' and '.join(missing)} not installed: pip install 'verl_bpo[report]'")


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the three commands, each of which sets ``run(arguments) -> exit status``."""
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")

    def add(name: str, run, help: str, description: str) -> argparse.ArgumentParser:
        command = what.add_parser(name, help=help, description=description)
        command.set_defaults(run=run)
        return command

    trees = add(
        "trees",
        _trees,
        "one self-contained HTML page of the run's rollout trees",
        "Write one HTML file that opens in any browser, without a server or a network: an overview of all trees, and "
        "trees to walk through turn by turn, coloured by advantage.",
    )
    trees.add_argument("dump", type=Path, help="folder that bpo.dump_dir named in the run")
    trees.add_argument("--step", type=int, help="this training step alone (default: all)")
    trees.add_argument(
        "--limit", type=_positive, default=50, help="most trees to list, evenly spread over the run (default 50)"
    )
    trees.add_argument("--out", type=Path, required=True, help="the HTML file")
    trees.add_argument("--png", type=Path, help="also draw the most interesting tree as a picture (png, svg or pdf)")

    compare = add(
        COMPARE,
        _compare,
        "runs side by side: tables, differences with intervals, curves, ends seed by seed; may be left out: report RUNS...",
        "Compare runs by what verl logged of them: files of its file logger, TensorBoard or W&B folders (offline too), or "
        "the folders that benchmarks/paper writes. Several runs of one name, environment and model are seeds: their mean "
        "and spread are shown. Writes index.html, which needs nothing beside it, comparison.md, comparison.csv and curves.",
    )
    compare.add_argument("runs", nargs="+", metavar="[NAME=]PATH", help="a run's log, or a folder with runs in it")
    compare.add_argument(
        "--metric",
        default="val",
        help="metric of success: val (default) finds verl's validation mean of success, acc or reward; or a full name",
    )
    compare.add_argument("--out", type=Path, required=True, help="folder for the tables and the curves")

    recompute = add(
        "recompute",
        _recompute,
        "compute every dumped advantage again and say whether it matches",
        "Recompute every advantage from the dumped trees and print the largest difference of each step. Exit code 1 when "
        "one does not match or could not be checked.",
    )
    recompute.add_argument("dump", type=Path, help="folder that bpo.dump_dir named in the run")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """``report RUNS...`` is ``report compare RUNS...``."""
    named = words and words[0] in ("trees", COMPARE, "recompute", "-h", "--help")
    return parser.parse_args(words if named or not words else [COMPARE, *words])


def main(arguments: argparse.Namespace) -> int:
    """Exit status."""
    return arguments.run(arguments)
