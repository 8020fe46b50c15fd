"""``verl-bpo config``: every ``bpo.*`` key with its default and meaning."""

from __future__ import annotations

import argparse

from verl_bpo.commands.main import _config as main

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""
