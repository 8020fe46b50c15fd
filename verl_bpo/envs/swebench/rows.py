"""Rows of SWE-bench's form: read from any file that datasets come in, nearly right ones mended, the others named.

Every problem is one line with its instance and column, found over all rows before anything is cloned or built.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from verl_bpo.envs.swebench.patches import check, mended

TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
COLUMNS = ("instance_id", "repo", "version", "base_commit", "problem_statement", "patch", "test_patch", *TESTS)
"""What a row must have. Others are optional and left out, but for ``environment_setup_commit``."""
_OPTIONAL = ("environment_setup_commit",)
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-fA-F]{7,64}")

Row = dict[str, Any]


class PrepareError(ValueError):
    """An instance can't be prepared; one line says why."""


def load_rows(dataset: str, split: str = "test") -> list[Row]:
    """The rows of a parquet, JSON, JSONL or CSV file, or of a dataset on the Hugging Face hub, as they are.

    Raises:
        PrepareError: there is none, or it isn't of SWE-bench's form.
    """
    path = Path(dataset).expanduser()
    read = _READERS.get(path.suffix.lower())
    if read is not None and not path.is_file():
        raise PrepareError(f"dataset {dataset}: no such file")
    try:
        if read is not None:
            rows = read(path)
        else:
            import datasets

            rows = list(datasets.load_dataset(dataset, split=split))
    except Exception as error:
        raise PrepareError(f"dataset {dataset} can't be read ({type(error).__name__}: {error})") from error
    if not rows:
        raise PrepareError(f"dataset {dataset} has no rows")
    wrong = next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise PrepareError(f"dataset {dataset} isn't of SWE-bench's form: row {wrong} is no table of columns")
    missing = set(COLUMNS).difference(*rows)
    if missing:
        raise PrepareError(f"dataset {dataset} isn't of SWE-bench's form: it has no {', '.join(sorted(missing))}")
    return rows


def checked_rows(rows: Iterable[Row], specification: Callable[[Row], Any]) -> tuple[list[Row], list[tuple[str, str]]]:
    """Rows in the form that the rest goes by, and the others' problems.

    Args:
        specification: looks up how a row's repository is built and tested; raises :class:`PrepareError` if there is no way.

    Returns:
        Rows whose columns all have their type, and (instance, problem) pairs, each problem with its column.
    """
    good: dict[str, Row] = {}  # by names as folders and images may have them: in lower case
    problems: list[tuple[str, str]] = []
    spoilt: set[str] = set()
    for number, given in enumerate(rows, 1):
        row, found = _checked_row(given)
        name = row.get("instance_id") or f"row {number}"
        if not found:
            try:
                specification(row)
            except PrepareError as error:
                found = [f"version: {error}"]
        problems += [(name, problem) for problem in found]
        key = name.lower()
        if found:
            spoilt.add(key)
        elif good.setdefault(key, row) != row:
            problems.append((name, f"instance_id: row {number} has it too, with other columns than the row before it"))
            spoilt.add(key)
    return [row for key, row in good.items() if key not in spoilt], problems


def _checked_row(given: Row) -> tuple[Row, list[str]]:
    """A row's columns, mended, and the problems of those that can't be."""
    row: Row = {}
    problems = []
    for column in COLUMNS:
        value = given.get(column)
        try:
            if _is_missing(value) and column != "PASS_TO_PASS":
                raise ValueError("missing" if column not in given else f"empty ({value!r})")
            row[column] = _FORMS[column](value)
        except ValueError as error:
            problems.append(f"{column}: {error}")
    if row.get("FAIL_TO_PASS") == []:
        problems.append("FAIL_TO_PASS: it names no test, so nothing could be repaired")
    row |= {name: given[name] for name in _OPTIONAL if isinstance(given.get(name), str)}
    return row, problems


def _is_missing(value: Any) -> bool:
    """None, NaN (what tables put where nothing is), or an empty text."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or str(value) in ("", "<NA>", "NaT")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} ({str(value)[:40]!r}), where a text belongs")
    return value


def _matching(pattern: re.Pattern[str], example: str) -> Callable[[Any], str]:
    def form(value: Any) -> str:
        text = _text(value).strip()
        if not pattern.fullmatch(text):
            raise ValueError(f"{text[:80]!r} isn't of the form {example}")
        return text

    return form


def _version(value: Any) -> str:
    """As the benchmark's package writes it; a table may have made a number of it."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else _text(value).strip()


def _patch(value: Any) -> str:
    patch = mended(_text(value))
    problem = check(patch)
    if problem:
        raise ValueError(problem)
    return patch


def _tests(value: Any) -> list[str]:
    """Names of tests: a list, or one written as JSON (once or twice over) or as a Python literal."""
    if _is_missing(value):
        return []
    given = value
    for _ in range(2):
        if isinstance(value, str | bytes):
            value = _literal(_text(value))
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple) or not all(isinstance(test, str) and test for test in value):
        raise ValueError(f"no list of tests' names: {str(given)[:80]!r}")
    return list(dict.fromkeys(value))


def _literal(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    raise ValueError(f"neither JSON nor a Python list: {text[:80]!r}")


_FORMS: dict[str, Callable[[Any], Any]] = {
    "instance_id": _matching(_NAME, "owner__repository-1"),
    "repo": _matching(_REPOSITORY, "owner/repository"),
    "version": _version,
    "base_commit": _matching(_COMMIT, "of a commit's hash"),
    "problem_statement": _text,
    "patch": _patch,
    "test_patch": _patch,
    "FAIL_TO_PASS": _tests,
    "PASS_TO_PASS": _tests,
}


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


def _read_json(path: Path) -> list[Row]:
    """A list of rows, rows one a line, or a table by columns as pandas writes it: whatever the file is called."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        data = json.loads(text)
    except ValueError:
        if not text.lstrip().startswith("{"):
            raise
        return _read_lines(text)
    if isinstance(data, dict) and "instance_id" in data and not isinstance(data["instance_id"], str):
        columns = {name: list(_values(column)) for name, column in data.items()}
        return [dict(zip(columns, values)) for values in zip(*columns.values(), strict=True)]
    return [data] if isinstance(data, dict) else data


def _read_lines(text: str) -> list[Row]:
    rows, wrong = [], []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
    if wrong:
        raise ValueError("; ".join(wrong[:10]) + (f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""))
    return rows


def _values(column: Any) -> Iterable[Any]:
    return column.values() if isinstance(column, dict) else column


def _read_csv(path: Path) -> list[Row]:
    csv.field_size_limit(sys.maxsize)
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


_READERS = {".parquet": _read_parquet, ".json": _read_json, ".jsonl": _read_json, ".csv": _read_csv}
