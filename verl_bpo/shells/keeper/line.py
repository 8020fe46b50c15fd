"""Messages to and from the other side."""

from __future__ import annotations

import os
import pickle
import struct


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


def receive(descriptor: int):
    header = _read_exactly(descriptor, 4)
    body = header and _read_exactly(descriptor, struct.unpack("!I", header)[0])
    return pickle.loads(body) if body else None


def send(descriptor: int, answer: object) -> None:
    body = pickle.dumps(answer)
    write_all(descriptor, struct.pack("!I", len(body)) + body)
