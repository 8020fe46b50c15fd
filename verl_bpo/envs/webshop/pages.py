"""What each page of the shop shows, and what can be clicked there.

A page is a list of (text, role) pieces in the order of the original's HTML. The wording is the original's, since agents
are trained and prompted on it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Literal

from verl_bpo.envs.webshop.products import Product

Role = Literal["text", "button", "option", "product"]
Page = list[tuple[str, Role]]

SEARCH, BUY, BACK, PREVIOUS, NEXT = "Search", "Buy Now", "Back to Search", "< Prev", "Next >"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
RESULTS_PER_PAGE = 10


def search_page(instruction: str) -> Page:
    return _page(_texts("WebShop", "Instruction: ", instruction), [(SEARCH, "button")])


def results_page(instruction: str, products: Iterable[Product], number: int, total: int) -> Page:
    """One page of results. ``number`` counts from 1; the last one with products may be followed by empty ones."""
    page = [*_header(instruction), (f"Page {number} (Total results: {total})", "text")]
    if number > 1:
        page.append((PREVIOUS, "button"))
    page.append((NEXT, "button"))
    for product in products:
        page += [(product.asin, "product"), (product.title, "text"), (product.price_tag, "text")]
    return _page(page)


def item_page(instruction: str, product: Product, show_attributes: bool) -> Page:
    page = [*_header(instruction), (PREVIOUS, "button")]
    for name, values in product.options.items():
        page.append((name, "text"))
        page += [(value, "option") for value in values]
    page += _texts(product.title, f"Price: {product.price_tag}", "Rating: N.A.")
    sub_pages = SUB_PAGES if show_attributes else SUB_PAGES[:3]
    return _page(page, [(name, "button") for name in (*sub_pages, BUY)])


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """One of ``SUB_PAGES``. The data holds no reviews, so their page is empty."""
    if name == "Description":
        content = [product.description]
    elif name == "Features":
        content = [f" {bullet}" for bullet in product.bullets]
    elif name == "Attributes":
        content = [f" {attribute}" for attribute in product.attributes]
        content += [product.category, product.query, product.product_category]
    else:
        content = []
    return _page(_header(instruction), [(PREVIOUS, "button")], _texts(*content))


def done_page(asin: str, options: dict[str, str], reward: float) -> Page:
    """The receipt. Most of its fields are for people who run studies, and say nothing here."""
    chosen = json.dumps(options, sort_keys=True)
    for character in "<>&'":  # as Jinja writes JSON into HTML
        chosen = chosen.replace(character, f"\\u{ord(character):04x}")
    return _page(
        _texts("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"),
        _texts("Purchased", "asin", asin, "options", chosen, "attrs", "None", "category", "None", "query", "None"),
        _texts("product category", "None", "Target", "asin", "options", "attrs", "price upper", "instuction text"),
        _texts("category", "product category", "query", "Goal ", "None", "Reward"),
        _texts("Your score (min 0.0, max 1.0)", str(reward), "Reward Details ", "None"),
    )


def clickables(page: Page) -> tuple[str, ...]:
    """What can be clicked, in the original's order: buttons, product links, options; each text once."""
    buttons = (text.lower() for text, role in page if role == "button")
    products = (text.lower() for text, role in page if role == "product")
    options = (text for text, role in page if role == "option")
    return tuple(dict.fromkeys([*buttons, *products, *options]))


def plain_text(page: Page) -> str:
    """The original's ``text`` mode."""
    return " [SEP] ".join([text.strip() for text, _ in page if text])


def rich_text(page: Page, address: str, visited: Collection[str]) -> str:
    """The original's ``text_rich`` mode, which marks what can be clicked and what was.

    Args:
        address: the page's URL, or the part of it that holds query and options: an option counts as clicked when the
            address holds it in double quotes.
        visited: ids of the products seen since the last time on the search page.
    """
    lines, clicked = [], []
    for text, role in page:
        if not text:
            continue
        if role == "text":
            lines.append(text)
        elif role == "button":
            lines.append(f"[button] {text} [button_]")
        elif role == "option":
            chosen = f'"{text}"' in address
            if chosen:
                clicked.append(f"You have clicked {text}.")
            lines.append(f"  [clicked button] {text} [clicked button_]" if chosen else f"  [button] {text} [button_]")
        else:
            seen = text in visited
            lines.append(f"\n[clicked button] {text} [clicked button_]" if seen else f"\n[button] {text} [button_]")
    return "".join(f"{line}\n" for line in [*reversed(clicked), *lines])


def _header(instruction: str) -> Page:
    return [("Instruction:", "text"), (instruction, "text"), (BACK, "button")]


def _texts(*texts: str) -> Page:
    return [(text, "text") for text in texts]


def _page(*parts: Page) -> Page:
    """Join parts, with white space as an HTML parser leaves it: no empty strings, and a string of nothing but white
    space vanishes with its line break or else becomes one blank. An option without a text stays: it shows nothing, but the
    original lists it among what can be clicked."""
    page = []
    for part in parts:
        for text, role in part:
            if role != "option" and not text.strip(" \t\n\f\r"):
                if not text or "\n" in text:
                    continue
                text = " "
            page.append((text, role))
    return page
