"""Prompts with tools, and answers that call them, in the model's own form (``bpo.prompt.template=tools``).

Schemas and messages are written by the model's chat template. What it writes behind an answer is found by letting it write
a short conversation in which a call with the same name stands for what was sampled, and taking what follows that call's end:
so what was sampled is never written again. Calls are read by a parser that is handed in, since each family has its own form.
"""

from __future__ import annotations

import bisect
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jinja2 import TemplateError

from verl_bpo.sandbox.base import Observation
from verl_bpo.sandbox.tools import Schema, name_of, problem_of, properties_of
from verl_bpo.sandbox.turns import Action, Message, ToolCall, ToolCalls
from verl_bpo.tree.prompting import ACTION_MARK, Answer, Conversation, PromptConfig, Prompter

_OPENING = [{"role": "user", "content": "a"}]
_HEAD = re.compile(r"<[^<>]*>|[^\s<]+")
"""By what the beginning of a call is found in an answer: its first tag or word."""
PROBE = {
    "type": "function",
    "function": {
        "name": "verl_bpo_probe",
        "description": "Stands for a tool.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "A word."}},
            "required": ["word"],
        },
    },
}


@dataclass(frozen=True)
class Parsed:
    """What a parser read in an answer."""

    content: str
    """What was said beside calls, without special tokens and thoughts."""
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None
    """Why what looks like a call can't be read; nothing of the answer is executed then."""


