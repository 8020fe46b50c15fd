"""Where passages come from: BM25 over a file in this process, or a server. Neither has a state that a search changes."""

from __future__ import annotations

import http.client
import json
import mmap
import threading
import urllib.request
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from verl_bpo.envs.webshop.search import Bm25sSearch, index_folder
from verl_bpo.sandbox.base import SandboxError, TaskError
from verl_bpo.sandbox.loading import EnvironmentUnavailable

KEPT_FROM = 16 * 2**20
"""Of a corpus of so many bytes the index is kept on disk."""

_OPENING = threading.Lock()


class Passage(NamedTuple):
    """One found passage."""

    title: str
    text: str

    @classmethod
    def of(cls, contents: str) -> Passage:
        """From Search-R1's form: the title in quotes on the first line, then the text."""
        title, _, text = contents.partition("\n")
        title = title.strip()
        quoted = len(title) > 1 and title[0] == title[-1] == '"'
        return cls(title[1:-1] if quoted else title, text.strip())  # one pair: a title may have quotes of its own


class Retriever(Protocol):
    """Finds passages; shared by all worlds of a process."""

    def __call__(self, query: str, count: int) -> list[Passage]:
        """At most ``count`` passages, best first.

        Raises:
            SandboxError: they couldn't be had; one line.
        """
        ...


class CorpusRetriever:
    """BM25 over a JSONL file of ``{"id": ..., "contents": ...}``, by bm25s; at most 50 passages a query.

    k1, b, stop words and stems are those of Lucene's English analysis as Pyserini, and so Search-R1's BM25 server, has it.
    The file is mapped, and a passage parsed when it is found. The index of a large file is kept beside it and mapped too.

    Raises:
        TaskError: there is no such file, it is empty, or a line has not this form; it names the line.
        ImportError: bm25s or PyStemmer isn't installed.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            with open(file, "rb") as stream:
                self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise TaskError(f"no corpus {file} ({error.strerror}): a JSONL file of id and contents") from error
        except ValueError:  # an empty file can't be mapped
            raise TaskError(f"corpus {file} is empty") from None
        self._starts = np.fromiter(self._lines(), dtype=np.int64)
        folder = index_folder(file, Path(__file__)) if len(self._data) >= KEPT_FROM else None
        self._search = Bm25sSearch((self._contents(line) for line in range(len(self._starts))), folder)
        self._lock = threading.Lock()  # a stemmer is for one thread at a time

    def __call__(self, query: str, count: int) -> list[Passage]:
        with self._lock:
            found = self._search(query)[:count]
        return [Passage.of(self._contents(line)) for line in found]

    def _lines(self) -> Iterator[int]:
        """Where lines begin that aren't blank."""
        start, size = 0, len(self._data)
        while start < size:
            end = self._data.find(b"\n", start)
            end = size if end < 0 else end
            if self._data[start:end].strip():
                yield start
            start = end + 1

    def _contents(self, line: int) -> str:
        start = int(self._starts[line])
        end = self._data.find(b"\n", start)
        try:
            contents = json.loads(self._data[start : end if end >= 0 else len(self._data)])["contents"]
        except (ValueError, KeyError, TypeError):
            contents = None
        if not isinstance(contents, str):
            raise TaskError(f'{self.file}, passage {line + 1}: no JSON object with "contents", a text')
        return contents


class ServerRetriever:
    """A server of Search-R1's retrieval form: ``POST {"queries", "topk", "return_scores"}`` to its URL.

    Args:
        timeout: seconds that it may be silent.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url, timeout

    def __call__(self, query: str, count: int) -> list[Passage]:
        body = json.dumps({"queries": [query], "topk": count, "return_scores": True}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            slow = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
            problem = f"did not answer in {self.timeout:g} s" if slow else f"failed: {error or type(error).__name__}"
            raise SandboxError(f"retrieval server {self.url} {problem}") from error
        try:
            (found,) = json.loads(content)["result"]
            return [Passage.of(_contents_of(entry)) for entry in found[:count]]
        except (ValueError, KeyError, TypeError):
            shown = content[:80].decode(errors="replace")
            form = '{"result": [[{"document": {"contents": ...}, "score": ...}, ...]]}'
            raise SandboxError(f"retrieval server {self.url} answered {shown!r} in place of {form}") from None


def _contents_of(entry: dict[str, Any]) -> str:
    contents = entry["document"]["contents"]
    if not isinstance(contents, str):
        raise TypeError(contents)
    return contents


def open_retriever(name: str, timeout: float) -> Retriever:
    """The retriever that ``name`` stands for: an ``http(s)`` URL or the path of a corpus. A corpus is opened once a process.

    Raises:
        TaskError: as of :class:`CorpusRetriever`.
        EnvironmentUnavailable: a package that BM25 needs isn't installed.
    """
    if name.startswith(("http://", "https://")):
        return ServerRetriever(name, timeout)
    path = Path(name).expanduser().absolute()
    try:
        state = path.stat()
    except OSError as error:
        raise TaskError(f"no corpus {path} ({error.strerror}): a JSONL file of id and contents") from None
    try:
        with _OPENING:
            return _opened(path, state.st_mtime_ns, state.st_size)
    except ImportError as error:
        raise EnvironmentUnavailable(f"environment 'search' can't search {path}: {error}") from error


@lru_cache(maxsize=4)
def _opened(path: Path, modified_ns: int, size: int) -> CorpusRetriever:
    return CorpusRetriever(path)
