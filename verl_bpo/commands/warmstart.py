"""``verl-bpo warmstart``, in 0.1: says where it is now."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: whatever is given, the answer is the same."""


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Options of 0.1 are no error of their own."""
    return argparse.Namespace()


def main(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: always.
    """
    raise ValueError(
        "this is a recipe now, with the same options, in verl_bpo's repository: python recipes/imitation/train.py"
    )
