"""Goals: what an episode is asked to buy, built from instructions by rule (synthetic) or written by people (human)."""

from __future__ import annotations

import random
import sys
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_bpo.envs.webshop.products import Product, Products

NO_LIMIT = 1000000
"""``price_upper`` of a goal without a price limit."""

_LIMITS = [10.0 * step for step in range(1, 100)]


@dataclass(frozen=True, slots=True)
class Goal:
    """What to buy. The instruction's text is put together on demand: the full data has millions of goals.

    ``options`` are (name, value) pairs of a synthetic goal, or the bare values of a human one.
    """

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str] | str, ...]
    price_upper: float
    """In dollars."""

    @property
    def instruction_text(self) -> str:
        text = self.instruction
        pairs = [f"{option[0]}: {option[1]}" for option in self.options if isinstance(option, tuple)]
        if pairs:
            text += f" with {', and '.join(pairs)}"
        if self.price_upper != NO_LIMIT:
            text += f", and price lower than {self.price_upper:.2f} dollars"
        return text


class Goals(Sequence[Goal]):
    """Goals by their task ids, put together when they are looked at: the full shop has millions.

    An entry is what one instruction asks for: a product, the instruction, its attributes, a price limit, and its options, or
    (None) one goal for every combination of the product's options.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products
        self._owners, self._limits, self._ends = array("Q"), array("d"), array("Q")
        self._instructions: list[str] = []
        self._attributes: list[tuple[str, ...]] = []
        self._options: list[tuple[str, ...] | None] = []
        self._order: array[int] = array("Q")

    def add(
        self,
        product: int,
        instruction: str,
        attributes: Iterable[str],
        limit: float,
        options: tuple[str, ...] | None = None,
        combinations: int = 1,
    ) -> None:
        self._owners.append(product)
        self._instructions.append(instruction)
        self._attributes.append(tuple(sys.intern(attribute) for attribute in attributes))
        self._limits.append(limit)
        self._options.append(options)
        first = self._ends[-1] if self._ends else 0
        self._ends.append(first + combinations)
        self._order.extend(range(first, first + combinations))

    def shuffle(self, draw: random.Random) -> None:
        draw.shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Goal:
        number = self._order[index]
        entry = bisect_right(self._ends, number)
        product, options = self._products[self._owners[entry]], self._options[entry]
        if options is None:
            options = _combination(product.options, number - (self._ends[entry - 1] if entry else 0))
        return Goal(product, self._instructions[entry], self._attributes[entry], options, self._limits[entry])


def synthetic_goals(
    products: Products,
    prices: Sequence[float],
    combinations: Sequence[int],
    instructions: dict[str, dict[str, Any]],
    draw: random.Random,
) -> Goals:
    """One goal for every combination of options of every product that has an instruction; ``combinations`` counts them."""
    goals = Goals(products)
    for asin, index in products.index_of.items():
        entry = instructions.get(asin, {})
        instruction = entry.get("instruction")
        if instruction is not None:
            limit = _price_limit(prices[index], draw)
            goals.add(index, instruction, entry["instruction_attributes"], limit, combinations=combinations[index])
    return goals


def human_goals(
    products: Products, prices: Sequence[float], written: dict[str, list[dict[str, Any]]], draw: random.Random
) -> Goals:
    """One goal for every instruction that a person wrote and that names at least one attribute."""
    goals = Goals(products)
    for asin, index in products.index_of.items():
        for entry in written.get(asin, []):
            attributes = entry["instruction_attributes"]
            if attributes:
                limit = _price_limit(prices[index], draw)
                goals.add(
                    index, entry["instruction"].strip("."), attributes, limit, tuple(entry["instruction_options"])
                )
    return goals


def _combination(options: dict[str, tuple[str, ...]], number: int) -> tuple[tuple[str, str], ...]:
    """The combination of values with this number: names in alphabetical order, the last one's values change fastest."""
    chosen = []
    for name in sorted(options, reverse=True):
        number, place = divmod(number, len(options[name]))
        chosen.append((name, options[name][place]))
    return tuple(reversed(chosen))


def sampling_weights(goals: Sequence[Goal]) -> list[float]:
    """How often the original draws each synthetic goal when none is named: rare attributes more often."""
    counts = Counter(attribute for goal in goals for attribute in goal.attributes)
    return [sum(1.0 / counts[attribute] for attribute in goal.attributes) / len(goal.attributes) for goal in goals]


def _price_limit(price: float, draw: random.Random) -> float:
    """The larger of two of the next four multiples of ten dollars above the price."""
    above = [limit for limit in _LIMITS if limit > price][:4]
    return max(draw.sample(above, 2)) if len(above) >= 2 else NO_LIMIT
