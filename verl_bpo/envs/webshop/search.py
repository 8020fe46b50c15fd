"""The shop's search: BM25 over product texts, k1 = 0.9 and b = 0.4, Porter stems, as the original sets Lucene up."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

MAX_RESULTS = 50
"""A query finds at most this many products."""

_K1, _B = 0.9, 0.4

# Lucene's English stop words.
_LUCENE_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
_STOP_WORDS = frozenset(_LUCENE_STOP_WORDS.split())
# Like Lucene's tokens, words keep an apostrophe, full stop or underscore between their letters; unlike them, ASCII only.
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?(?:[._][a-z0-9]+)*")


class Bm25sSearch:
    """In process, by bm25s.

    Args:
        documents: the products' texts.
        folder: where the index is kept, or taken from (memory-mapped, which the processes of a machine share) without looking
            at ``documents``. None: it is built and not kept.

    Products of equal score come in the order in which numpy's partition leaves them: always the same on one machine,
    but not on one with other vector instructions (AVX-512 or not). About one results page in twenty holds such a pair.

    Raises:
        ImportError: bm25s or PyStemmer isn't installed.
    """

    def __init__(self, documents: Iterable[str], folder: Path | None = None) -> None:
        try:
            import bm25s
            import Stemmer
        except ImportError as error:
            raise ImportError(f"search by BM25 needs bm25s: pip install bm25s PyStemmer ({error})") from error
        self._stem = Stemmer.Stemmer("porter").stemWords
        self._make = bm25s.BM25
        self._index = self._built(documents) if folder is None else self._kept(documents, folder)
        self._results = min(MAX_RESULTS, self._index.scores["num_docs"])

    def _kept(self, documents: Iterable[str], folder: Path):
        with _one_at_a_time(folder.parent):
            if folder.exists():
                try:
                    return self._make.load(folder, mmap=True, show_progress=False)
                except Exception as error:  # whatever a parser says of a broken file
                    warnings.warn(f"{folder} can't be read ({error}): the search index is built again", stacklevel=2)
            index = self._built(documents)
            try:
                _keep(index, folder)
            except OSError as error:
                warnings.warn(
                    f"the search index can't be kept in {folder} ({error}): every process builds it", stacklevel=2
                )
            return index

    def _built(self, documents: Iterable[str]):
        vocabulary: dict[str, int] = {}
        number_of: dict[str, int | None] = dict.fromkeys(_STOP_WORDS)  # by word, so that each is stemmed once
        rows = []
        for document in documents:
            words = _WORD.findall(document.lower())
            for word in words:
                if word not in number_of:
                    number_of[word] = vocabulary.setdefault(self._stem([word])[0], len(vocabulary))
            numbers = (number_of[word] for word in words)
            rows.append(np.array([number for number in numbers if number is not None], dtype=np.int32))
        index = self._make(k1=_K1, b=_B, method="lucene")
        # The stem of "s" is the empty string, which bm25s would add as a token without scores if no document had it.
        index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        return index

    def tokens(self, text: str) -> list[str]:
        return self._stem([word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS])

    def __call__(self, query: str) -> tuple[int, ...]:
        """Indices of the documents that share a word with the query, best first."""
        known = [token for token in self.tokens(query) if token in self._index.vocab_dict]
        if not known:
            return ()
        # bm25s would select by jax where that is installed, and break ties otherwise.
        found, scores = self._index.retrieve([known], k=self._results, show_progress=False, backend_selection="numpy")
        return tuple(found[0][scores[0] > 0].tolist())


def index_folder(products: Path, reader: Path) -> Path:
    """Where the index of a file is kept: beside it, under a name that changes with the file and with what makes indices.

    Args:
        reader: the code that makes documents of the file.
    """
    state = products.stat()
    known = [state.st_size, state.st_mtime_ns, *map(version, ("bm25s", "PyStemmer", "numpy"))]
    code = [Path(__file__).read_bytes(), reader.read_bytes()]
    key = hashlib.sha256(b"".join([repr(known).encode(), *code])).hexdigest()[:16]
    return products.with_name(f"{products.name}.bm25s-{key}")


def _keep(index, folder: Path) -> None:
    """Save it in one move, so that nobody reads half an index."""
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        partial.chmod(folder.parent.stat().st_mode)  # whoever reads the data may read the index
        index.save(partial, show_progress=False)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """A lock on ``folder`` between processes, where one can write there: the workers of a run would all build the same."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if os.access(folder, os.W_OK):
            with contextlib.suppress(OSError):  # some network file systems lock no folders
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class PyseriniSearch:
    """The original's own engine and index (Lucene, needs Java).

    Args:
        index_dir: the index that WebShop's ``run_indexing.sh`` built, such as ``search_engine/indexes_1k``.
        asins: product ids in the order of the catalogue.

    Raises:
        ImportError: pyserini isn't installed.
        ValueError: no index is named.
    """

    def __init__(self, index_dir: str | None, asins: Sequence[str]) -> None:
        if index_dir is None:
            raise ValueError(
                "search='pyserini' needs index_dir: WebShop's Lucene index, such as search_engine/indexes_1k"
            )
        try:
            from pyserini.search.lucene import LuceneSearcher
        except ImportError as error:
            raise ImportError(f"search='pyserini' needs pyserini and Java: pip install pyserini ({error})") from error
        self._searcher = LuceneSearcher(index_dir)
        self._index_of = {asin: index for index, asin in enumerate(asins)}

    def __call__(self, query: str) -> tuple[int, ...]:
        hits = self._searcher.search(query, k=MAX_RESULTS)
        return tuple(self._index_of[hit.docid] for hit in hits if hit.docid in self._index_of)
