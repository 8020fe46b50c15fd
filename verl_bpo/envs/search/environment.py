"""What an action does: a search shows passages, an answer ends the episode."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from verl_bpo.envs.search.questions import Question, open_questions
from verl_bpo.envs.search.retrievers import Retriever, open_retriever
from verl_bpo.envs.search.scoring import exact_match, f1
from verl_bpo.sandbox.base import Environment, Observation, TaskError

_ACTION = re.compile(r"\s*(search|answer)\s*\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)


class State(NamedTuple):
    """Where an episode is. Immutable, so a snapshot is a reference."""

    question: Question
    answer: str | None = None
    """Given; the episode is over."""


class SearchEnvironment(Environment):
    """A question, to be answered by searching. A task is ``FILE.parquet#ROW``, see :mod:`verl_bpo.envs.search.questions`.

    Actions are ``search[query]``, which shows passages as Search-R1 does (without the quotes around titles), and
    ``answer[text]``, which ends the episode and alone is rewarded. ``info["won"]`` is exact match, ``info["score"]`` the F1,
    ``info["task_type"]`` the question's source.

    Args:
        retriever: path of a JSONL corpus, or URL of a retrieval server. None: the environment variable ``SEARCH_RETRIEVER``,
            else ``corpus.jsonl`` beside the questions.
        top_k: passages shown for a query.
        passage_characters: a longer passage is cut.
        reward: ``em`` (exact match, 0 or 1) or ``f1``.
        timeout: seconds that a server may be silent. A search that fails costs its branch.

    Raises:
        ValueError: an argument is out of range.
        TaskError: the corpus is missing or broken.
        EnvironmentUnavailable: a package that BM25 needs isn't installed.
    """

    def __init__(
        self,
        retriever: str | None = None,
        top_k: int = 3,
        passage_characters: int = 1000,
        reward: str = "em",
        timeout: float = 30.0,
    ) -> None:
        if reward not in ("em", "f1"):
            raise ValueError(f"reward={reward!r}: use 'em' or 'f1'")
        for name, value in (("top_k", top_k), ("passage_characters", passage_characters)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds")
        self._top_k, self._characters, self._reward, self._timeout = top_k, passage_characters, reward, timeout
        named = retriever or os.environ.get("SEARCH_RETRIEVER")
        self._named: Retriever | None = open_retriever(named, timeout) if named else None
        self._actions: dict[str, Callable[[str], Observation]] = {"search": self.search, "answer": self.answer}
        self._state: State | None = None

    def reset(self, task: str, seed: int = 0) -> Observation:
        """Open a question. ``seed`` changes nothing: a search has no chance in it."""
        file, _ = _split(task)
        self._retrieve = self._named or open_retriever(str(Path(file).with_name("corpus.jsonl")), self._timeout)
        self._state = State(_question(task))
        return self._observe(f"Question: {self._state.question.text}")

    def step(self, action: str) -> Observation:
        if self._state.answer is not None:
            return self._observe("The question is answered.")
        match = _ACTION.fullmatch(action)
        if match is None or not match[2].strip():
            return self._observe("Use search[query] or answer[text].")
        return self._actions[match[1].lower()](match[2].strip())

    def search(self, query: str) -> Observation:
        """Show the passages that a query finds.

        Raises:
            SandboxError: the server failed.
        """
        found = self._retrieve(query, self._top_k)
        shown = [
            f"Doc {number}(Title: {passage.title}) {_cut(passage.text, self._characters)}"
            for number, passage in enumerate(found, 1)
        ]
        return self._observe("\n".join(shown) or "Nothing was found.")

    def answer(self, text: str) -> Observation:
        """End the episode with an answer."""
        self._state = self._state._replace(answer=text)
        right, share = self._scores()
        return self._observe("The question is answered.", float(right) if self._reward == "em" else share)

    def save_state(self) -> State:
        return self._state

    def load_state(self, state: State) -> None:
        self._state = state

    def expert_actions(self) -> list[str] | None:
        """Search hop by hop, then answer; None where the file doesn't tell the searches."""
        question = self._state.question
        if not question.queries:
            return None
        return [*(f"search[{query}]" for query in question.queries), f"answer[{question.answers[0]}]"]

    @classmethod
    def tasks(cls, split: str = "train", root: str | None = None, **kwargs: Any) -> list[str]:
        """The rows of ``<root>/<split>.parquet``, or of ``root`` where that is a file.

        Args:
            root: None: the environment variable ``SEARCH_DATA``.

        Raises:
            TaskError: no such file, or rows that are wrong, named by row and column.
        """
        folder = root or os.environ.get("SEARCH_DATA")
        if not folder:
            raise TaskError(
                f"questions aren't named: set SEARCH_DATA or --root to the folder that holds {split}.parquet"
            )
        file = Path(folder).expanduser().absolute()
        if not file.is_file():
            file = file / f"{split}.parquet"
        questions = open_questions(str(file))
        questions.check()
        return [f"{file}#{row}" for row in range(len(questions))]

    @classmethod
    def data_source(cls, task: str, split: str) -> str | None:
        return _question(task).source or None

    @classmethod
    def task_file(cls, task: str) -> Path:
        return Path(_split(task)[0]).expanduser()

    @classmethod
    def check_task(cls, task: str, **kwargs: Any) -> None:
        _question(task)
        retriever = kwargs.get("retriever") or os.environ.get("SEARCH_RETRIEVER")
        corpus = Path(retriever or cls.task_file(task).with_name("corpus.jsonl")).expanduser()
        if not str(retriever).startswith(("http://", "https://")) and not corpus.is_file():
            raise TaskError(
                f"no corpus {corpus}: set SEARCH_RETRIEVER to a JSONL corpus or to the URL of a retrieval server"
            )

    @classmethod
    def task_content(cls, task: str, **kwargs: Any) -> bytes:
        question = _question(task)
        return "\0".join([question.text, *question.answers, ""]).encode()

    def _scores(self) -> tuple[bool, float]:
        """Exact match and F1 so far."""
        state = self._state
        if state.answer is None:
            return False, 0.0
        return exact_match(state.answer, state.question.answers), f1(state.answer, state.question.answers)

    def _observe(self, text: str, reward: float = 0.0) -> Observation:
        right, share = self._scores()
        info = {"won": right, "score": share, "task_type": self._state.question.source or "question"}
        over = self._state.answer is not None
        return Observation(text, reward, over, actions=("search[<query>]", "answer[<text>]"), info=info)


def _split(task: str) -> tuple[str, int]:
    file, _, row = task.rpartition("#")
    if not (file and row.isascii() and row.isdigit()):
        raise TaskError(
            f"{task!r} is no question: tasks are FILE.parquet#ROW, as verl-bpo make-data search writes them"
        )
    return file, int(row)


def _question(task: str) -> Question:
    file, row = _split(task)
    questions = open_questions(file)
    if row >= len(questions):
        raise TaskError(f"{file} has {len(questions)} questions, and no row {row}: make the prompt file again")
    return questions[row]


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit].rstrip()}..."
