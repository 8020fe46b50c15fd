"""``verl-bpo train``: the trainer, or with ``--dry-run`` what it would do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that aren't Hydra's."""
    parser.usage = "%(prog)s [--dry-run] [--gpu-memory GIB] [OVERRIDE ...]"
    parser.epilog = "OVERRIDE: Hydra overrides, such as bpo.preset=guided, and Hydra's own options"
    parser.add_argument(
        "--dry-run", action="store_true", help="only check the overrides, or recipes (*.sh), and estimate their costs"
    )
    parser.add_argument("--gpu-memory", type=float, default=80.0, help="GiB a GPU, for the estimate (default 80)")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """All that isn't ours is Hydra's, which reads its own options, such as ``--config-dir``, in their order."""
    arguments, arguments.overrides = parser.parse_known_args(words)
    return arguments


def main(arguments: argparse.Namespace) -> int:
    """Exit status: 1 when a dry run found something missing or wrong."""
    if arguments.dry_run:
        from verl_bpo.commands.dry_run import main as dry_run

        return dry_run(arguments.overrides, arguments.gpu_memory)
    from verl_bpo.integration.main import main as train

    sys.argv = ["verl-bpo train", *arguments.overrides]
    train()
    return 0
