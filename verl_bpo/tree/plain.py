"""Dataclasses out of plain values (what JSON and msgpack hold), checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def read(cls: type[T], values: Any, what: str, needed: Collection[str] = ()) -> T:
    """A ``cls`` of the fields in ``values``; those with a default may be missing, unless they are among the ``needed``.

    Raises:
        ValueError: ``values`` is no mapping, lacks a field or has one that ``cls`` doesn't know; ``what`` names it.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} is {type(values).__name__}, not a mapping of fields")
    known = {field.name: field for field in fields(cls)}
    if unknown := sorted(values.keys() - known.keys()):
        raise ValueError(f"{what} has fields that this version doesn't know: {', '.join(unknown)}")
    without_default = {name for name, field in known.items() if field.default is field.default_factory is MISSING}
    if missing := sorted({*without_default, *needed} - values.keys()):
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    return cls(**values)
