"""``verl-bpo``: one command for everything around a training run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from verl_bpo import __version__

COMMANDS = {
    "train": "train with verl; every key of verl's config and of bpo.* is an override",
    "doctor": "show versions, registrations, engines and environments; fails if a mode can't run",
    "config": "print every bpo.* key with its default and meaning",
    "make-games": "make solvable games or repair tasks, the same for the same seed",
    "make-data": "write a split's tasks as a verl prompt file (parquet)",
    "prepare": "make a benchmark's instances ready to run: installed here, or as container images",
    "check-env": "check an environment's contract: deterministic, exact snapshots, no leaks",
    "eval": "success of a checkpoint or Hugging Face model on a fixed panel of tasks",
    "report": "look at a run: its trees, a comparison with others, a check of its advantages",
    "warmstart": "moved: recipes/imitation/train.py",
}
"""Each is a module of this package, with underscores for dashes, imported when its command is given. It has
``add_arguments(parser)``, ``main(arguments)``, which returns the exit status, and ``parse(parser, words)`` where argparse's
``parse_args`` won't do."""


def parse(words: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The module of the command that ``words`` begin with, and its arguments."""
    top = argparse.ArgumentParser(prog="verl-bpo", description=__doc__)
    top.add_argument("--version", action="version", version=f"verl_bpo {__version__}")
    choices = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help in COMMANDS.items():
        choices.add_parser(name, help=help, add_help=False)
    name = top.parse_args(words[:1]).command
    command = importlib.import_module(f"verl_bpo.commands.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"verl-bpo {name}", description=COMMANDS[name])
    command.add_arguments(parser)
    return command, getattr(command, "parse", argparse.ArgumentParser.parse_args)(parser, words[1:])


def main() -> int:
    """Entry point of ``verl-bpo``. An error the user can mend ends in one line."""
    from verl_bpo.ending import Stopped, disk_full, ends_on_signals, is_disk_full
    from verl_bpo.options import ConfigError
    from verl_bpo.sandbox.base import SandboxError
    from verl_bpo.sandbox.loading import EnvironmentUnavailable

    name = f"verl-bpo {sys.argv[1]}" if len(sys.argv) > 1 else "verl-bpo"
    try:
        with ends_on_signals(name):
            command, arguments = parse(sys.argv[1:])
            return command.main(arguments)
    except Stopped as stop:
        return 128 + stop.args[0]
    except (ConfigError, EnvironmentUnavailable, SandboxError, OSError, ValueError, ImportError) as error:
        print(f"{name}: {disk_full(error) if is_disk_full(error) else error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
