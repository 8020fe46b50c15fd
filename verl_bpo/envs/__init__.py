"""Real environments as sandboxes, and how a name in a config becomes an environment class."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from verl_bpo.sandbox.base import Environment


class EnvironmentUnavailable(Exception):
    """An environment can't be used here; the message is one line that says what to install or write."""


@dataclass(frozen=True)
class _Entry:
    target: str
    description: str
    install: str


_BUILT_IN = {
    "textworld": _Entry(
        "verl_bpo.envs.textworld:TextworldEnvironment",
        "TextWorld: small generated text games; make some with `verl-bpo make-games`",
        "pip install textworld",
    ),
    "alfworld": _Entry(
        "verl_bpo.envs.alfworld:AlfworldEnvironment",
        "ALFWorld: household tasks in text; games come with `alfworld-download`",
        "pip install alfworld",
    ),
    "webshop": _Entry(
        "verl_bpo.envs.webshop:WebshopEnvironment",
        "WebShop: shopping on simulated pages; set WEBSHOP_DATA to the benchmark's data folder",
        "pip install '.[webshop]' in verl_bpo's folder",
    ),
    "repair": _Entry(
        "verl_bpo.envs.repair:RepairEnvironment",
        "small broken Python packages, repaired by shell commands; make some with `verl-bpo make-games --kind repair`",
        "apt-get install bubblewrap",
    ),
    "swebench": _Entry(
        "verl_bpo.envs.swebench:SwebenchEnvironment",
        "SWE-bench: real repositories, repaired by shell commands; get some ready with `verl-bpo prepare swebench`",
        "pip install verl_bpo[swe]",
    ),
}

ENVIRONMENTS: dict[str, str] = {name: entry.description for name, entry in _BUILT_IN.items()}
"""Built-in environments and what they are. Any other name is ``package.module:Class`` or ``path/to/file.py:Class``."""


def load_environment(name: str) -> type[Environment]:
    """The class that ``name`` stands for: a built-in, ``package.module:Class`` or ``path/to/file.py:Class``.

    Raises:
        EnvironmentUnavailable: nothing is there, or its dependencies are missing; the message says what to do.
    """
    entry = _BUILT_IN.get(name)
    target = entry.target if entry else name
    module_name, separator, class_name = target.rpartition(":")
    if not separator or not module_name or not class_name:
        raise EnvironmentUnavailable(
            f"no environment named {name!r}: use one of {', '.join(ENVIRONMENTS)}, package.module:Class or "
            f"path/to/file.py:Class"
        )
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except EnvironmentUnavailable:
        raise
    except ImportError as error:
        advice = f"install it: {entry.install}" if entry else "install what it needs, or put it on PYTHONPATH"
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


def is_shell(name: str) -> bool:
    """Whether the environment acts by shell commands, so that ``bpo.env.execution`` says where.

    Raises:
        EnvironmentUnavailable: it can't be loaded.
    """
    from verl_bpo.envs.shell import ShellEnvironment

    return issubclass(load_environment(name), ShellEnvironment)


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
