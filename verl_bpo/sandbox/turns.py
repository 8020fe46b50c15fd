"""What passes between a policy and a world beside plain text: messages with roles, and tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Message:
    """One message of an observation."""

    role: str
    """``tool`` for the result of a call, ``user``, or what else the chat template knows; in the first observation also
    ``system``."""
    content: str
    name: str | None = None
    """The tool's, of a ``tool`` message."""
    call_id: str | None = None
    """Of the call that a ``tool`` message answers, where the model named it."""


@dataclass(frozen=True)
class ToolCall:
    """One call as the model made it: there may be no such tool, and the arguments may not fit."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    """As the model named it; few models do."""

    def __str__(self) -> str:
        return f"{self.name}({json.dumps(self.arguments, ensure_ascii=False)})"

    def answered(self, content: str) -> Message:
        """The message that holds this call's result."""
        return Message("tool", content, self.name, self.id)


@dataclass(frozen=True)
class ToolCalls:
    """An action that is one or several tool calls."""

    calls: tuple[ToolCall, ...]
    content: str = ""
    """What the model said beside them."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls))


Action = str | ToolCalls
"""What the policy does: a text, or tool calls."""


def is_schema(tool: Any) -> bool:
    """Whether ``tool`` describes a tool in OpenAI's function form."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and tool.get("type") == "function"
