"""Products, prices, goals and the search index: all that episodes share and none of them changes."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from verl_bpo.envs.webshop.goals import Goal, human_goals, synthetic_goals
from verl_bpo.envs.webshop.nouns import title_nouns
from verl_bpo.envs.webshop.search import MAX_RESULTS, Bm25sSearch, PyseriniSearch
from verl_bpo.sandbox.base import TaskError

PRODUCT_FILES = {"small": "items_shuffle_1000.json", "all": "items_shuffle.json"}
INSTRUCTION_FILES = {"small": "items_ins_v2_1000.json", "all": "items_ins_v2.json"}
HUMAN_FILE = "items_human_ins.json"

_SHUFFLE_SEED = 233
_DEFAULT_PRICE = 100.0


@dataclass(frozen=True, eq=False)
class Product:
    """One product as the shop shows it. ``prices``: none, one, or the two ends of a range, in dollars."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    prices: tuple[float, ...]
    options: dict[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    category: str
    query: str
    product_category: str

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices or (_DEFAULT_PRICE,))

    @cached_property
    def option_names(self) -> dict[str, str]:
        """Which option a click on a value sets. Of two options that share a value, the later one gets the click."""
        return {value: name for name, values in self.options.items() for value in values}

    @property
    def document(self) -> str:
        """The text that the search index holds."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, self.bullets[0] if self.bullets else "", options]).lower()


class Catalogue:
    """A loaded shop. Read-only, so any number of episodes and threads may share it.

    Args:
        products: in the order of their file, which breaks ties and decides the order of random draws.
        prices: the price of each product in dollars.
        goals: in the order of their task ids.
        search: from a query to product indices, best first.
        nouns: from a title to its nouns.
    """

    def __init__(
        self,
        products: list[Product],
        prices: list[float],
        goals: list[Goal],
        search: Callable[[str], tuple[int, ...]],
        nouns: Callable[[str], tuple[str, ...]],
    ) -> None:
        self.products = products
        self.prices = prices
        self.goals = goals
        self.nouns = nouns
        self.index_of = {product.asin: index for index, product in enumerate(products)}
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
            return tuple(i for i in everything if self.products[i].category == category)
        if words[0] == "<q>":
            return tuple(i for i in everything if self.products[i].query == rest)
        if words[0] == "<a>":
            return tuple(i for i in everything if rest in self.products[i].attributes)
        return self._search(query)


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
    try:
        items = _products(_read(folder / PRODUCT_FILES[products]), instructions)
        # The original draws prices and price limits from an unseeded generator, in this order, then shuffles the goals
        # with a seed of its own.
        draw = random.Random(seed)
        prices = [_price(item, draw) for item in items]
        if goals == "human":
            found = human_goals(items, prices, _read(folder / HUMAN_FILE), draw)
        else:
            found = synthetic_goals(items, prices, instructions, draw)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TaskError(f"{folder} doesn't hold WebShop's data ({type(error).__name__}: {error})") from error
    random.Random(_SHUFFLE_SEED).shuffle(found)
    if search == "pyserini":
        index: Any = PyseriniSearch(index_dir, [item.asin for item in items])
    else:
        index = Bm25sSearch([item.document for item in items])
    return Catalogue(items, prices, found, index, title_nouns())


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise TaskError(
            f"no {path} ({error.strerror}): get it with WebShop's setup.sh, and name its data folder with data_dir or "
            f"WEBSHOP_DATA"
        ) from error
    except ValueError as error:
        raise TaskError(f"{path} is no JSON ({error}): download it again") from error


def _products(rows: list[dict[str, Any]], instructions: dict[str, dict[str, Any]]) -> list[Product]:
    products: dict[str, Product] = {}
    for row in rows:
        asin = row["asin"]
        if asin == "nan" or len(asin) > 10 or asin in products:
            continue
        bullets = row["small_description"]
        products[asin] = Product(
            asin=asin,
            title=row["name"],
            description=row["full_description"],
            bullets=tuple(bullets) if isinstance(bullets, list) else (bullets,),
            prices=_price_range(row.get("pricing")),
            options={
                name.lower(): tuple(_option_value(content["value"]) for content in contents)
                for name, contents in (row["customization_options"] or {}).items()
                if contents is not None
            },
            attributes=tuple(instructions.get(asin, {}).get("attributes", ["DUMMY_ATTR"])),
            category=row["category"],
            query=row["query"].lower().strip(),
            product_category=row["product_category"],
        )
    return list(products.values())


def _price_range(pricing: str | None) -> tuple[float, ...]:
    """``"$9.99"`` or ``"$9.99$1,012.50"``, the two ends of a range, in dollars."""
    return tuple(float(re.sub(r"[^\d.]", "", price)) for price in (pricing or "").split("$")[1:3])


def _option_value(value: str) -> str:
    return value.strip().replace("/", " | ").lower()


def _price(product: Product, draw: random.Random) -> float:
    if len(product.prices) == 2:
        return draw.uniform(*product.prices)
    return product.prices[0] if product.prices else _DEFAULT_PRICE
