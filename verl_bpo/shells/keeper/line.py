"""Messages to and from the other side."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any

_HEADER = struct.Struct("!II")


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_all(descriptor: int) -> bytes:
    return b"".join(iter(lambda: os.read(descriptor, 4096), b""))


def _read_exactly(descriptor: int, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            return None
        data += part
    return data


def pack(head: object, body: bytes = b"") -> bytes:
    """A message: JSON, and bytes that come with it. Whoever reads it gets data, whoever wrote it."""
    text = json.dumps(head).encode()
    return _HEADER.pack(len(text), len(body)) + text + body


def unpack(read: Callable[[int], bytes | None]) -> tuple[Any, bytes] | None:
    """The next message of what ``read`` gives so many bytes of; None when there is none any more."""
    header = read(_HEADER.size)
    if header is None:
        return None
    texts, bodies = _HEADER.unpack(header)
    text = read(texts)
    body = read(bodies) if text is not None else None
    return None if text is None or body is None else (json.loads(text), body)


def receive(descriptor: int) -> tuple[Any, bytes] | None:
    return unpack(lambda count: _read_exactly(descriptor, count))


def send(descriptor: int, head: object, body: bytes = b"") -> None:
    write_all(descriptor, pack(head, body))
