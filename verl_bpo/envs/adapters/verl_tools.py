"""verl's tool files (``actor_rollout_ref.rollout.multi_turn.tool_config_path``): ``verl_tools:path/to/tools.yaml``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from verl_bpo.envs.adapters.rows import row_for, row_numbers
from verl_bpo.sandbox.asynchronous import settled
from verl_bpo.sandbox.base import Observation, Row, TaskError
from verl_bpo.sandbox.loading import EnvironmentUnavailable, subclass_for
from verl_bpo.sandbox.tools import Schema, ToolEnvironment
from verl_bpo.sandbox.turns import Message

ADAPTER = "adapt"
FORM = "tools.yaml"
INSTALL = "pip install verl, and put the classes that the file names on PYTHONPATH"


def adapt(name: str) -> type[VerlToolsEnvironment]:
    """The class for a tool file.

    Raises:
        ImportError: what a class of it needs isn't there.
        EnvironmentUnavailable: there is no such file, or it is none.
    """
    path = Path(name).expanduser().resolve()
    try:
        read = yaml.safe_load(path.read_text())
        entries = [
            (entry["class_name"], entry.get("config") or {}, entry.get("tool_schema")) for entry in read["tools"]
        ]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise EnvironmentUnavailable(
            f"environment 'verl_tools:{name}': there is no tool file of verl's: {error}"
        ) from None
    classes = [_class(class_name, path) for class_name, _, _ in entries]
    parts = tuple((cls, config, schema) for cls, (_, config, schema) in zip(classes, entries))
    snapshots = all(callable(getattr(cls, part, None)) for cls in classes for part in ("snapshot", "restore"))
    base = SavedVerlTools if snapshots else VerlToolsEnvironment
    return subclass_for(base, str(path), parts=parts)


class VerlToolsEnvironment(ToolEnvironment):
    """Tools of verl, each with one instance for the episode.

    The row's ``prompt`` is shown. Its ``extra_info.tools_kwargs`` has, for each tool, ``create_kwargs`` and further keywords
    for ``execute``, ``calc_reward`` and ``release`` (``execute_kwargs`` ...). An episode earns what ``execute`` gives at each
    call, and what ``calc_reward`` gives when the model answers without a call.

    Args:
        rows: a file of rows; a task is then the number of one, where no trainer hands it over.

    (verl's own agent loop makes an instance for each call, and never asks ``calc_reward``.)
    """

    parts: tuple[tuple[type, Mapping[str, Any], Mapping[str, Any] | None], ...]
    """Class, config and schema of each tool."""

    def __init__(self, rows: str | None = None) -> None:
        self._rows = rows
        self._tools = {tool.name: tool for tool in (_made(*part) for part in self.parts)}
        self._schemas = tuple(
            tool.get_openai_tool_schema().model_dump(exclude_unset=True, exclude_none=True)
            for tool in self._tools.values()
        )
        self._ids: dict[str, str] = {}
        self._kwargs: Mapping[str, Any] = {}

    @classmethod
    def tasks(cls, split: str = "train", rows: str | None = None, **_: Any) -> list[str]:
        if rows is None:
            raise TaskError(
                'the tasks of a tool file are rows of a prompt file: name it, --kwargs \'{"rows": "FILE"}\''
            )
        return row_numbers(rows)

    def tools(self) -> Sequence[Schema]:
        return self._schemas

    async def reset(self, task: str, seed: int = 0, row: Row | None = None) -> Observation:
        await self._release()
        row = row_for(task, row, self._rows)
        self._kwargs = (row.get("extra_info") or {}).get("tools_kwargs") or {}
        self._ids = {}
        for name, tool in self._tools.items():
            self._ids[name], _ = await tool.create(name, create_kwargs=self._given(name, "create"))
        messages = tuple(Message(message["role"], message["content"]) for message in row.get("prompt") or ())
        if not messages:
            raise TaskError(f"task {task}: its row has no prompt, and a tool file has no task of its own")
        return Observation(messages=messages, tools=self._schemas)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, float]:
        given = self._given(name, "execute")
        response, reward, _ = await self._tools[name].execute(self._ids[name], dict(arguments), **given)
        return response.text or "", float(reward or 0.0)

    async def ended(self, text: str) -> float:
        earned = [
            await tool.calc_reward(self._ids[name], **self._given(name, "calc_reward"))
            for name, tool in self._tools.items()
        ]
        return float(sum(earned))

    def close(self) -> None:
        settled(self._release())

    async def _release(self) -> None:
        ids, self._ids = self._ids, {}
        for name, instance in ids.items():
            await self._tools[name].release(instance, **self._given(name, "release"))

    def _given(self, name: str, method: str) -> dict[str, Any]:
        return dict((self._kwargs.get(name) or {}).get(f"{method}_kwargs") or {})


class SavedVerlTools(VerlToolsEnvironment):
    """Tools that can do more than verl asks of them: ``snapshot(instance_id)`` and ``restore(instance_id, state)``, ``async``
    or not, so that what lies outside of Python is saved too."""

    def save_state(self) -> Any:
        return {name: settled(tool.snapshot(self._ids[name])) for name, tool in self._tools.items()}

    def load_state(self, state: Any) -> None:
        for name, tool in self._tools.items():
            settled(tool.restore(self._ids[name], state[name]))


def _class(name: str, file: Path) -> type:
    """As verl finds it, and beside the file."""
    module, _, class_name = name.rpartition(".")
    sys.path.insert(0, str(file.parent))
    try:
        found = getattr(importlib.import_module(module), class_name, None)
    finally:
        sys.path.remove(str(file.parent))
    lacks = [part for part in ("create", "execute", "calc_reward", "release") if not hasattr(found, part)]
    if lacks:
        raise EnvironmentUnavailable(
            f"environment 'verl_tools:{file}': {name} is no tool of verl's: it has no {lacks[0]}"
        )
    return found


def _made(cls: type, config: Mapping[str, Any], schema: Mapping[str, Any] | None) -> Any:
    """A tool. Its schema is made by the class that its own base, which is verl's, takes: so no name of verl's stands here."""
    if schema is None:
        return cls(config=dict(config), tool_schema=None)
    base = next(base for base in cls.__mro__ if base.__name__ == "BaseTool")
    form = vars(sys.modules[base.__module__])["OpenAIFunctionToolSchema"]
    return cls(config=dict(config), tool_schema=form.model_validate(schema))
