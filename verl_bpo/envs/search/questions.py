"""Questions with their gold answers, from parquet files in the form that Search-R1 publishes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from verl_bpo.sandbox.base import TaskError

_SHOWN = 3
"""So many wrong rows are named."""


class Question(NamedTuple):
    """One row."""

    text: str
    answers: tuple[str, ...]
    """Each of them is right."""
    source: str
    """Column ``data_source``, such as ``nq``; empty where there is none."""
    queries: tuple[str, ...]
    """Column ``queries``, of generated files alone: searches that lead to the answer, in order."""


class Questions:
    """The questions of one file. Rows are read from Arrow's memory when they are asked for.

    Needed are ``question`` and either ``golden_answers`` or ``reward_model.ground_truth.target``, a text or a list of texts;
    ``data_source`` and ``queries`` may be there. All else (``id``, ``prompt``, ...) is left alone.

    Raises:
        TaskError: there is no such file, or a column is missing.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            present = pyarrow.parquet.read_schema(file).names
            self._answers = next((name for name in ("golden_answers", "reward_model") if name in present), None)
            if "question" not in present or self._answers is None:
                raise TaskError(
                    f"{file} has columns {', '.join(present)}: question, and golden_answers or reward_model, must be there"
                )
            wanted = ["question", self._answers, *(name for name in ("data_source", "queries") if name in present)]
            self._table = pyarrow.parquet.read_table(file, columns=wanted)
        except OSError as error:
            raise TaskError(f"no questions in {file} ({error.strerror or error})") from error
        except pyarrow.ArrowException as error:
            raise TaskError(f"{file} is no parquet file ({error})") from error

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, row: int) -> Question:
        """Row ``row``, from 0.

        Raises:
            TaskError: a value is wrong; it names row and column.
        """
        values = {name: self._table[name][row].as_py() for name in self._table.column_names}
        try:
            return self._question(values)
        except ValueError as error:
            raise TaskError(f"{self.file} row {row}, {error}") from None

    def check(self) -> None:
        """Look at all rows.

        Raises:
            TaskError: some are wrong; it names the first of them by row and column, and says how many there are.
        """
        wrong = list(self._wrong())
        if wrong:
            more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
            raise TaskError(f"{self.file}: {'; '.join(wrong[:_SHOWN])}{more}: mend these rows or leave them out")

    def _wrong(self) -> Iterator[str]:
        for batch_start in range(0, len(self), 10_000):
            for place, values in enumerate(self._table.slice(batch_start, 10_000).to_pylist()):
                try:
                    self._question(values)
                except ValueError as error:
                    yield f"row {batch_start + place}, {error}"

    def _question(self, values: dict[str, Any]) -> Question:
        """Raises ValueError, which begins with the column."""
        text = values["question"]
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"column question: {text!r} is no text")
        name, answers = self._answers, values[self._answers]
        if name == "reward_model":
            name = "reward_model.ground_truth.target"
            truth = answers.get("ground_truth") if isinstance(answers, dict) else None
            answers = truth.get("target") if isinstance(truth, dict) else None
        answers = [answers] if isinstance(answers, str) else answers
        if not isinstance(answers, list) or not answers:
            raise ValueError(f"column {name}: {answers!r} is no list of answers")
        for answer in answers:
            if not isinstance(answer, str) or not answer.strip():
                raise ValueError(f"column {name}: {answer!r} is no text")
        source = values.get("data_source") or ""
        return Question(text.strip(), tuple(answers), str(source), tuple(values.get("queries") or ()))


def open_questions(file: str) -> Questions:
    """The questions of ``file``, kept for the next world of this process as long as the file stays the same.

    Raises:
        TaskError: as of :class:`Questions`.
    """
    path = Path(file).expanduser()
    try:
        state = path.stat()
    except OSError as error:
        raise TaskError(f"no questions in {path} ({error.strerror})") from None
    return _kept(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _kept(path: Path, modified_ns: int, size: int) -> Questions:
    return Questions(path)
