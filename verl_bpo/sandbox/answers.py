"""What worlds answer: checked where it enters, and carried as bytes that hold nothing but data.

A process that reads an answer makes numbers, texts, lists, dicts and :class:`Observation` of it and runs nothing, whoever
wrote it. (With pickle, whoever writes an answer decides what its reader runs.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import msgpack

from verl_bpo.sandbox.base import Observation, SandboxError, shown
from verl_bpo.sandbox.errors import from_exception, to_exception
from verl_bpo.sandbox.turns import Message, is_schema

LARGEST = 16 << 20
"""Bytes of an answer; a larger one loses its branch."""
PLAIN = "keep Observation.info to plain values: text, numbers, True, False, None, lists and dicts of them"
"""What to do about an ``info`` that is none of these."""
_DEEPEST = 16
_OBSERVATION = 1
"""Type number of an observation among msgpack's extensions."""


def received(answer: Any) -> Observation:
    """What an environment answered, in Python's own types (numpy's are converted).

    Raises:
        SandboxError: it isn't what the contract says; one line that names the field.
    """
    if not isinstance(answer, Observation):
        raise SandboxError(f"the environment answered {shown(answer)}: return verl_bpo.sandbox.Observation(text, ...)")
    return Observation(
        _text(answer.text, "Observation.text"),
        _reward(answer.reward),
        _flag(answer.terminated, "Observation.terminated"),
        _flag(answer.truncated, "Observation.truncated"),
        _actions(answer.actions),
        _info(answer.info),
        tuple(_message(message) for message in answer.messages),
        _tools(answer.tools),
    )


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise SandboxError(f"{name} is {shown(value)}: it must be a str")
    text = str.__str__(value)  # of a subclass, the text alone
    if len(text) > LARGEST:
        raise SandboxError(
            f"{name} has {len(text):,} characters: at most {LARGEST:,} are taken, and far fewer are read"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        odd = text[error.start]
        raise SandboxError(
            f"{name} has {odd!r} at character {error.start}, half a pair that is no text: decode bytes with "
            "errors='replace'"
        ) from None
    return text


def _reward(value: Any) -> float:
    number = _scalar(value)
    try:
        if isinstance(number, int | float) and isfinite(number):
            return float(number)
    except OverflowError:  # an int that no float holds
        pass
    raise SandboxError(f"Observation.reward is {shown(value)}: it must be a finite number")


def _flag(value: Any, name: str) -> bool:
    flag = _scalar(value)
    if not isinstance(flag, bool):
        raise SandboxError(f"{name} is {shown(flag)}: it must be True or False")
    return flag


def _actions(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(action, str) for action in value):
        raise SandboxError(f"Observation.actions is {shown(value)}: it must be a tuple of str, or None")
    return tuple(_text(action, "one of Observation.actions") for action in value)


def _info(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SandboxError(f"Observation.info is {shown(value)}: it must be a dict")
    info = _plain(dict(value), "Observation.info", _DEEPEST)
    won = info.get("won", False)
    if not (isinstance(won, bool) or won in (0, 1)):
        raise SandboxError(f"Observation.info['won'] is {shown(won)}: it must be True or False, or left out")
    return {**info, "won": bool(won)} if "won" in info else info


def _message(message: Message) -> Message:
    name, call_id = (
        None if (value := getattr(message, key)) is None else _text(value, f"Message.{key}")
        for key in ("name", "call_id")
    )
    return Message(_text(message.role, "Message.role"), _text(message.content, "Message.content"), name, call_id)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple) or not all(map(is_schema, value)):
        raise SandboxError(
            f"Observation.tools is {shown(value)}: it must be a tuple of schemas in OpenAI's function form"
        )
    return tuple(_plain(tool, "Observation.tools", _DEEPEST) for tool in value)


def _plain(value: Any, name: str, deep: int) -> Any:
    """``value`` in types that msgpack has."""
    value = _scalar(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, name)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise SandboxError(f"{name} is a number of {value.bit_length()} bits: at most 64 travel")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if deep == 0:
        raise SandboxError(f"{name} lies more than {_DEEPEST} levels deep: {PLAIN}")
    if hasattr(value, "ndim") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{index}]", deep - 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SandboxError(f"{name} has the key {shown(key)}: keys must be str")
        return {_text(k, f"a key of {name}"): _plain(item, f"{name}[{k!r}]", deep - 1) for k, item in value.items()}
    raise SandboxError(f"{name} is {shown(value)}: {PLAIN}")


