"""What an action does: the state of one episode and the steps between states."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from verl_bpo.envs.webshop import pages
from verl_bpo.envs.webshop.catalogue import Catalogue, check_files, load_catalogue
from verl_bpo.envs.webshop.reward import option_matches, purchase_reward
from verl_bpo.sandbox.base import Environment, Observation, TaskError

TEST_GOALS = 500
"""The first goals are held out for tests."""

_ACTION = re.compile(r"(.+)\[(.+)\]")
_PRICE_LIMIT = re.compile(r",? and price lower than .*")
_SUB_PAGES = {name.lower(): name for name in pages.SUB_PAGES}


class State(NamedTuple):
    """Where an episode is. Immutable, so a snapshot is a reference and episodes can't touch each other."""

    goal: int
    seed: int
    page: str = "search"
    """``search``, ``results``, ``item``, ``done`` or one of ``pages.SUB_PAGES``."""
    query: str = ""
    number: int = 1
    """Page of results, from 1."""
    product: int = -1
    options: tuple[tuple[str, str], ...] = ()
    """(name, value) as chosen, each name once."""
    visited: frozenset[str] = frozenset()
    """Ids of the products opened since the search page."""
    score: float = 0.0
    """Reward of the purchase."""


class WebshopEnvironment(Environment):
    """The shop of WebShop. A task is a goal's index, as a string; :meth:`tasks` of another shop than the small one with
    synthetic goals begin with its name, as in ``all-human:17``, so that no goal is taken for another shop's.

    Actions are ``search[words]``, understood on every page, and ``click[what]``. ``Observation.actions`` is the original's
    ``get_available_actions`` as actions: ``search[<query>]`` where the page has a search bar, then ``click[x]`` for each of
    its clickables (``click[search]`` among them, which does nothing there either). Anything else leaves the page as it
    is. The purchase ends an episode and alone is rewarded; ``info["reward_info"]`` then holds the reward's parts.

    Every instance with the same arguments shares one read-only catalogue in its process.

    Args:
        data_dir: folder with WebShop's data files. None: the environment variable ``WEBSHOP_DATA``.
        products: ``small`` (1000 products) or ``all``.
        goals: ``synthetic`` or ``human``.
        observation: ``text`` (pieces joined by ``[SEP]``) or ``text_rich`` (one a line, buttons marked).
        show_attributes: give item pages the button ``Attributes``.
        search: ``bm25s``, in process, or ``pyserini``, the original's Java engine with its index in ``index_dir``.
        seed: draws prices within their ranges and price limits, which are part of the goals. The original leaves this to
            chance.

    Raises:
        ValueError: an argument isn't one of its choices.
        TaskError: a data file is missing or broken.
        ImportError: a package that WebShop needs isn't installed.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        products: str = "small",
        goals: str = "synthetic",
        observation: str = "text",
        show_attributes: bool = False,
        search: str = "bm25s",
        index_dir: str | Path | None = None,
        seed: int = 233,
    ) -> None:
        _one_of("observation", observation, ("text", "text_rich"))
        self._rich = observation == "text_rich"
        self._show_attributes = show_attributes
        self._shop = _shop_name(products, goals)
        self._catalogue = _catalogue(data_dir, products, goals, search, index_dir, seed)
        self._state: State | None = None

    def reset(self, task: str, seed: int = 0) -> Observation:
        """Open the goal with index ``task``. ``seed`` only decides what the query ``<r>`` finds."""
        index, goals = _index(task, self._shop), len(self._catalogue.goals)
        if not (index.isascii() and index.isdigit() and int(index) < goals):
            raise TaskError(f"no WebShop goal {task!r}: tasks are 0 to {goals - 1}")
        self._enter(State(int(index), seed))
        return self._observe()

    def step(self, action: str) -> Observation:
        state = self._state
        name, argument = _parse(action)
        if state.page == "done":
            return self._observe()
        if name == "search":
            self._enter(state._replace(page="results", query=argument, number=1, product=-1, options=()))
        elif name == "click" and argument in self._clickables and argument != pages.SEARCH.lower():
            if argument == pages.BUY.lower():
                reward, parts = self._purchase()
                self._enter(state._replace(page="done", score=reward))
                return self._observe(reward, {"reward_info": parts})
            self._enter(self._click(argument))
        return self._observe()

    def save_state(self) -> State:
        return self._state

    def load_state(self, state: State) -> None:
        self._enter(state)

    def expert_actions(self) -> list[str] | None:
        """Search for what the instruction says, turn pages to the product, open it, choose its options, buy: each as the
        page spells it. None where that misses reward 1."""
        goal = self._catalogue.goals[self._state.goal]
        told = _PRICE_LIMIT.sub("", goal.instruction_text).removeprefix("Find me ")
        query = re.sub(r"[\[\]\n]", " ", told.lower()).strip()
        found = self._catalogue.search(query, self._state.seed)
        index = self._catalogue.index_of[goal.product.asin]
        if index not in found:
            return None
        clicks = [pages.NEXT] * (found.index(index) // pages.RESULTS_PER_PAGE) + [goal.product.asin]
        options: dict[str, str] = {}
        for wanted in goal.options:
            for value, name in goal.product.option_names.items():
                pair = isinstance(wanted, tuple)
                if name not in options and (wanted == (name, value) if pair else option_matches(wanted, value)):
                    options[name] = value
                    break
        clicks += [*options.values(), pages.BUY]
        actions = [f"search[{query}]", *(f"click[{text}]" for text in clicks)]
        # Tried out, since a goal may be out of reach: options may share a value, or one may read like a button.
        before = self._state
        self._enter(State(before.goal, before.seed))
        rewards = [self.step(action).reward for action in actions]
        self._enter(before)
        return actions if rewards[-1] == 1.0 else None

    @classmethod
    def tasks(cls, split: str = "train", **kwargs: Any) -> list[str]:
        """Goals 0 to 499 are ``test``, as in the original; all others are ``train``.

        The original trains on human goals from 1500 on and validates on 500 to 1499; agents trained on synthetic goals
        commonly take all from 500 on.

        Args:
            kwargs: the constructor's arguments, or ``root`` for ``data_dir``.

        Raises:
            ValueError: an unknown split.
            TaskError: a data file is missing or broken.
        """
        _one_of("split", split, ("train", "test"))
        count = len(_catalogue(**kwargs).goals)
        name = _shop_name(**kwargs)
        prefix = "" if name == _shop_name() else f"{name}:"
        chosen = range(TEST_GOALS, count) if split == "train" else range(min(TEST_GOALS, count))
        return [f"{prefix}{index}" for index in chosen]

    @classmethod
    def task_file(cls, task: str) -> None:
        return None

    @classmethod
    def check_task(cls, task: str, **kwargs: Any) -> None:
        _index(task, _shop_name(**kwargs))
        check_files(_data_folder(**kwargs), kwargs.get("products", "small"), kwargs.get("goals", "synthetic"))

    @classmethod
    def task_content(cls, task: str, **kwargs: Any) -> bytes:
        goal = _catalogue(**kwargs).goals[int(task.rpartition(":")[2])]
        return f"{goal.product.asin}\0{goal.instruction_text}\0".encode()

    def _enter(self, state: State) -> None:
        self._state = state
        self._page = self._render()
        self._clickables = pages.clickables(self._page)

    def _click(self, text: str) -> State:
        """The state after a click other than the purchase. A button's text decides before an option's that reads alike."""
        state = self._state
        if text == pages.BACK.lower():
            return State(state.goal, state.seed)
        if state.page == "results":
            if text in (pages.NEXT.lower(), pages.PREVIOUS.lower()):
                return state._replace(number=state.number + (1 if text == pages.NEXT.lower() else -1))
            asin = text.upper()
            product = self._catalogue.index_of[asin]
            return state._replace(page="item", product=product, visited=state.visited | {asin})
        if text == pages.PREVIOUS.lower():
            # The original reads the page's name off an address that holds query and options, whose words mislead it.
            address = f"{state.query} {state.options}"
            if "search_results" in address:
                return state._replace(page="results", number=state.number - 1, product=-1, options=())
            if state.page == "item" or "item_page" in address:
                return state._replace(page="results", product=-1, options=())
            return state._replace(page="item")
        if text in _SUB_PAGES:
            return state._replace(page=_SUB_PAGES[text])
        name = self._catalogue.products[state.product].option_names[text]
        return state._replace(options=tuple({**dict(state.options), name: text}.items()))

    def _purchase(self) -> tuple[float, dict[str, float | bool]]:
        state, catalogue = self._state, self._catalogue
        return purchase_reward(
            catalogue.products[state.product],
            catalogue.prices[state.product],
            dict(state.options).values(),
            catalogue.goals[state.goal],
            catalogue.nouns,
        )

    def _render(self) -> pages.Page:
        state, catalogue = self._state, self._catalogue
        instruction = catalogue.goals[state.goal].instruction_text
        if state.page == "search":
            return pages.search_page(instruction)
        if state.page == "results":
            found = catalogue.search(state.query, state.seed)
            end = state.number * pages.RESULTS_PER_PAGE
            shown = [catalogue.products[index] for index in found[end - pages.RESULTS_PER_PAGE : end]]
            return pages.results_page(instruction, shown, state.number, len(found))
        product = catalogue.products[state.product]
        if state.page == "item":
            return pages.item_page(instruction, product, self._show_attributes)
        if state.page == "done":
            return pages.done_page(product.asin, dict(state.options), state.score)
        return pages.sub_page(instruction, product, state.page)

    def _observe(self, reward: float = 0.0, info: dict[str, object] | None = None) -> Observation:
        state = self._state
        if self._rich:
            address = f"{state.query.replace(' ', '+')}/{json.dumps(dict(state.options))}"
            text = pages.rich_text(self._page, address, state.visited)
        else:
            text = pages.plain_text(self._page)
        actions = tuple(f"click[{text}]" for text in self._clickables)
        if state.page == "search":
            actions = ("search[<query>]", *actions)
        goal = self._catalogue.goals[state.goal]
        facts = {"won": state.score == 1.0, "score": state.score, "task_type": goal.product.category, **(info or {})}
        return Observation(text, reward, terminated=state.page == "done", actions=actions, info=facts)


def _parse(action: str) -> tuple[str, str]:
    """Name and lower-case argument; two empty strings when it isn't of the form ``name[argument]``."""
    match = _ACTION.match(action)
    return (match[1], match[2].lower()) if match else ("", "")


