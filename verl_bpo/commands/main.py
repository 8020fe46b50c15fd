"""``verl-bpo``: one command for everything around a training run."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from verl_bpo import __version__


def _train(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        from verl_bpo.commands.dry_run import main as dry_run

        return dry_run(arguments.overrides, arguments.gpu_memory)
    from verl_bpo.integration.main import main

    sys.argv = ["verl-bpo train", *arguments.overrides]
    main()
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from verl_bpo.commands.doctor import main
    from verl_bpo.shells.container import ContainerConfig

    return main(arguments.mode, arguments.env, ContainerConfig(arguments.engine, arguments.run_options))


def _make_games(arguments: argparse.Namespace) -> int:
    if arguments.kind == "alfworld":
        from verl_bpo.envs.alfworld.generate import make_alfworld_games

        counts = {"train": arguments.train, "valid_seen": arguments.valid, "valid_unseen": arguments.valid}
        make_alfworld_games(arguments.out, counts, seed=arguments.seed, level=arguments.level)
        print(f"{arguments.out}: generated games, not ALFWorld's own; play them with ALFWORLD_DATA={arguments.out}")
        return 0
    if arguments.kind == "repair":
        from verl_bpo.envs.repair.generate import make_repairs as make
    else:
        from verl_bpo.envs.textworld.generate import make_textworld_games as make

    counts = {"train": arguments.train, "valid": arguments.valid}
    make(arguments.out, counts, seed=arguments.seed, level=arguments.level)
    return 0


def _make_data(arguments: argparse.Namespace) -> int:
    from verl_bpo.commands.data import write_prompts

    kwargs = _kwargs(arguments) | ({"root": arguments.root} if arguments.root else {})
    record = write_prompts(
        arguments.env,
        arguments.split,
        arguments.out,
        limit=arguments.limit,
        panel=arguments.panel,
        seed=arguments.seed,
        kwargs=kwargs,
    )
    print(f"{arguments.out}: {record['rows']} tasks of {arguments.env} {arguments.split}, sha256 {record['sha256']}")
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    from verl_bpo.envs.swebench.prepare import main

    return main(arguments)


def _check_env(arguments: argparse.Namespace) -> int:
    from verl_bpo.commands.check_env import main

    return main(arguments.env, arguments.tasks, arguments.split, arguments.root, _kwargs(arguments))


def _kwargs(arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``--kwargs`` holds, tried against the environment's constructor."""
    from verl_bpo.sandbox.loading import load_environment

    try:
        kwargs = json.loads(arguments.kwargs)
    except ValueError as error:
        raise ValueError(f"--kwargs {arguments.kwargs} is no JSON: {error}") from error
    if not isinstance(kwargs, dict):
        raise ValueError(f"--kwargs {arguments.kwargs} is no JSON object, such as '{{\"name\": 1}}'")
    signature = inspect.signature(load_environment(arguments.env))
    try:
        signature.bind_partial(**kwargs)
    except TypeError as error:
        known = ", ".join(signature.parameters)
        raise ValueError(f"--kwargs: environment {arguments.env} {error}; it takes {known}") from error
    return kwargs


def _warmstart(arguments: argparse.Namespace) -> int:
    raise ValueError("this is a recipe now, with the same options: python recipes/imitation/train.py")


def _eval(arguments: argparse.Namespace) -> int:
    from verl_bpo.commands.evaluate import main

    return main(arguments)


def _config(arguments: argparse.Namespace) -> int:
    for key, default, meaning in config_table():
        print(f"{key} = {json.dumps(default)}\n    {meaning}")
    return 0


def config_table() -> list[tuple[str, object, str]]:
    """(key, default, meaning) of every ``bpo.*`` key, the meaning taken from the line under the field."""
    from verl_bpo.config.schema import BPOConfig

    return _table(BPOConfig, "bpo")


def _table(cls: type, prefix: str) -> list[tuple[str, object, str]]:
    import ast
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    meanings = {
        field.target.id: " ".join(ast.literal_eval(doc.value).split())
        for field, doc in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }
    hints, rows = get_type_hints(cls), []
    for field in fields(cls):
        key = f"{prefix}.{field.name}"
        if is_dataclass(hints[field.name]):
            rows += _table(hints[field.name], key)
        else:
            default = field.default if field.default is not MISSING else field.default_factory()
            rows.append((key, default, meanings.get(field.name, "")))
    return rows


def _add_dry_run(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--dry-run", action="store_true", help="only check the overrides, or recipes (*.sh), and estimate their costs"
    )
    train.add_argument("--gpu-memory", type=float, default=80.0, help="GiB a GPU, for the estimate (default 80)")


