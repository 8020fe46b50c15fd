"""Messages over a socket, and deadlines that cover the whole of what is waited for."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Protocol

_HEADER = struct.Struct("!I")


class Deadline:
    """A point in time. ``seconds``: from now; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Seconds from now, above 0; None: any.

        Raises:
            TimeoutError: it has passed.
        """
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


NEVER = Deadline(None)


class TooLong(Exception):
    """A message longer than what is taken."""


class Line:
    """One end of a line. Used by one thread at a time.

    Its methods raise TimeoutError when the deadline has passed, and EOFError or OSError when the other side is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.fileno = end.fileno
        self.close = end.close

    def send(self, data: bytes, deadline: Deadline = NEVER, descriptor: int | None = None) -> None:
        """One message, and a descriptor to go with it."""
        message = memoryview(_HEADER.pack(len(data)) + data)
        if descriptor is not None:
            self._end.settimeout(deadline.left())
            message = message[socket.send_fds(self._end, [message], [descriptor]) :]
        self._end.settimeout(deadline.left())
        self._end.sendall(message)

    def receive(
        self, deadline: Deadline = NEVER, most: int | None = None, descriptors: list[int] | None = None
    ) -> bytes:
        """The next message; a descriptor that came with it is added to ``descriptors``.

        Raises:
            TooLong: it has more than ``most`` bytes. It wasn't read: the line is of no more use.
        """
        (count,) = _HEADER.unpack(self._read(_HEADER.size, deadline, descriptors))
        if most is not None and count > most:
            raise TooLong(f"{count:,} bytes, more than {most:,}")
        return self._read(count, deadline)

    def _read(self, count: int, deadline: Deadline, descriptors: list[int] | None = None) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._end.settimeout(deadline.left())
            if descriptors is not None and not data:
                part, passed, _, _ = socket.recv_fds(self._end, count, 1)
                descriptors += passed
            else:
                part = self._end.recv(min(count - len(data), 1 << 20))
            if not part:
                raise EOFError("the other side is gone")
            data += part
        return bytes(data)


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def speaks(end: int | _HasFileno) -> bool:
    """Whether something came, be it only the other side's end. Doesn't wait."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))