def spelt(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """All that was sampled, special tokens too."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


class ToolParser(Protocol):
    """Reads tool calls in one family's form."""

    stop_token_ids: Collection[int]
    """Tokens that end a call, where the model would go on writing after it."""

    def parse(self, token_ids: Sequence[int], tools: Sequence[Schema]) -> Parsed: ...


class ToolPrompter(Prompter):
    """A prompter whose policy calls tools.

    Args:
        parser: reads the calls in an answer.

    Raises:
        ValueError: the chat template doesn't write tools, or refuses calls or results.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: PromptConfig,
        parser: ToolParser,
        chat_template_kwargs: dict[str, Any] | None = None,
        eos_token_ids: Collection[int] = (),
    ):
        super().__init__(tokenizer, config, chat_template_kwargs, eos_token_ids)
        self.parser = parser
        self._call_ends = frozenset(parser.stop_token_ids) - self.stop_ids
        self.stop_ids |= self._call_ends
        self._calls = CallWriter(self._render)
        self._forms: dict[str, str] = {}
        """What every call of these tools begins with, by their schemas."""
        call = ToolCall(name_of(PROBE), {"word": "a"})
        try:
            behind = self._behind((call,), [call.answered("verlBpoResult")], [PROBE])
        except TemplateError as error:
            raise ValueError(f"the chat template refuses tool calls or their results: {error}") from error
        if name_of(PROBE) not in self._render(self._opening("observation"), tools=[PROBE]):
            raise ValueError("the chat template writes no tools: use a model that was trained with them")
        if "verlBpoResult" not in tokenizer.decode(behind):
            raise ValueError("the chat template leaves out what a tool answered")

    def first(self, observation: Observation) -> Conversation:
        ids = self._encode(self._render(self._start(observation), tools=list(observation.tools) or None))
        return Conversation(ids, tools=observation.tools)

    def observe(
        self,
        conversation: Conversation,
        action_ids: Sequence[int],
        observation: Observation,
        action: Action | None = None,
    ) -> Conversation:
        calls = action.calls if isinstance(action, ToolCalls) else ()
        messages = observation.messages
        if not messages:
            text = observation.text + self._action_list(observation)
            messages = (calls[-1].answered(text) if calls else Message("user", text),)
        answers = calls if any(message.role == "tool" for message in messages) else ()
        glue = self._joined(action_ids, self._behind(answers, messages, conversation.tools))
        return replace(conversation, ids=[*conversation.ids, *action_ids, *glue], added=glue)

    def read(
        self, conversation: Conversation, action_ids: Sequence[int], admissible: tuple[str, ...] | None = None
    ) -> Answer:
        parsed = self.parser.parse(action_ids, conversation.tools)
        if parsed.problem:
            told = f"Your tool call can't be read ({parsed.problem}), so nothing was done."
            return Answer(self.decode(action_ids), None, False, Observation(told, actions=admissible))
        if parsed.calls:
            wrong = any(problem_of(call, conversation.tools) for call in parsed.calls)
            action = ToolCalls(parsed.calls, parsed.content)
            return Answer(self.decode(action_ids), action, not wrong)
        text = parsed.content.strip()
        return Answer(text, text, bool(text))

    def action_ids(self, action: Action, thought: str = "") -> list[int]:
        """Token ids of an assistant message that takes ``action``, its end included.

        Raises:
            ValueError: the chat template's generation prompt isn't how it begins an answer.
        """
        if isinstance(action, str):
            return [*self._encode(thought + action), self.end_of_turn_id]
        ids = self._encode(self._calls.answer(action.calls, thought))
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), len(ids))
        ends_with = self._behind(action.calls, [action.calls[-1].answered("a")], ())[0]
        return [*ids[:end], ends_with]

    def forced_tokens(
        self,
        action_ids: Sequence[int],
        admissible: Sequence[str] | None = None,
        tools: Sequence[Schema] = (),
    ) -> int:
        """How many of a sample's tokens come before the first that its call leaves open: a thought, and what the calls of all
        tools begin with in the model's form. Without a call, those that spell ``<think>``."""
        form = self._form(tools) if tools else ""
        text = self._spelt(action_ids)
        place = text.find(_HEAD.match(form)[0], max(0, text.rfind("</think>"))) if form else -1
        if place < 0:
            return super().forced_tokens(action_ids, admissible, tools)
        free = place + len(os.path.commonprefix([text[place:], form]))
        counts = range(len(action_ids) + 1)
        return bisect.bisect_right(counts, free, key=lambda count: len(self._spelt(action_ids[:count]))) - 1

    def _form(self, tools: Sequence[Schema]) -> str:
        key = json.dumps(tools, sort_keys=True)
        if key not in self._forms:
            self._forms[key] = os.path.commonprefix([text for tool in tools for text in self._beginnings(tool)])
        return self._forms[key]

    def _beginnings(self, tool: Schema) -> list[str]:
        """What calls of a tool begin with, up to where the first argument's value stands."""
        name, known = name_of(tool), properties_of(tool)
        texts = []
        for argument, kind in known.items():
            head = self._calls.text((ToolCall(name, {argument: ACTION_MARK}),)).partition(ACTION_MARK)[0]
            texts.append(head if kind.get("type") == "string" else head.rstrip("\"'"))
        if not (tool["function"].get("parameters") or {}).get("required"):
            texts.append(self._calls.text((ToolCall(name, {}),)))
        return [text.lstrip() for text in texts]

    def _joined(self, action_ids: Sequence[int], ids: list[int]) -> list[int]:
        ends_call = len(action_ids) and action_ids[-1] in self._call_ends
        return ids if ends_call and action_ids[-1] != ids[0] else super()._joined(action_ids, ids)

    def _spelt(self, token_ids: Sequence[int]) -> str:
        return spelt(self.tokenizer, token_ids)

    def _start(self, observation: Observation) -> list[dict[str, Any]]:
        if not observation.messages:
            return self._opening(self.user_text(observation))
        messages = list(map(self._message, observation.messages))
        has_system = any(message["role"] == "system" for message in messages)
        system = self.config.system_text
        return messages if has_system or not system else [{"role": "system", "content": system}, *messages]

    def _message(self, message: Message) -> dict[str, Any]:
        content = self._defuse(self._shorten(message.content))
        plain = {"role": message.role, "content": content, "name": message.name, "tool_call_id": message.call_id}
        return {key: value for key, value in plain.items() if value is not None}

    def _behind(self, calls: Sequence[ToolCall], messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """What the template writes behind an answer with these calls, from the token on that ends it."""
        plain = [self._message(message) for message in messages]
        options = {"tools": list(tools) or None}
        if not calls:
            return self._glue_ids(plain, **options)
        named = self._calls.named(calls)
        for call, answer in zip(named, (m for m in plain if m["role"] == "tool")):
            answer.setdefault("tool_call_id", call["id"])
        _, mark, behind = self._calls.write(self._opening("observation"), named, plain, **options).rpartition(
            ACTION_MARK
        )
        if not mark:
            raise ValueError("the chat template leaves out what the assistant called")
        ids = self._encode(behind)
        ends = (place for place, token in enumerate(ids) if token in self.stop_ids)
        place = next(ends, None)
        if place is None:
            raise ValueError(
                "the chat template ends a tool call in no token that ends an answer: name the model's in its "
                "generation_config.json (eos_token_id)"
            )
        return ids[place:]


class CallWriter:
    """Writes calls in a chat template's form.

    Args:
        render: messages and options of the chat template -> text.
    """

    def __init__(self, render: Any) -> None:
        self._render = render
        self._as_text = False
        """Whether the template takes arguments as JSON text, not as a mapping."""
        try:
            self._as_text = ACTION_MARK not in self._probe()
        except (TemplateError, TypeError):
            self._as_text = True

    def _probe(self) -> str:
        return self.write(_OPENING, self.named((ToolCall("probe", {}),)), [])

    def named(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """Stand-ins for calls: their names and, where the model gave them, their ids, with a mark for an argument."""
        return [self._call(replace(call, arguments={"a": ACTION_MARK}), number) for number, call in enumerate(calls)]

    def text(self, calls: Sequence[ToolCall]) -> str:
        """An answer with these calls, from where it begins to say something, and what ends it."""
        said = self._render([*_OPENING, {"role": "assistant", "content": ACTION_MARK}], add_generation_prompt=False)
        text = self._answered(calls, "")
        return text[len(os.path.commonprefix([said.partition(ACTION_MARK)[0], text])) :]

    def answer(self, calls: Sequence[ToolCall], content: str) -> str:
        """An answer with these calls, from behind the generation prompt on, and what ends it.

        Raises:
            ValueError: the generation prompt isn't how the template begins an answer.
        """
        prompt, text = self._render(_OPENING), self._answered(calls, content)
        if not text.startswith(prompt):
            raise ValueError("the chat template writes no answers behind its own generation prompt")
        return text[len(prompt) :]

    def _answered(self, calls: Sequence[ToolCall], content: str) -> str:
        plain = [self._call(call, number) for number, call in enumerate(calls)]
        return self.write(_OPENING, plain, [], content, add_generation_prompt=False)

    def write(
        self,
        opening: list[dict[str, Any]],
        calls: list[dict[str, Any]],
        messages: list[dict[str, Any]],
        content: str = "",
        **options: Any,
    ) -> str:
        """The conversation ``opening``, an answer with ``calls``, ``messages``."""
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        return self._render([*opening, answer, *messages], **options)

    def _call(self, call: ToolCall, number: int) -> dict[str, Any]:
        arguments: Mapping[str, Any] | str = dict(call.arguments)
        if self._as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = call.id or f"call{number:05d}"  # of nine letters and digits, as Mistral's templates want
        return {"type": "function", "id": name, "function": {"name": call.name, "arguments": arguments}}
