"""How a name in a config becomes a class: of an environment, of a snapshot backend, of a shell (:mod:`verl_bpo.shells`).

What is built in is a module or a package of one folder, called by its name. Its docstring's first line says what it is,
``INSTALL`` what it needs beside this package, and one more variable, which the registry names, where its class is.

A package may have further parts, which commands find by their names: of an environment ``generate``, which makes tasks
(:mod:`verl_bpo.commands.make_games`), and ``prepare``, which makes a benchmark ready (:mod:`verl_bpo.commands.prepare`).

``prefix:rest`` names something of somebody else's, ``gymnasium:FrozenLake-v1`` say. ``prefix`` is a module of the folder
``adapters``; its ``ADAPTER`` names a function that makes a class for ``rest``, ``FORM`` shows what may stand there, and it can
be imported without the package that it adapts.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from verl_bpo.sandbox.base import Backend, Environment, NoTaskCanWork


class EnvironmentUnavailable(NoTaskCanWork):
    """An environment, or what it is to run in, can't be used here; one line that says what to install or write."""


@dataclass(frozen=True)
class Registry:
    """Classes of one kind, by name."""

    kind: str
    """What errors call one."""
    home: str
    """The package whose modules are those that are built in."""
    marker: str
    """The variable of such a module that holds its class's name, as ``module:Class`` where it is a module below."""
    lacks: Callable[[type], str]
    """What a class must change to be one of the kind; empty: nothing."""

    def built_in(self) -> dict[str, str]:
        """Name -> one line on what it is. Imports none of their dependencies."""
        home = importlib.import_module(self.home)
        cards = {module.name: self._card(module.name) for module in pkgutil.iter_modules(home.__path__)}
        return {name: card.__doc__.strip().splitlines()[0].rstrip(".") for name, card in cards.items() if card}

    def adapters(self) -> dict[str, ModuleType]:
        """Prefix -> the module that adapts what stands behind it."""
        home = f"{self.home}.adapters"
        of_one_file = not hasattr(importlib.import_module(self.home), "__path__")
        if of_one_file or importlib.util.find_spec(home) is None:
            return {}
        found = pkgutil.iter_modules(importlib.import_module(home).__path__)
        modules = {module.name: importlib.import_module(f"{home}.{module.name}") for module in found}
        return {name: module for name, module in modules.items() if hasattr(module, "ADAPTER")}

    def knows(self, name: str) -> bool:
        """Whether ``name`` is a built-in or has the form of an own class's. Loads nothing."""
        return ":" in name or self._card(name) is not None

    def describe(self) -> str:
        """What names there are, for messages."""
        forms = [f"{prefix}:{module.FORM}" for prefix, module in self.adapters().items()]
        return f"{', '.join([*self.built_in(), *forms])}, package.module:Class or path/to/file.py:Class"

    def load(self, name: str) -> type:
        """The class that ``name`` stands for: a built-in, ``package.module:Class``, ``path/to/file.py:Class`` or
        ``prefix:rest``.

        Raises:
            EnvironmentUnavailable: nothing is there, or its dependencies are missing; the message says what to do.
        """
        prefix, _, rest = name.partition(":")
        if rest and prefix in (adapters := self.adapters()):
            return self._adapted(name, adapters[prefix], rest)
        card = self._card(name)
        module_name, separator, class_name = (self._target(name, card) if card else name).rpartition(":")
        if not separator or not module_name or not class_name:
            raise EnvironmentUnavailable(f"no {self.kind} named {name!r}: use one of {self.describe()}")
        try:
            module = load_module(module_name)
        except EnvironmentUnavailable:
            raise
        except ImportError as error:
            advice = f"install it: {card.INSTALL}" if card else "install what it needs, or put it on PYTHONPATH"
            raise EnvironmentUnavailable(f"{self.kind} {name!r} can't be imported ({error}): {advice}") from error
        except Exception as error:
            raise EnvironmentUnavailable(
                f"{self.kind} {name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
            ) from error
        found = getattr(module, class_name, None)
        if found is None:
            raise EnvironmentUnavailable(
                f"{self.kind} {name!r}: {module_name} has no class {class_name}: write it there"
            )
        problem = self.lacks(found)
        if problem:
            raise EnvironmentUnavailable(f"{self.kind} {name!r}: {class_name} is no {self.kind}: {problem}")
        return found

    def status(self, name: str) -> tuple[bool, str]:
        """Whether ``name`` can be loaded here, and the reason if not (empty when it can)."""
        try:
            self.load(name)
        except EnvironmentUnavailable as error:
            return False, str(error)
        return True, ""

    def built_in_with(self, part: str) -> dict[str, str]:
        """Those of :meth:`built_in` whose package has a module ``part``."""
        return {name: line for name, line in self.built_in().items() if self._has(name, part)}

    def load_part(self, name: str, part: str) -> ModuleType:
        """Module ``part`` of a built-in's package.

        Raises:
            EnvironmentUnavailable: its dependencies are missing; the message says what to install.
        """
        try:
            return importlib.import_module(f"{self.home}.{name}.{part}")
        except ImportError as error:
            advice = f"install it: {self._card(name).INSTALL}"
            raise EnvironmentUnavailable(
                f"{part} of {self.kind} {name!r} can't be imported ({error}): {advice}"
            ) from error

    def _adapted(self, name: str, adapter: ModuleType, rest: str) -> type:
        try:
            return getattr(adapter, adapter.ADAPTER)(rest)
        except ImportError as error:
            raise EnvironmentUnavailable(
                f"{self.kind} {name!r} can't be imported ({error}): install what it needs: {adapter.INSTALL}"
            ) from error

    def _has(self, name: str, part: str) -> bool:
        is_package = hasattr(self._card(name), "__path__")
        return is_package and importlib.util.find_spec(f"{self.home}.{name}.{part}") is not None

    def _card(self, name: str) -> ModuleType | None:
        """The module of a built-in, None for any other name."""
        if not name.isidentifier() or importlib.util.find_spec(f"{self.home}.{name}") is None:
            return None
        card = importlib.import_module(f"{self.home}.{name}")
        return card if hasattr(card, self.marker) else None

    def _target(self, name: str, card: ModuleType) -> str:
        where = getattr(card, self.marker)
        return f"{self.home}.{name}.{where}" if ":" in where else f"{self.home}.{name}:{where}"


