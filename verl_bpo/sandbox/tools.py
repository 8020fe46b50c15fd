"""Worlds that are acted on by tools: what a call must be, and an environment that is a set of tools."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from verl_bpo.sandbox.base import Environment, Observation
from verl_bpo.sandbox.turns import Action, ToolCall

Schema = Mapping[str, Any]
"""A tool, in OpenAI's function form."""


def name_of(tool: Schema) -> str:
    """A tool's name."""
    return tool["function"]["name"]


def properties_of(tool: Schema) -> Mapping[str, Any]:
    """A tool's parameters by name, each with its JSON schema."""
    return (tool["function"].get("parameters") or {}).get("properties") or {}


def problem_of(call: ToolCall, tools: Iterable[Schema]) -> str | None:
    """Why ``call`` can't be made, in a line for the model; None: it can."""
    known = {name_of(tool): tool for tool in tools}
    if call.name not in known:
        return f"there is no tool {call.name!r}; the tools are {', '.join(known)}"
    tool = known[call.name]
    strange = [name for name in call.arguments if name not in properties_of(tool)]
    if strange:
        return f"{call.name} takes no argument {strange[0]!r}; it takes {', '.join(properties_of(tool)) or 'none'}"
    validator = Draft202012Validator(tool["function"].get("parameters") or {})
    try:
        error = next(validator.iter_errors(dict(call.arguments)), None)
    except SchemaError:  # the environment's own mistake, which is no reason to refuse what the model asks for
        return None
    if error is None:
        return None
    where = f"argument {error.path[0]!r}" if error.path else "its arguments"
    return f"{call.name}: {where}: {error.message}"


class ToolEnvironment(Environment):
    """An environment that is a set of tools. What a call can't be made for, or what it raises, is told to the model as the
    call's result. An answer without a call ends the episode."""

    @abstractmethod
    def tools(self) -> Sequence[Schema]:
        """The tools of the task that is open."""

    @abstractmethod
    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, float]:
        """Use a tool: its result for the model, and the step's reward.

        Raises:
            Exception: what goes wrong in it; the text goes to the model.
        """

    @abstractmethod
    async def ended(self, text: str) -> float:
        """The model answered without a call: the last reward."""

    async def step(self, action: Action) -> Observation:
        if isinstance(action, str):
            return Observation(action, reward=await self.ended(action), terminated=True)
        messages, reward = [], 0.0
        for call in action.calls:
            result, earned = await self._answer(call)
            messages.append(call.answered(result))
            reward += earned
        return Observation(messages=tuple(messages), reward=reward)

    async def _answer(self, call: ToolCall) -> tuple[str, float]:
        problem = problem_of(call, self.tools())
        if problem is not None:
            return self.failed(problem), 0.0
        try:
            return await self.call(call.name, call.arguments)
        except Exception as error:
            return self.failed(str(error) or type(error).__name__), 0.0

    def failed(self, problem: str) -> str:
        """What the model is told of a call that failed."""
        return f"Error: {problem}"
