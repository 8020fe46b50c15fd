"""A class with tools, as TRL's ``environment_factory`` takes it: ``trl:package.module:Class``, ``trl:file.py:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from verl_bpo.envs.adapters.rows import row_for, row_numbers
from verl_bpo.envs.adapters.seeds import OwnChance
from verl_bpo.sandbox.base import Observation, Row, TaskError
from verl_bpo.sandbox.loading import EnvironmentUnavailable, load_module, subclass_for
from verl_bpo.sandbox.tools import Schema, ToolEnvironment
from verl_bpo.sandbox.turns import Message

ADAPTER = "adapt"
FORM = "module:Class"
INSTALL = "pip install transformers"
TASKS = 1000
"""Of a split, where the class makes its tasks itself."""
OWN = ("reset", "get_reward")
"""Public methods that are no tools."""


def adapt(name: str) -> type[TrlEnvironment]:
    """The class for somebody's class.

    Raises:
        ImportError: its module, or what it needs, isn't there.
        EnvironmentUnavailable: it is none that TRL would take.
    """
    module, _, class_name = name.rpartition(":")
    if not module:
        raise EnvironmentUnavailable(f"environment 'trl:{name}': write trl:package.module:Class or trl:file.py:Class")
    found = getattr(load_module(module), class_name, None)
    if not isinstance(found, type):
        raise EnvironmentUnavailable(f"environment 'trl:{name}': {module} has no class {class_name}")
    if not callable(getattr(found, "reset", None)):
        raise EnvironmentUnavailable(f"environment 'trl:{name}': {class_name} has no reset")
    return subclass_for(TrlEnvironment, name, source=found)


class TrlEnvironment(ToolEnvironment):
    """Public methods with type hints and docstrings are tools, ``reset(**row)`` opens a row of the prompt file, ``get_reward``
    says what was earned. What a tool raises goes to the model, as TRL writes it.

    The row's prompt is shown, with what ``reset`` returns behind its last message; a row of ``verl-bpo make-data``, which has
    none of its own, is shown as what ``reset`` returns. Python's and numpy's global random numbers are seeded by task and
    seed, and belong to the branch.

    Args:
        rows: a file of rows; a task is then the number of one, where no trainer hands it over.
        reward_each_turn: ask ``get_reward`` after each turn, and reward the difference, so that an episode that a limit cuts
            has what it earned. False asks once, when the model answers without a call: for a judge that takes its time.

    Raises:
        ValueError: a method lacks type hints or a docstring; names it.
    """

    source: type

    def __init__(self, rows: str | None = None, reward_each_turn: bool = True) -> None:
        self._inner, self._rows = self.source(), rows
        self._each, self._earned = reward_each_turn, 0.0
        names = [name for name, _ in inspect.getmembers(self.source, inspect.isfunction)]
        self._schemas = tuple(self._schema(name) for name in names if name not in OWN and not name.startswith("_"))
        self._own_chance = OwnChance()

    @classmethod
    def tasks(cls, split: str = "train", rows: str | None = None, **_: Any) -> list[str]:
        return row_numbers(rows) if rows else [f"{split}-{number}" for number in range(TASKS)]

    def tools(self) -> Sequence[Schema]:
        return self._schemas

    async def reset(self, task: str, seed: int = 0, row: Row | None = None) -> Observation:
        row = row_for(task, row, self._rows)
        columns = {**(row.get("extra_info") or {}), **row}
        taken = inspect.signature(self._inner.reset).parameters
        if not any(kind.kind is kind.VAR_KEYWORD for kind in taken.values()):
            columns = {name: value for name, value in columns.items() if name in taken}
        with self._own_chance(crc32(f"{task}/{seed}".encode())):
            told = await _awaited(self._inner.reset(**columns))
            self._earned = await self._reward() if self._each else 0.0
        messages = [Message(m["role"], _text(m["content"])) for m in row.get("prompt") or ()]
        if told is not None:
            messages.append(Message("user", (messages.pop().content if messages else "") + _text(told)))
        if not messages:
            raise TaskError(
                f"task {task}: neither has its row a prompt nor does {self.source.__name__}.reset return one"
            )
        return Observation(messages=tuple(messages), tools=self._schemas)

    async def step(self, action: Any) -> Observation:
        with self._own_chance():
            return await super().step(action)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, float]:
        result = _text(await _awaited(getattr(self._inner, name)(**arguments)))
        return result, await self._gain() if self._each else 0.0

    async def ended(self, text: str) -> float:
        return await self._gain()

    def failed(self, problem: str) -> str:
        return str({"error": problem})

    async def _gain(self) -> float:
        before, self._earned = self._earned, await self._reward()
        return self._earned - before

    async def _reward(self) -> float:
        ask = getattr(self._inner, "get_reward", None)
        return float(await _awaited(ask())) if ask else 0.0

    def _schema(self, name: str) -> Schema:
        from transformers.utils import get_json_schema

        try:
            return get_json_schema(getattr(self._inner, name))
        except Exception as error:  # transformers has several for what a docstring may lack
            raise ValueError(f"{self.source.__name__}.{name} makes no tool: {error}") from error


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _text(content: Any) -> str:
    """What is said, of a text or of content blocks.

    Raises:
        ValueError: there is a picture in it, which this package has no place for.
    """
    if not isinstance(content, list):
        return str(content)
    other = [block.get("type") for block in content if block.get("type") != "text"]
    if other:
        raise ValueError(f"content of type {other[0]!r} can't be shown: only text can")
    return "".join(block["text"] for block in content)
