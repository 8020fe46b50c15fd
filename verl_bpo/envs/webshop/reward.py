"""The reward of a purchase (WebShop's paper, section 3 and appendix): what was bought against what was asked for.

r = r_type * (matching attributes + matching options + price within limit) / (attributes + options + 1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from thefuzz import fuzz

if TYPE_CHECKING:
    from verl_bpo.envs.webshop.goals import Goal
    from verl_bpo.envs.webshop.products import Product

_FUZZY_MATCH = 85
"""A fuzzy match scores above this, of 100."""

# An option counts as the first of these colours that it contains, in alphabetical order.
_COLOUR_NAMES = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo "
    "caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal "
    "dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory "
    "ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom "
    "mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire "
    "seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white "
    "wine yellow"
)
_COLOURS = tuple(_COLOUR_NAMES.split())


def purchase_reward(
    product: Product,
    price: float,
    options: Iterable[str],
    goal: Goal,
    nouns: Callable[[str], tuple[str, ...]],
) -> tuple[float, dict[str, float | bool]]:
    """Score a purchase.

    Args:
        product: what was bought, at ``price`` dollars, with these values of its ``options`` chosen.
        nouns: from a title to its nouns, repetitions included.

    Returns:
        The reward in [0, 1], and its parts under the original's names: ``r_type``, ``r_att``, ``r_option`` (absent when
        the goal names no option), ``r_price``, their weights ``w_*``, and what decided the type.
    """
    type_parts = _type_match(product, goal, nouns)
    attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    chosen = [_colour(option) for option in options]
    matching = sum(_chosen(option, chosen) for option in goal.options)
    affordable = price <= goal.price_upper
    total = len(goal.attributes) + len(goal.options) + 1
    reward = (attributes + matching + affordable) / total * type_parts["r_type"]
    parts = {
        **type_parts,
        "r_att": attributes / len(goal.attributes),
        "w_att": len(goal.attributes) / total,
        "r_price": affordable,
        "w_price": 1 / total,
    }
    if goal.options:
        parts |= {"r_option": matching / len(goal.options), "w_option": len(goal.options) / total}
    return reward, parts


def option_matches(option: tuple[str, str] | str, value: str) -> bool:
    """Whether choosing ``value`` satisfies a goal's option."""
    return _chosen(option, [_colour(value)])


def _type_match(product: Product, goal: Goal, nouns: Callable[[str], tuple[str, ...]]) -> dict[str, float | bool]:
    query_match = product.query == goal.product.query
    category_match = len(_categories(product) & _categories(goal.product)) >= 2
    desired = nouns(goal.product.title)
    shared = len(set(nouns(product.title)) & set(desired))
    title_score = shared / len(desired) if desired else 0.2
    if title_score == 0.0:
        r_type = 0.0
    elif title_score < 0.1:
        r_type = 0.1
    elif query_match or category_match or title_score > 0.2:
        r_type = 1.0
    else:
        r_type = 0.5
    return {
        "r_type": r_type,
        "query_match": query_match,
        "category_match": category_match,
        "title_score": title_score,
    }


def _categories(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split("›")}


def _has_attribute(product: Product, wanted: str) -> bool:
    if any(fuzz.token_set_ratio(attribute, wanted) > _FUZZY_MATCH for attribute in product.attributes):
        return True
    texts = (product.title, " ".join(product.bullets), product.description)
    return any(wanted in text.lower() for text in texts)


def _chosen(option: tuple[str, str] | str, chosen: list[str | tuple[str, str]]) -> bool:
    wanted = _colour(option)
    return any(fuzz.token_set_ratio(value, wanted) > _FUZZY_MATCH for value in chosen)


def _colour(option: tuple[str, str] | str) -> tuple[str, str] | str:
    """The option's colour, else the option. A (name, value) pair only counts as a colour that it equals, and is matched
    with its name otherwise: so does the original, which tests a pair where it means a string."""
    return next((colour for colour in _COLOURS if colour in option), option)
