"""``verl-bpo config``: every ``bpo.*`` key with its default and meaning."""

from __future__ import annotations

import argparse
import json

from verl_bpo.config.reference import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def main(arguments: argparse.Namespace) -> int:
    for key, default, meaning in table():
        print(f"{key} = {json.dumps(default)}\n    {meaning}")
    return 0