def parser() -> argparse.ArgumentParser:
    """The command line; each subcommand has its own ``--help``."""
    top = argparse.ArgumentParser(prog="verl-bpo", description=__doc__)
    top.add_argument("--version", action="version", version=f"verl_bpo {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help)
        command.set_defaults(run=run)
        return command

    train = add("train", _train, "train with verl; every key of verl's config and of bpo.* is an override")
    train.add_argument(
        "overrides", nargs="*", help="Hydra overrides, such as bpo.preset=guided, and Hydra's own options"
    )
    _add_dry_run(train)

    doctor = add("doctor", _doctor, "show versions, registrations, engines and environments; fails if a mode can't run")
    doctor.add_argument("--mode", choices=("cpu", "gpu", "vllm"), help="what must be able to run")
    doctor.add_argument("--env", help="an environment that must be usable")
    doctor.add_argument("--engine", help="container engine to try, as in bpo.env.container.engine")
    doctor.add_argument("--run-options", default="", help="as in bpo.env.container.run_options")

    add("config", _config, "print every bpo.* key with its default and meaning")

    games = add("make-games", _make_games, "make solvable games or repair tasks, the same for the same seed")
    games.add_argument("out", type=Path, help="folder for the games")
    games.add_argument(
        "--kind", choices=("textworld", "alfworld", "repair"), default="textworld", help="default textworld"
    )
    games.add_argument("--train", type=int, default=64, help="number of training games (default 64)")
    games.add_argument(
        "--valid",
        type=int,
        default=32,
        help="number of held-out games (default 32); alfworld: in each of valid_seen and valid_unseen",
    )
    games.add_argument(
        "--level",
        type=int,
        default=1,
        choices=(0, 1, 2, 3, 4),
        help="difficulty (default 1); repair to 3, alfworld 0 (few things a room) and 1",
    )
    games.add_argument("--seed", type=int, default=0)

    from verl_bpo.sandbox.loading import built_in_environments

    kwargs = {"default": "{}", "help": "the environment's arguments, as bpo.env.kwargs, in JSON"}
    environments = f"environment: {', '.join(built_in_environments())}, package.module:Class or file.py:Class"
    data = add("make-data", _make_data, "write a split's tasks as a verl prompt file (parquet)")
    data.add_argument("env", help=environments)
    data.add_argument("out", type=Path, help="the parquet file")
    data.add_argument("--split", default="train")
    data.add_argument("--root", help="folder with the environment's data, where it needs one")
    data.add_argument("--limit", type=int, help="first so many tasks")
    data.add_argument("--panel", type=int, help="so many tasks drawn by their names, the same ones every time")
    data.add_argument("--seed", type=int, default=0, help="seed of every task's reset")
    data.add_argument("--kwargs", **kwargs)

    from verl_bpo.envs.swebench.prepare import add_arguments as add_prepare

    add_prepare(
        add(
            "prepare",
            _prepare,
            "make a benchmark's instances ready to run: installed here, or as container images",
        )
    )
    check = add("check-env", _check_env, "check an environment's contract: deterministic, exact snapshots, no leaks")
    check.add_argument("env", help=environments)
    check.add_argument("--tasks", type=int, default=3, help="tasks to play (default 3)")
    check.add_argument("--split", default="train")
    check.add_argument("--root", help="folder with the environment's data, where it needs one")
    check.add_argument("--kwargs", **kwargs)

    add("warmstart", _warmstart, "moved to recipes/imitation/train.py")

    from verl_bpo.commands.evaluate import add_arguments as add_eval

    add_eval(add("eval", _eval, "success of a checkpoint or Hugging Face model on a fixed panel of tasks"))

    from verl_bpo.report.cli import add_report

    add_report(commands)
    return top


def main() -> int:
    """Entry point of ``verl-bpo``. An error the user can mend ends in one line."""
    from verl_bpo.config.schema import ConfigError
    from verl_bpo.report.cli import name_comparison
    from verl_bpo.sandbox.base import SandboxError
    from verl_bpo.sandbox.loading import EnvironmentUnavailable

    arguments, rest = parser().parse_known_args(name_comparison(sys.argv[1:]))
    if arguments.command == "eval" and all("=" in word and not word.startswith("-") for word in rest):
        arguments.overrides, rest = [*arguments.overrides, *rest], []  # argparse takes only those beside the model
    if rest and arguments.command not in ("train", "warmstart"):
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command == "train":  # Hydra reads its own options, such as --config-dir, in their order
        own = argparse.ArgumentParser(add_help=False)
        _add_dry_run(own)
        arguments.overrides = own.parse_known_args(sys.argv[sys.argv.index("train") + 1 :])[1]
    try:
        return arguments.run(arguments)
    except (ConfigError, EnvironmentUnavailable, SandboxError, FileNotFoundError, ValueError, ImportError) as error:
        print(f"verl-bpo {arguments.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
