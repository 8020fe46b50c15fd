"""Which turns were taken in the same state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from verl_bpo.sandbox.volatile import hide


class StateId(NamedTuple):
    """One state in a few bytes. Equal numbers are equal states, in all trees of a task."""

    observed: int
    """By what was observed in it."""
    digest: int | None = None
    """By what the environment's digest says of it; None where nobody asked."""

    @classmethod
    def of(cls, text: str, volatile: Mapping[str, str], digest: Mapping[str, str] | None = None) -> StateId:
        """``text``: the observation; what it may differ in all the same, ``volatile`` describes."""
        parts = None if digest is None else _number(json.dumps(digest, sort_keys=True))
        return cls(_number(hide(text, volatile)), parts)


def _number(text: str) -> int:
    """Below 2**48: any reader of JSON holds it, and a pair among a million tasks of a thousand states each has one by accident
    with probability 0.002."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest(), "big")
