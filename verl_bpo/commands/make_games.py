"""``verl-bpo make-games``: tasks by a built-in environment's own generator, the same for the same seed.

An environment has one when its package has a module ``generate`` with ``make(out, train, valid, seed, level)``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_bpo.sandbox.loading import ENVIRONMENTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("out", type=Path, help="folder for the games")
    parser.add_argument(
        "--kind", choices=tuple(ENVIRONMENTS.built_in_with("generate")), default="textworld", help="default textworld"
    )
    parser.add_argument("--train", type=int, default=64, help="number of training games (default 64)")
    parser.add_argument(
        "--valid", type=int, default=32, help="number of held-out games, in each held-out split (default 32)"
    )
    parser.add_argument(
        "--level", type=int, default=1, help="difficulty (default 1); another number says which ones a kind has"
    )
    parser.add_argument("--seed", type=int, default=0)


def main(arguments: argparse.Namespace) -> int:
    """Exit status."""
    generator = ENVIRONMENTS.load_part(arguments.kind, "generate")
    generator.make(arguments.out, arguments.train, arguments.valid, seed=arguments.seed, level=arguments.level)
    return 0
