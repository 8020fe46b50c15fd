"""What everything that a user can set has in common: declared once as a typed class, checked once, named in its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class ConfigError(ValueError):
    """A key the user can mend. The message names the key, the value given and what would be right."""


class Options(BaseModel):
    """A group of keys. The line under a field is its meaning, in the reference and in ``verl-bpo config``."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


Group = TypeVar("Group", bound=Options)


def read(cls: type[Group], values: Mapping[str, Any], key: str) -> Group:
    """An instance of ``cls`` from the values of the group called ``key``.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, or values that contradict each other.
    """
    try:
        return cls.model_validate(dict(values), strict=True)
    except ValidationError as error:
        raise ConfigError(_line(cls, error, key)) from None


def keys(cls: type[Options]) -> dict[str, type[Options] | None]:
    """Name -> the class of the group that the field holds, None for a plain value."""
    held = {name: field.annotation for name, field in cls.model_fields.items()}
    return {name: kind if isinstance(kind, type) and issubclass(kind, Options) else None for name, kind in held.items()}


def _line(cls: type[Options], error: ValidationError, key: str) -> str:
    """What is wrong first, in one line."""
    wrong = error.errors()[0]
    kind, context, value = wrong["type"], wrong.get("ctx", {}), wrong["input"]
    path, group = [key], cls
    for part in wrong["loc"]:
        if group is None or (part not in keys(group) and kind != "extra_forbidden"):
            break  # from here on pydantic names the members of a union
        path.append(str(part))
        group = keys(group).get(part)
    name = ".".join(path)
    if kind == "extra_forbidden":
        for part in wrong["loc"][:-1]:
            cls = keys(cls)[part]
        return f"unknown key {name}; known here: {', '.join(sorted(keys(cls)))}"
    if kind == "value_error":
        said = str(context["error"])
        return said if len(path) == 1 or said.startswith(key) else f"{name}={value!r} {said}"
    if kind in _BOUNDS:
        said, limit = _BOUNDS[kind]
        return f"{name}={value} must be {said} {context[limit]:g}"
    if group is not None:
        return f"{name}={value!r} must hold keys, such as {name}.{next(iter(keys(group)))}"
    choices = [e["ctx"]["expected"] for e in error.errors() if e["type"] == "literal_error" and e["input"] is value]
    types = [_TYPES[e["type"]] for e in error.errors() if e["type"] in _TYPES and e["input"] is value]
    if choices:
        allowed = ", ".join([*types, *choices]).replace("bool", "True, False").replace("'", "").replace(" or ", ", ")
        return f"{name}={value!r} is not one of {allowed}"
    return f"{name}={value!r} must be {' or '.join(types)}" if types else f"{name}={value!r}: {wrong['msg']}"


_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}
_TYPES = {
    "int_type": "int", "float_type": "float", "string_type": "str", "bool_type": "bool", "list_type": "list",
    "dict_type": "dict", "finite_number": "a finite number",
}  # fmt: skip
