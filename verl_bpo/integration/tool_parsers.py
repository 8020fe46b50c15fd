"""verl's tool parsers, as the prompter uses them: the same one in training, validation and ``verl-bpo eval``."""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from verl.experimental.agent_loop import tool_parser as verls
from verl.tools.schemas import OpenAIFunctionToolSchema

from verl_bpo.options import ConfigError
from verl_bpo.sandbox.asynchronous import settled
from verl_bpo.sandbox.tools import Schema, properties_of
from verl_bpo.sandbox.turns import ToolCall
from verl_bpo.tree.prompting import without_thoughts
from verl_bpo.tree.tool_prompting import PROBE, CallWriter, Parsed, spelt

_STARTS = ("tool_call_start_token", "tool_calls_section_start_token", "tool_calls_start_token")
_ENDS = ("tool_call_end_token", "tool_calls_section_end_token", "tool_calls_end_token")
GPT_OSS = "gpt-oss"


def find_parser(tokenizer: Any, name: str, **template_options: Any) -> VerlParser:
    """The parser of ``bpo.prompt.tool_parser``.

    Args:
        name: one of verl's registry; ``auto``: the one that reads a call as ``tokenizer``'s chat template writes it.
        template_options: ``data.apply_chat_template_kwargs``.

    Raises:
        ConfigError: there is no such parser, or ``auto`` isn't certain; the message names what there is.
    """
    known = sorted(verls.ToolParser._registry)
    if name in known:
        return VerlParser(tokenizer, name)
    if name != "auto":
        raise ConfigError(f"bpo.prompt.tool_parser={name!r} is none of verl's: use auto, {', '.join(known)}")
    fitting = _fitting(
        tokenizer, str(tokenizer.chat_template), json.dumps(template_options, sort_keys=True, default=str)
    )
    if len(fitting) == 1:
        return VerlParser(tokenizer, fitting[0])
    found = f"{' and '.join(fitting)} read" if fitting else "none of verl's parsers reads"
    raise ConfigError(
        f"bpo.prompt.tool_parser=auto: {found} a call as this chat template writes it: name one of {', '.join(known)}"
    )


@lru_cache(maxsize=8)  # every tree asks
def _fitting(tokenizer: Any, template: str, options: str) -> list[str]:
    return [
        name for name in sorted(verls.ToolParser._registry) if _reads(tokenizer, name, template, json.loads(options))
    ]


def _reads(tokenizer: Any, name: str, template: str, options: dict[str, Any]) -> bool:
    """Whether a parser reads back what the chat template writes."""
    if name == GPT_OSS:  # its template writes a call's head otherwise than the model does
        return "<|channel|>" in template and "functions." in template

    def render(messages: list[dict[str, Any]], **more: Any) -> str:
        every = {"add_generation_prompt": True, **options, **more}
        return tokenizer.apply_chat_template(messages, tokenize=False, **every)

    call = ToolCall(PROBE["function"]["name"], {"word": "two words"})
    try:
        ids = tokenizer.encode(CallWriter(render).text((call,)), add_special_tokens=False)
    except TemplateError:
        return False
    read = VerlParser(tokenizer, name).parse(ids, [PROBE])
    return [(found.name, found.arguments) for found in read.calls] == [(call.name, call.arguments)]


class VerlParser:
    """One of verl's parsers.

    Beyond what it does, a call is refused that isn't closed, which was cut off then, and calls within thoughts aren't read.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.name, self._tokenizer = name, tokenizer
        self._parser = verls.ToolParser.get_tool_parser(name, tokenizer)
        stops = list(self._parser.stop_token_ids)
        self._before: list[int] = []
        if name == GPT_OSS:  # the generation prompt holds the beginning of what it looks for
            self._before = tokenizer.encode("<|start|>assistant", add_special_tokens=False)
            stops.append(tokenizer.convert_tokens_to_ids("<|call|>"))
        unknown = {None, tokenizer.unk_token_id}
        self.stop_token_ids = frozenset(stops) - unknown
        self._start, self._end = (
            next((getattr(self._parser, name) for name in names if hasattr(self._parser, name)), None)
            for names in (_STARTS, _ENDS)
        )
        special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(sorted(special, key=len, reverse=True))) if special else None

    def parse(self, token_ids: Sequence[int], tools: Sequence[Schema]) -> Parsed:
        """What verl's parser reads in an answer; its complaint where it can't."""
        ids = self._behind_thoughts(list(token_ids))
        with _complaints() as complaints:
            content, found = settled(self._parser.extract_tool_calls([*self._before, *ids], _schemas(tools)))
        text = self._spelt(ids)
        if self._start and text.count(self._start) > text.count(self._end):
            return Parsed(text, problem=f"{self._start} isn't closed by {self._end}")
        calls = []
        for call in found:
            try:
                arguments = json.loads(call.arguments)
            except ValueError as error:
                complaints.append(f"the arguments of {call.name} are no JSON: {error}")
                continue
            if isinstance(arguments, dict):
                calls.append(ToolCall(call.name, arguments, call.tool_call_id))
            else:
                complaints.append(f"the arguments of {call.name} are no JSON object")
        begun = text.count(self._start) if self._start else int("to=functions." in text)
        if begun and (complaints or not calls):
            return Parsed(text, problem="; ".join(complaints) or "no call can be found in it")
        return Parsed(self._plain(content), tuple(calls))

    def _behind_thoughts(self, ids: list[int]) -> list[int]:
        end = self._spelt(ids).rfind("</think>")
        if end < 0:
            return ids
        reach = end + len("</think>")
        return ids[bisect_left(range(len(ids)), reach, key=lambda count: len(self._spelt(ids[:count]))) :]

    def _spelt(self, ids: list[int]) -> str:
        return spelt(self._tokenizer, ids)

    def _plain(self, content: str) -> str:
        content = content.removeprefix("<|start|>assistant") if self._before else content
        content = without_thoughts(content.rpartition("<|message|>")[2])
        return (self._special.sub("", content) if self._special else content).strip()


def _schemas(tools: Sequence[Schema]) -> list[OpenAIFunctionToolSchema]:
    """In verl's form, which is poorer than JSON schema: parsers look up names and types in it."""
    return [
        OpenAIFunctionToolSchema(
            type="function",
            function={
                "name": tool["function"]["name"],
                "description": tool["function"].get("description", ""),
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": kind.get("type", "object"), "description": kind.get("description")}
                        for name, kind in properties_of(tool).items()
                    },
                    "required": (tool["function"].get("parameters") or {}).get("required", []),
                },
            },
        )
        for tool in tools
    ]


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """What verl's parsers log meanwhile. It is told to the model, and to nobody else: a policy says such things all day."""
    told: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler, propagate = Keep(), verls.logger.propagate
    verls.logger.addHandler(handler)
    verls.logger.propagate = False
    try:
        yield told
    finally:
        verls.logger.removeHandler(handler)
        verls.logger.propagate = propagate
