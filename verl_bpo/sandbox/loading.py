"""How a name in a config becomes an environment class.

A built-in environment is a module or package ``verl_bpo.envs.NAME``. Its docstring's first line says what it is, ``INSTALL``
what it needs, and ``ENVIRONMENT`` where its class is, as ``module:Class`` below the package.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from zlib import crc32

from verl_bpo.sandbox.base import Environment

_HOME = "verl_bpo.envs"


class EnvironmentUnavailable(Exception):
    """An environment can't be used here; the message is one line that says what to install or write."""


def built_in_environments() -> dict[str, str]:
    """Name -> one line on what it is, of every built-in environment. Imports none of their dependencies."""
    home = importlib.import_module(_HOME)
    found = {}
    for module in pkgutil.iter_modules(home.__path__):
        card = importlib.import_module(f"{_HOME}.{module.name}")
        if hasattr(card, "ENVIRONMENT"):
            found[module.name] = card.__doc__.strip().splitlines()[0].rstrip(".")
    return found


def load_environment(name: str) -> type[Environment]:
    """The class that ``name`` stands for: a built-in, ``package.module:Class`` or ``path/to/file.py:Class``.

    Raises:
        EnvironmentUnavailable: nothing is there, or its dependencies are missing; the message says what to do.
    """
    card = _card(name)
    target = f"{_HOME}.{name}.{card.ENVIRONMENT}" if card else name
    module_name, separator, class_name = target.rpartition(":")
    if not separator or not module_name or not class_name:
        raise EnvironmentUnavailable(
            f"no environment named {name!r}: use one of {', '.join(built_in_environments())}, package.module:Class or "
            f"path/to/file.py:Class"
        )
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except EnvironmentUnavailable:
        raise
    except ImportError as error:
        advice = f"install it: {card.INSTALL}" if card else "install what it needs, or put it on PYTHONPATH"
        raise EnvironmentUnavailable(f"environment {name!r} can't be imported ({error}): {advice}") from error
    except Exception as error:
        raise EnvironmentUnavailable(
            f"environment {name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise EnvironmentUnavailable(f"environment {name!r}: {module_name} has no class {class_name}: write it there")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise EnvironmentUnavailable(
            f"environment {name!r}: {class_name} is no environment: derive it from verl_bpo.sandbox.Environment"
        )
    return found


def list_tasks(name: str, split: str, **options: object) -> list[str]:
    """The tasks of a split.

    Raises:
        EnvironmentUnavailable: there is no such environment, or it doesn't take these options.
        SandboxError: it lists no tasks.
    """
    environment = load_environment(name)
    try:
        inspect.signature(environment.tasks).bind(split, **options)
    except TypeError as error:
        raise EnvironmentUnavailable(
            f"{environment.__name__}.tasks was given split={split!r} and {options}, which it doesn't take ({error}): leave "
            f"--root or --kwargs out, or give it **kwargs"
        ) from None
    return environment.tasks(split, **options)


def environment_status(name: str) -> tuple[bool, str]:
    """Whether ``name`` can be loaded here, and the reason if not (empty when it can)."""
    try:
        load_environment(name)
    except EnvironmentUnavailable as error:
        return False, str(error)
    return True, ""


def _card(name: str) -> ModuleType | None:
    """The module of a built-in environment, None for any other name."""
    if not name.isidentifier() or importlib.util.find_spec(f"{_HOME}.{name}") is None:
        return None
    card = importlib.import_module(f"{_HOME}.{name}")
    return card if hasattr(card, "ENVIRONMENT") else None


def _load_file(path: str):
    """Import a user's file once per process under a name of its own, so that its classes keep their identity."""
    file = Path(path).expanduser().resolve()
    module_name = f"verl_bpo_environment_{file.stem}_{crc32(str(file).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not file.is_file():
        raise EnvironmentUnavailable(f"no file {path}: give the path of the file that holds your environment")
    spec = importlib.util.spec_from_file_location(module_name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
