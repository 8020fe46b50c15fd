"""Goals: what an episode is asked to buy, built from instructions by rule (synthetic) or written by people (human)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_bpo.envs.webshop.catalogue import Product

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


def synthetic_goals(
    products: list[Product], prices: list[float], instructions: dict[str, dict[str, Any]], draw: random.Random
) -> list[Goal]:
    """One goal for every combination of options of every product that has an instruction."""
    goals = []
    for product, price in zip(products, prices):
        entry = instructions.get(product.asin, {})
        instruction = entry.get("instruction")
        if instruction is None:
            continue
        attributes = tuple(entry["instruction_attributes"])
        limit = _price_limit(price, draw)
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            goals.append(Goal(product, instruction, attributes, tuple(zip(names, values)), limit))
    return goals


def human_goals(
    products: list[Product], prices: list[float], written: dict[str, list[dict[str, Any]]], draw: random.Random
) -> list[Goal]:
    """One goal for every instruction that a person wrote and that names at least one attribute."""
    goals = []
    for product, price in zip(products, prices):
        for entry in written.get(product.asin, []):
            attributes = tuple(entry["instruction_attributes"])
            if not attributes:
                continue
            limit = _price_limit(price, draw)
            instruction = entry["instruction"].strip(".")
            goals.append(Goal(product, instruction, attributes, tuple(entry["instruction_options"]), limit))
    return goals


def sampling_weights(goals: list[Goal]) -> list[float]:
    """How often the original draws each synthetic goal when none is named: rare attributes more often."""
    counts = Counter(attribute for goal in goals for attribute in goal.attributes)
    return [sum(1.0 / counts[attribute] for attribute in goal.attributes) / len(goal.attributes) for goal in goals]


def _price_limit(price: float, draw: random.Random) -> float:
    """The larger of two of the next four multiples of ten dollars above the price."""
    above = [limit for limit in _LIMITS if limit > price][:4]
    return max(draw.sample(above, 2)) if len(above) >= 2 else NO_LIMIT
