"""Exact match and F1 of an answer, as SQuAD's evaluation script v1.1 defines them (https://arxiv.org/abs/1606.05250).

Of several gold answers the best one counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(answer: str) -> str:
    """Lower case, without punctuation, then without articles, with single spaces: in this order."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: Sequence[str]) -> bool:
    """Whether the answer is one of ``gold``, both normalised."""
    return normalized(answer) in map(normalized, gold)


def f1(answer: str, gold: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the normalised words, each as often as it occurs; the best of ``gold``."""
    return max(_f1(normalized(answer).split(), normalized(one).split()) for one in gold)


def _f1(words: list[str], gold: list[str]) -> float:
    common = (Counter(words) & Counter(gold)).total()
    return 2 * common / (len(words) + len(gold)) if common else 0.0
