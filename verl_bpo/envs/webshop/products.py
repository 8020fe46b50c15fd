"""The shop's products: one as a page shows it, and all of a file."""

from __future__ import annotations

import json
import mmap
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

DEFAULT_PRICE = 100.0
_WINDOW = 1 << 24
BAR: dict[str, Any] = {"leave": False, "disable": None, "delay": 3.0}
"""Progress is shown on a terminal, of what takes longer than three seconds."""
_PARSED = 8192
"""Products kept parsed: all of the small shop, and those that episodes look at of the large one."""


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
        return " to ".join(f"${price}" for price in self.prices or (DEFAULT_PRICE,))

    @cached_property
    def option_names(self) -> dict[str, str]:
        """Which option a click on a value sets. Of two options that share a value, the later one gets the click."""
        return {value: name for name, values in self.options.items() for value in values}

    @property
    def document(self) -> str:
        """The text that the search index holds."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, self.bullets[0] if self.bullets else "", options]).lower()


class Products(Sequence[Product]):
    """The products of a file, in its order, which breaks ties and decides the order of random draws.

    The full shop has more than a million, of which an episode sees a few dozen: so a product is parsed when it is looked at,
    out of the mapped file, which the processes of a machine share. Kept in memory is what concerns all of them: where each
    one stands, its id, ``categories``, ``queries`` and attributes.

    Raises:
        ValueError: the file is no JSON.
        KeyError, TypeError, AttributeError: it holds something other than products.
    """

    def __init__(self, path: Path, instructions: dict[str, dict[str, Any]], seen: Callable[[Product], None]) -> None:
        """``seen`` is called with each product once, in order."""
        with open(path, "rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._spans = array("Q")
        self._attributes: list[tuple[str, ...]] = []
        self.index_of: dict[str, int] = {}
        self.categories: list[str] = []
        self.queries: list[str] = []
        shown = tqdm(total=len(self._data), desc=f"reading {path.name}", unit="B", unit_scale=True, **BAR)
        for start, end, row in _records(self._data):
            shown.update(end - shown.n)
            asin = row["asin"]
            if asin == "nan" or len(asin) > 10 or asin in self.index_of:
                continue
            attributes = instructions.get(asin, {}).get("attributes", ["DUMMY_ATTR"])
            attributes = tuple(sys.intern(attribute) for attribute in attributes)
            product = _product(row, attributes)
            self.index_of[asin] = len(self.index_of)
            self._spans.extend((start, end))
            self._attributes.append(attributes)
            self.categories.append(sys.intern(product.category))
            self.queries.append(sys.intern(product.query))
            seen(product)
        shown.close()
        self._parsed = lru_cache(_PARSED)(self._parse)

    def __len__(self) -> int:
        return len(self._attributes)

    def __getitem__(self, index: int) -> Product:
        return self._parsed(index)

    def _parse(self, index: int) -> Product:
        attributes = self._attributes[index]
        return _product(json.loads(self._data[self._spans[2 * index] : self._spans[2 * index + 1]]), attributes)


def _records(data: mmap.mmap) -> Iterator[tuple[int, int, Any]]:
    """Start, end and content of each entry of a JSON array, without ever holding more than a window of it.

    Raises:
        json.JSONDecodeError: it isn't one.
    """
    decode, size = json.JSONDecoder().raw_decode, len(data)
    base, width, text, at = 0, _WINDOW, "", 0
    expected = "["
    while True:
        # In Latin-1 every byte is one character, so that places in the text are places in the file.
        text, base, at = data[base + at : base + at + width].decode("latin-1"), base + at, 0
        whole = base + len(text) == size
        while True:
            token = _SEPARATOR.match(text, at)
            mark, begin = token[1], token.end()
            if begin == len(text) and not whole:
                break  # the next entry may start in the next window
            if mark == "]" and expected == ",":
                return
            if mark != expected:
                raise json.JSONDecodeError("expected an array of products", text, begin)
            if expected == "[" and text[begin : begin + 1] == "]":
                return
            try:
                row, end = decode(text, begin)
            except json.JSONDecodeError:
                if whole:
                    raise
                break
            if not text[begin:end].isascii():
                row = json.loads(data[base + begin : base + end])
            yield base + begin, base + end, row
            at, expected, width = end, ",", _WINDOW
        if at == 0:
            width *= 2  # an entry longer than the window


_SEPARATOR = re.compile(r"[ \t\r\n]*([\[\],]?)[ \t\r\n]*")


def _product(row: dict[str, Any], attributes: tuple[str, ...]) -> Product:
    bullets = row["small_description"]
    return Product(
        asin=row["asin"],
        title=row["name"],
        description=row["full_description"],
        bullets=tuple(bullets) if isinstance(bullets, list) else (bullets,),
        prices=_price_range(row.get("pricing")),
        options={
            name.lower(): tuple(_option_value(content["value"]) for content in contents)
            for name, contents in (row["customization_options"] or {}).items()
            if contents is not None
        },
        attributes=attributes,
        category=row["category"],
        query=row["query"].lower().strip(),
        product_category=row["product_category"],
    )


def _price_range(pricing: str | None) -> tuple[float, ...]:
    """``"$9.99"`` or ``"$9.99$1,012.50"``, the two ends of a range, in dollars."""
    return tuple(float(re.sub(r"[^\d.]", "", price)) for price in (pricing or "").split("$")[1:3])


def _option_value(value: str) -> str:
    return value.strip().replace("/", " | ").lower()