def derived_from(base: type) -> Callable[[type], str]:
    """What a class lacks to be derived from ``base``, for :class:`Registry`."""

    def lacks(found: type) -> str:
        derived = isinstance(found, type) and issubclass(found, base)
        return "" if derived else f"derive it from {base.__module__.removesuffix('.base')}.{base.__name__}"

    return lacks


ENVIRONMENTS = Registry("environment", "verl_bpo.envs", "ENVIRONMENT", derived_from(Environment))
BACKENDS = Registry("snapshot backend", "verl_bpo.sandbox", "BACKEND", derived_from(Backend))
"""What ``bpo.env.backend`` may name."""


def built_in_environments() -> dict[str, str]:
    """Name -> one line on what it is, of every built-in environment. Imports none of their dependencies."""
    return ENVIRONMENTS.built_in()


def load_environment(name: str) -> type[Environment]:
    """The class that ``name`` stands for, see :meth:`Registry.load`."""
    return ENVIRONMENTS.load(name)


def environment_status(name: str) -> tuple[bool, str]:
    """Whether ``name`` can be loaded here, and the reason if not (empty when it can)."""
    return ENVIRONMENTS.status(name)


class EnvironmentMaker:
    """Makes environments of one kind. The first is made at once, to try the arguments.

    Raises:
        EnvironmentUnavailable: there is no such environment, or it doesn't take these arguments.
    """

    def __init__(self, env: str, env_kwargs: dict[str, Any]) -> None:
        self._class, self._kwargs = load_environment(env), env_kwargs
        try:
            self._spare: Environment | None = self._class(**env_kwargs)
        except Exception as error:
            raise EnvironmentUnavailable(
                f"environment {env!r} can't be made with arguments {env_kwargs}: {type(error).__name__}: {error}"
            ) from error

    @property
    def volatile(self) -> dict[str, str]:
        """What the environment declares as such."""
        return dict(self._class.volatile)

    def __call__(self) -> Environment:
        environment, self._spare = self._spare, None
        return environment if environment is not None else self._class(**self._kwargs)

    def clear(self) -> None:
        """Close the first one if it was never used."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()


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


def subclass_for(base: type, rest: str, **attributes: Any) -> type:
    """A class of its own for what an adapter adapts: the same one for the same ``rest``, and where pickling finds it."""
    name = f"{base.__name__}[{rest.replace('.', ':')}]"  # pickling takes a dot for a part of another class
    module = sys.modules[base.__module__]
    if not hasattr(module, name):
        attributes |= {"__module__": base.__module__, "__qualname__": name, "__doc__": base.__doc__}
        setattr(module, name, type(base)(name, (base,), attributes))
    return getattr(module, name)


def load_module(name: str) -> ModuleType:
    """The module of a name, or of a ``.py`` file's path. Raises what its import does."""
    return _load_file(name) if name.endswith(".py") else importlib.import_module(name)


def _load_file(path: str) -> ModuleType:
    """Import a user's file once per process under a name of its own, so that its classes keep their identity."""
    file = Path(path).expanduser().resolve()
    module_name = f"verl_bpo_own_{file.stem}_{crc32(str(file).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not file.is_file():
        raise EnvironmentUnavailable(f"no file {path}: give the path of the file that holds your class")
    spec = importlib.util.spec_from_file_location(module_name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
