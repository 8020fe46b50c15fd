"""Environments with ``async def reset`` and ``async def step``: one event loop for all of a process, so that none needs a
thread of its own and what is bound to a loop, such as a client's connections, stays usable from call to call."""

from __future__ import annotations

import asyncio
import threading
from functools import lru_cache
from typing import Any


def settled(answer: Any) -> Any:
    """``answer``, awaited if it is to be; from any thread but the loop's own."""
    if not asyncio.iscoroutine(answer):
        return answer
    return asyncio.run_coroutine_threadsafe(answer, _loop()).result()


def settled_here(answer: Any) -> Any:
    """As :func:`settled`, in this thread and on a loop that ends with it: of a process that must stay forkable."""
    return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async-environments", daemon=True).start()
    return loop
