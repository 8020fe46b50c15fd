"""OpenEnv's environments: ``openenv:my_env.server:MyEnvironment`` in process, ``openenv:http://host:8000`` on a server.

In process it is the server's own class without the server, so every snapshot backend is possible. Of a running server's
state nothing can be copied: branches are sessions of their own, forked by ``replay``.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Mapping
from typing import Any

from verl_bpo.envs.adapters.seeds import seed_tasks
from verl_bpo.sandbox.base import Environment, Observation, SandboxError, SnapshotUnsupported, TaskError
from verl_bpo.sandbox.loading import EnvironmentUnavailable, load_module, subclass_for

ADAPTER = "adapt"
FORM = "module:Class or openenv:URL"
INSTALL = "pip install openenv-core"

_NOT_SHOWN = ("done", "reward", "metadata")


def adapt(name: str) -> type[OpenEnvEnvironment]:
    """The class for a server's environment class, by module or file, or for a running server, by its address.

    Raises:
        ImportError: openenv or that module isn't installed.
        EnvironmentUnavailable: there is no such class, or it is none of OpenEnv's.
    """
    from openenv.core.env_server.interfaces import Environment as Theirs

    if "://" in name:
        return subclass_for(OpenEnvServer, name, url=name)
    module, _, class_name = name.rpartition(":")
    found = getattr(load_module(module), class_name, None) if module else None
    if not (isinstance(found, type) and issubclass(found, Theirs)):
        raise EnvironmentUnavailable(
            f"environment 'openenv:{name}': name a class derived from openenv.core.env_server.interfaces.Environment as "
            "module:Class or file.py:Class, or a server by its URL"
        )
    return subclass_for(OpenEnvClass, name, theirs=found)


class OpenEnvEnvironment(Environment):
    """What both kinds share. A task is a seed, ``7``, or a JSON object with the arguments of ``reset``.

    An action is a JSON object with the fields of the environment's action class. Where that has one field of its own, plain
    text is its value; where that field has a fixed set of values, those are the admissible actions. An observation shows its
    fields but for ``done``, ``reward`` and ``metadata``.
    """

    _fields: Mapping[str, Any]
    """JSON schema of each field of an action that isn't metadata."""
    _defined: Mapping[str, Any]
    """What those refer to."""

    def _reset(self, arguments: dict[str, Any]) -> tuple[Mapping[str, Any], float | None, bool]:
        """Fields, reward and end."""
        raise NotImplementedError

    def _step(self, action: dict[str, Any]) -> tuple[Mapping[str, Any], float | None, bool]:
        """Like :meth:`_reset`.

        Raises:
            ValueError: that is no action.
        """
        raise NotImplementedError

    @classmethod
    def tasks(cls, split: str = "train", **options: Any) -> list[str]:
        return seed_tasks(split)

    def reset(self, task: str, seed: int = 0) -> Observation:
        try:
            arguments = json.loads(task)
        except ValueError:
            arguments = None
        arguments = {"seed": arguments} if isinstance(arguments, int) else arguments
        if not isinstance(arguments, dict):
            raise TaskError(f"{task!r} is no task: use a seed such as 7, or a JSON object with reset's arguments")
        if seed:
            arguments["seed"] = 1_000_003 * seed + int(arguments.get("seed", 0))
        return self._observe(*self._reset({"episode_id": task, **arguments}))

    def step(self, action: str) -> Observation:
        try:
            return self._observe(*self._step(self._read(action)))
        except ValueError as error:
            return Observation(f"That is no action: {error}", actions=self._actions())

    def _observe(self, fields: Mapping[str, Any], reward: float | None, done: bool) -> Observation:
        shown = {name: value for name, value in fields.items() if name not in _NOT_SHOWN and value is not None}
        texts = {
            name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in shown.items()
        }
        text = "\n".join(texts.values() if len(texts) == 1 else (f"{name}: {said}" for name, said in texts.items()))
        return Observation(text, float(reward or 0.0), terminated=bool(done), actions=None if done else self._actions())

    def _read(self, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            value = text.strip()
        if isinstance(value, dict):
            return value
        if len(self._fields) != 1:
            raise ValueError(f"write a JSON object with {', '.join(self._fields) or 'its fields'}")
        ((name, schema),) = self._fields.items()
        return {name: text.strip() if schema.get("type") == "string" or "enum" in self._schema(schema) else value}

    def _actions(self) -> tuple[str, ...] | None:
        if len(self._fields) != 1:
            return None
        (schema,) = self._fields.values()
        values = self._schema(schema).get("enum")
        return tuple(map(str, values)) if values else None

    def _schema(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._defined.get(schema.get("$ref", "").rpartition("/")[2], schema)

    def _learn(self, schema: Mapping[str, Any]) -> None:
        """The form of an action."""
        self._fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
        self._defined = schema.get("$defs", {})


class OpenEnvClass(OpenEnvEnvironment):
    """The server's class in process.

    Args:
        arguments: its constructor's.

    Raises:
        ValueError: its ``step`` doesn't say which class its actions are of.
    """

    theirs: type
    """The environment class."""

    def __init__(self, **arguments: Any) -> None:
        self._env = self.theirs(**arguments)
        self._action_class = _action_class(self.theirs)
        self._learn(self._action_class.model_json_schema())

    def _reset(self, arguments: dict[str, Any]) -> tuple[Mapping[str, Any], float | None, bool]:
        known = inspect.signature(self._env.reset).parameters  # as the server does
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            arguments = {name: value for name, value in arguments.items() if name in known}
        return self._shown(self._env.reset(**arguments))

    def _step(self, action: dict[str, Any]) -> tuple[Mapping[str, Any], float | None, bool]:
        from openenv.core.env_server.serialization import deserialize_action
        from pydantic import ValidationError

        try:
            made = deserialize_action(action, self._action_class)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors())
            raise ValueError("; ".join(problems)) from None
        return self._shown(self._env.step(made))

    @staticmethod
    def _shown(observation: Any) -> tuple[Mapping[str, Any], float | None, bool]:
        return observation.model_dump(mode="json"), observation.reward, observation.done

    def close(self) -> None:
        self._env.close()


class OpenEnvServer(OpenEnvEnvironment):
    """A session on a running server. Each branch is one, so the server must allow several (``max_concurrent_envs``).

    Args:
        client: options of ``openenv.core.GenericEnvClient``, ``message_timeout_s`` say.

    Raises:
        SandboxError: the server doesn't answer.
    """

    url: str

    def __init__(self, **client: Any) -> None:
        from openenv.core import GenericEnvClient

        self._learn(_schema_of(self.url))
        self._client = GenericEnvClient(self.url, **client).sync()

    def _reset(self, arguments: dict[str, Any]) -> tuple[Mapping[str, Any], float | None, bool]:
        return self._ask(lambda: self._client.reset(**arguments))

    def _step(self, action: dict[str, Any]) -> tuple[Mapping[str, Any], float | None, bool]:
        return self._ask(lambda: self._client.step(action))

    def _ask(self, call: typing.Callable[[], Any]) -> tuple[Mapping[str, Any], float | None, bool]:
        try:
            result = call()
        except (RuntimeError, OSError, TimeoutError) as error:
            said = " ".join(str(error).split())
            if "VALIDATION_ERROR" in said:
                raise ValueError(said) from None
            full = ": let it serve more sessions (max_concurrent_envs)" if "CAPACITY" in said else ""
            raise SandboxError(f"the server {self.url} failed: {said or type(error).__name__}{full}") from error
        return result.observation, result.reward, result.done

    def __getstate__(self) -> dict[str, Any]:
        """For copies."""
        raise SnapshotUnsupported(f"the state of {self.url} is the server's: use bpo.env.backend=replay")

    def close(self) -> None:
        self._client.close()


def _action_class(theirs: type) -> type:
    try:
        found = typing.get_type_hints(theirs.step).get("action")
    except NameError:  # a name that only type checkers see
        found = None
    if not hasattr(found, "model_json_schema"):
        bases = [argument for base in getattr(theirs, "__orig_bases__", ()) for argument in typing.get_args(base)]
        found = next((base for base in bases if hasattr(base, "model_json_schema")), None)
    if found is None:
        raise ValueError(f"{theirs.__name__}.step must say of which class its action is (action: MyAction)")
    return found


def _schema_of(url: str) -> Mapping[str, Any]:
    import httpx

    address = "http" + url.removeprefix("ws") if url.startswith("ws") else url
    try:
        answer = httpx.get(f"{address.rstrip('/')}/schema", timeout=10.0)
        answer.raise_for_status()
        return answer.json()["action"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise SandboxError(f"no OpenEnv server answers at {url}: {' '.join(str(error).split())}") from error
