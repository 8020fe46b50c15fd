"""The arguments by which commands are told an environment and one of its splits."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

from verl_bpo.sandbox.loading import ENVIRONMENTS, load_environment


def add_environment(parser: argparse.ArgumentParser) -> None:
    """Declare ``env`` and the options beside it."""
    parser.add_argument("env", help=f"environment: {ENVIRONMENTS.describe()}")
    parser.add_argument("--split", default="train")
    parser.add_argument("--root", help="folder with the environment's data, where it needs one")
    parser.add_argument("--kwargs", default="{}", help="the environment's arguments, as bpo.env.kwargs, in JSON")


def environment_kwargs(arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``--kwargs`` holds, tried against the environment's constructor.

    Raises:
        ValueError: it is no JSON object, or the constructor doesn't take it.
    """
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
