"""The shop's search: BM25 over product texts, k1 = 0.9 and b = 0.4, Porter stems, as the original sets Lucene up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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

    Products of equal score come in the order in which numpy's partition leaves them: always the same on one machine,
    but not on one with other vector instructions (AVX-512 or not). About one results page in twenty holds such a pair.

    Raises:
        ImportError: bm25s or PyStemmer isn't installed.
    """

    def __init__(self, documents: Iterable[str]) -> None:
        try:
            import bm25s
            import Stemmer
        except ImportError as error:
            raise ImportError(f"WebShop's search needs bm25s: pip install bm25s PyStemmer ({error})") from error
        self._stem = Stemmer.Stemmer("porter").stemWords
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
        self._index = bm25s.BM25(k1=_K1, b=_B, method="lucene")
        # The stem of "s" is the empty string, which bm25s would add as a token without scores if no document had it.
        self._index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        self._results = min(MAX_RESULTS, len(rows))

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