def _shop_name(products: str = "small", goals: str = "synthetic", **others: object) -> str:
    return f"{products}-{goals}"


def _index(task: str, shop: str) -> str:
    """The goal's index in ``shop``, of which it must be a task."""
    name, _, index = task.rpartition(":")
    if name not in ("", shop):
        raise TaskError(
            f"{task!r} is no goal of this WebShop, which is {shop}: set products and goals in bpo.env.kwargs as in the "
            "--kwargs that the prompt file was made with"
        )
    return index


def _data_folder(data_dir: str | Path | None = None, root: str | Path | None = None, **others: object) -> Path:
    folder = data_dir or root or os.environ.get("WEBSHOP_DATA")
    if not folder:
        raise TaskError("WebShop's data isn't named: set WEBSHOP_DATA or data_dir to its data folder")
    return Path(folder).expanduser().resolve()


def _catalogue(
    data_dir: str | Path | None = None,
    products: str = "small",
    goals: str = "synthetic",
    search: str = "bm25s",
    index_dir: str | Path | None = None,
    seed: int = 233,
    root: str | Path | None = None,
    **others: object,
) -> Catalogue:
    _one_of("products", products, ("small", "all"))
    _one_of("goals", goals, ("synthetic", "human"))
    _one_of("search", search, ("bm25s", "pyserini"))
    folder = str(_data_folder(data_dir, root))
    return load_catalogue(folder, products, goals, search, str(index_dir) if index_dir else None, seed)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