def _scalar(value: Any) -> Any:
    """A number or flag of numpy's, or an array without dimensions, as Python's own."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def success(value: Any) -> bytes:
    """An answer for :func:`read_answer`.

    Raises:
        SandboxError: it is too large, or holds something else than data.
    """
    try:
        data = msgpack.packb(("ok", value), default=_pack)
    except (TypeError, ValueError, OverflowError) as error:
        raise SandboxError(f"the answer can't be sent ({error}): {PLAIN}") from error
    if len(data) > LARGEST:
        raise SandboxError(f"the answer has {len(data):,} bytes: at most {LARGEST:,} are taken")
    return data


def failure(error: BaseException) -> bytes:
    """An answer that raises ``error`` where it is read."""
    return msgpack.packb(("error", *from_exception(error)))


def read_answer(data: bytes, operation: str) -> Any:
    """What a worker, trusted or not, answered to an operation.

    Raises:
        SandboxError, EnvironmentUnavailable: what it raised; or the answer is none to this operation.
    """
    raised = None
    try:
        kind, *content = msgpack.unpackb(data, ext_hook=_unpack)
        if kind == "error":
            raised = to_exception(*content)
        elif kind != "ok" or not _IS_ANSWER[operation](*content):
            raise ValueError("another was expected")
    except Exception as error:  # msgpack's own, and whatever a crafted value leads to
        problem = str(error) if isinstance(error, SandboxError) else ascii(error)
        raise SandboxError(f"the answer to {operation} can't be read: {problem[:300]}") from error
    if raised is not None:
        raise raised
    return content[0]


def _pack(value: Any) -> msgpack.ExtType:
    if not isinstance(value, Observation):
        raise TypeError(f"a {type(value).__name__}")
    messages = [(message.role, message.content, message.name, message.call_id) for message in value.messages]
    text = "" if messages else value.text  # it is what they say
    fields = (text, value.reward, value.terminated, value.truncated, value.actions, value.info, messages, value.tools)
    return msgpack.ExtType(_OBSERVATION, msgpack.packb(fields))


def _unpack(code: int, data: bytes) -> Observation:
    if code != _OBSERVATION:
        raise ValueError(f"type {code}")
    *fields, messages, tools = msgpack.unpackb(data)
    return received(Observation(*fields, tuple(Message(*message) for message in messages), tools))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_forks(value: Any) -> bool:
    answers, replayed = value
    return _is_count(replayed) and all(
        _is_count(each) or isinstance(to_exception(*each), Exception) for each in answers
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)


def _is_census(value: Any) -> bool:
    return _is_count(value["memory"]) and all(isinstance(name, str) for name in value["left"])


def _is_observation(value: Any) -> bool:
    return isinstance(value, Observation)


def _is_nothing(value: Any) -> bool:
    return value is None


_IS_ANSWER: dict[str, Callable[[Any], bool]] = {
    "open": _are_texts,
    "reset": _is_observation,
    "step": _is_observation,
    "snapshot": lambda value: value is None or _is_count(value),
    "fork": _are_forks,
    "branch": _is_count,
    "digest": lambda value: value is None or _are_texts(value),
    "drop": _is_nothing,
    "close": _is_nothing,
    "clear": lambda value: value is None or _is_census(value),
}
"""What an operation is answered with. A process that answers anything else isn't believed."""
