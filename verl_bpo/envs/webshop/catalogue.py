"""Prices, goals and the search index over the products: all that episodes share and none of them changes."""

from __future__ import annotations

import json
import math
import random
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from verl_bpo.envs.webshop.goals import Goals, human_goals, synthetic_goals
from verl_bpo.envs.webshop.nouns import title_nouns
from verl_bpo.envs.webshop.products import BAR, DEFAULT_PRICE, Product, Products
from verl_bpo.envs.webshop.search import MAX_RESULTS, Bm25sSearch, PyseriniSearch, index_folder
from verl_bpo.sandbox.base import TaskError

PRODUCT_FILES = {"small": "items_shuffle_1000.json", "all": "items_shuffle.json"}
INSTRUCTION_FILES = {"small": "items_ins_v2_1000.json", "all": "items_ins_v2.json"}
HUMAN_FILE = "items_human_ins.json"

_SHUFFLE_SEED = 233


class Catalogue:
    """A loaded shop. Read-only, so any number of episodes and threads may share it.

    Args:
        prices: the price of each product in dollars.
        goals: in the order of their task ids.
        search: from a query to product indices, best first.
        nouns: from a title to its nouns.
    """

    def __init__(
        self,
        products: Products,
        prices: Sequence[float],
        goals: Goals,
        search: Callable[[str], tuple[int, ...]],
        nouns: Callable[[str], tuple[str, ...]],
    ) -> None:
        self.products = products
        self.prices = prices
        self.goals = goals
        self.nouns = nouns
        self.index_of = products.index_of
        self._search = search
        # Trees ask the same few queries again and again: forks share their trunk's, and every results page asks anew.
        self.search = lru_cache(maxsize=4096)(self._find)

    def _find(self, query: str, seed: int = 0) -> tuple[int, ...]:
        """Indices of the products that a query finds, best first.

        The original knows four queries that bypass its index: ``<r>`` (random products), ``<c> category``,
        ``<q> product query`` and ``<a> attribute``; the last one fails there for want of a table. Its ``<r>`` differs at
        every look; here ``seed`` fixes it, or a restored state would not continue alike.
        """
        words = query.split(" ")
        rest = " ".join(words[1:]).strip()
        everything = range(len(self.products))
        if words[0] == "<r>":
            return tuple(random.Random(seed).sample(everything, min(MAX_RESULTS, len(everything))))
        if words[0] == "<c>":
            category = "".join(words[1:2]).strip()
            return tuple(i for i, known in enumerate(self.products.categories) if known == category)
        if words[0] == "<q>":
            return tuple(i for i, known in enumerate(self.products.queries) if known == rest)
        if words[0] == "<a>":
            return tuple(i for i in everything if rest in self.products[i].attributes)
        return self._search(query)


def check_files(folder: Path, products: str, goals: str) -> None:
    """Whether a shop's files are in ``folder``.

    Raises:
        TaskError: one isn't.
    """
    human = [HUMAN_FILE] if goals == "human" else []
    for name in (PRODUCT_FILES[products], INSTRUCTION_FILES[products], *human):
        try:
            (folder / name).stat()
        except OSError as error:
            raise _missing(folder / name, error) from error


_lock = threading.Lock()


def load_catalogue(
    data_dir: str, products: str, goals: str, search: str, index_dir: str | None, seed: int
) -> Catalogue:
    """The shop of a data folder, loaded once per process and set of arguments.

    Raises:
        TaskError: a file is missing or isn't WebShop's.
        ImportError: the search engine asked for isn't installed.
    """
    with _lock:  # lru_cache alone would load twice when two threads ask at once
        return _load(data_dir, products, goals, search, index_dir, seed)


@lru_cache(maxsize=4)
def _load(data_dir: str, products: str, goals: str, search: str, index_dir: str | None, seed: int) -> Catalogue:
    folder = Path(data_dir)
    instructions = _read(folder / INSTRUCTION_FILES[products])
    # The original draws prices and price limits from an unseeded generator, in this order, then shuffles the goals with a
    # seed of its own.
    draw = random.Random(seed)
    prices, combinations = array("d"), array("Q")

    def seen(product: Product) -> None:
        prices.append(_price(product, draw))
        combinations.append(math.prod(map(len, product.options.values())))

    path = folder / PRODUCT_FILES[products]
    try:
        items = Products(path, instructions, seen)
        if goals == "human":
            found = human_goals(items, prices, _read(folder / HUMAN_FILE), draw)
        else:
            found = synthetic_goals(items, prices, combinations, instructions, draw)
    except OSError as error:
        raise _missing(path, error) from error
    except json.JSONDecodeError as error:
        raise TaskError(f"{path} is no JSON ({error}): download it again") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TaskError(f"{folder} doesn't hold WebShop's data ({type(error).__name__}: {error})") from error
    found.shuffle(random.Random(_SHUFFLE_SEED))
    del instructions
    if search == "pyserini":
        index: Any = PyseriniSearch(index_dir, list(items.index_of))
    else:
        documents = tqdm((item.document for item in items), "indexing", len(items), unit="product", **BAR)
        index = Bm25sSearch(documents, index_folder(path, Path(__file__)) if products == "all" else None)
    return Catalogue(items, prices, found, index, title_nouns())


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise _missing(path, error) from error
    except ValueError as error:
        raise TaskError(f"{path} is no JSON ({error}): download it again") from error


def _missing(path: Path, error: OSError) -> TaskError:
    return TaskError(
        f"no {path} ({error.strerror}): get it with WebShop's setup.sh, and name its data folder with data_dir or WEBSHOP_DATA"
    )


def _price(product: Product, draw: random.Random) -> float:
    if len(product.prices) == 2:
        return draw.uniform(*product.prices)
    return product.prices[0] if product.prices else DEFAULT_PRICE
