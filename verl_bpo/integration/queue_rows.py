"""Rows as TransferQueue hands them out."""

from __future__ import annotations

from typing import Any


def plain_list(values: Any) -> list:
    """Non-tensor fields come out of TransferQueue as an array, a LinkedList or a NonTensorStack, by their content."""
    items = values.tolist() if hasattr(values, "tolist") else list(values)
    return [getattr(item, "data", item) for item in items]


def session_of(key: str) -> str:
    """``{uid}_{session}`` of a row's key ``{uid}_{session}_{index}``."""
    return key.rsplit("_", 1)[0]
