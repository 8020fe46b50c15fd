"""``verl-bpo prepare``: a benchmark's instances, made ready to run.

An environment takes part when its package has a module ``prepare`` with ``add_arguments(parser)`` and ``main(arguments)``,
which can be imported without the benchmark's own packages.
"""

from __future__ import annotations

import argparse

from verl_bpo.sandbox.loading import ENVIRONMENTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand a benchmark."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, line in ENVIRONMENTS.built_in_with("prepare").items():
        ENVIRONMENTS.load_part(name, "prepare").add_arguments(benchmarks.add_parser(name, help=line, description=line))


def main(arguments: argparse.Namespace) -> int:
    """Exit status: 0 when all instances are ready."""
    return ENVIRONMENTS.load_part(arguments.benchmark, "prepare").main(arguments)
