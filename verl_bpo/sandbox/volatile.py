"""What may differ when the same actions are played again, and how it is left out of comparisons.

An environment declares it (:attr:`verl_bpo.sandbox.Environment.volatile`). Only comparisons of plays go by that:
``verl-bpo check-env``, and replay, where a lost branch is rebuilt. The policy sees everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?"

VOLATILE: dict[str, str] = {
    "times": "|".join(
        (
            rf"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? (?:{_MONTH} [ \d]?\d|[ \d]?\d {_MONTH}(?: \d{{4}})?)"
            rf"(?: {_CLOCK}(?: [AP]M)?(?: [A-Z]{{3,4}})?(?: \d{{4}})?)?",  # date, date -R
            rf"\b{_MONTH} [ \d]\d (?:{_CLOCK}| \d{{4}})",  # ls -l
            rf"\b\d{{4}}-\d\d-\d\d(?:[T ]{_CLOCK}(?: ?Z| ?[+-]\d\d:?\d\d)?)?",  # ISO 8601
            r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b",
            r"\b1[6-9]\d{8}(?:\.\d+)?\b",  # seconds since 1970, from 2020 to 2033
        )
    ),
    "durations": r"\b\d+m\d+(?:\.\d+)?s\b|\b\d+(?:\.\d+)? ?(?:ns|us|µs|ms|s|secs?|seconds?|minutes?)\b",
    "pids": r"(?i:\bpid)[ =:#]{1,2}\d+|(?m:^\[\d+\] \d+$)",
    "temp_paths": r"/tmp/tmp\.?\w{6,12}|/pytest-of-\w+/pytest-\d+",  # of mktemp, Python's tempfile and pytest
    "addresses": r"\b0x[0-9a-f]{6,16}\b",
    "folders": r"(?m:^d[rwxsStT-]{9}[.+]? +(\d+) \S+ +\S+ +(\d+) |^total (\d+)$)",
}
"""Kinds to declare, and what counts as one: a regular expression each, or what its groups match. ``times`` are dates and
clock times; ``folders`` the size and link count of folders and the total of blocks that ``ls -l`` shows: they are the file
system's own affair, and layered files have others before and after a snapshot."""


def hide(text: str, volatile: Mapping[str, str]) -> str:
    """``text`` with the name of its kind in place of whatever ``volatile`` describes."""
    for kind, pattern in volatile.items():
        text = re.sub(pattern, partial(_without, f"<{kind}>"), text)
    return text


def _without(name: str, match: re.Match) -> str:
    """The match with its groups replaced, or all of it where it has none."""
    parts, end = [], match.start()
    for group in [g for g in range(1, match.re.groups + 1) if match[g] is not None] or [0]:
        parts += [match.string[end : match.start(group)], name]
        end = match.end(group)
    return "".join([*parts, match.string[end : match.end()]])
