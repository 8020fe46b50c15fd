"""Words for Gymnasium's toy games: what their actions are called, what a state is to look at, when it is won."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Words:
    """What a policy is told of a game whose spaces are mere numbers."""

    task: str
    actions: tuple[str, ...]
    """In the order of their numbers."""
    state: Callable[[Any], str]
    """Of the environment as it is now."""
    won: Callable[[float, bool], bool]
    """By the last reward, and whether the game ended by its own rules."""

    def way(self, game: Any) -> list[str] | None:
        """The shortest way to the best end, by the table ``P`` of a game without chance (Gymnasium's ``toy_text``); None
        where chance plays a part, there is no way, or it costs more than it earns."""
        table = getattr(game, "P", None)
        moves = {} if table is None else table[game.s]
        outcomes = [outcome for row in (table or {}).values() for moves in row.values() for outcome in moves]
        if not moves or any(chance < 1 for chance, *_ in outcomes) or getattr(game, "fickle_passenger", False):
            return None
        best = max((reward for _, _, reward, ended in outcomes if ended), default=0)
        ways, waiting = {game.s: (0.0, [])}, deque([game.s])
        while waiting:
            here = waiting.popleft()
            earned, path = ways[here]
            for action, [(_, there, reward, ended)] in table[here].items():
                if ended and reward == best:
                    return [*path, self.actions[action]] if earned + reward > 0 else None
                if not ended and there not in ways:
                    ways[there] = (earned + reward, [*path, self.actions[action]])
                    waiting.append(there)
        return None


def words_of(env: Any) -> Words | None:
    """Those of a game of :data:`TOYS` or a class derived from one; None for any other environment."""
    for base in type(env.unwrapped).__mro__:
        if base.__module__.startswith("gymnasium.envs.toy_text.") and base.__name__ in TOYS:
            return TOYS[base.__name__]
    return None


def _lake(game: Any) -> str:
    row, column = divmod(int(game.s), game.ncol)
    return f"{_grid(game.desc.astype(str).tolist(), row, column)}\nYou are in row {row}, column {column}."


def _cliff(game: Any) -> str:
    row, column = divmod(int(game.s), game.shape[1])
    tiles = [["C" if cliff else "." for cliff in line] for line in game._cliff]
    tiles[-1][-1] = "G"
    return f"{_grid(tiles, row, column)}\nYou are in row {row}, column {column}."


def _taxi(game: Any) -> str:
    row, column, passenger, goal = (int(number) for number in game.decode(game.s))
    names = ("red", "green", "yellow", "blue")
    lines = [list(line) for line in game.desc.astype(str).tolist()]
    lines[1 + row][1 + 2 * column] = "@"
    where = "in the taxi" if passenger == 4 else f"at {names[passenger]} {_place(game.locs[passenger])}"
    return "\n".join(
        [
            *("".join(line) for line in lines),
            f"The taxi is in row {row}, column {column}. The passenger is {where}.",
            f"Goal: {names[goal]} {_place(game.locs[goal])}.",
        ]
    )


def _hand(game: Any) -> str:
    total, dealer, ace = game._get_obs()
    soft = ", with an ace that counts 11" if ace else ""
    return f"Your hand: {', '.join(map(str, game.player))} (sum {total}{soft}). The dealer shows {dealer}."


def _grid(tiles: list[list[str]], row: int, column: int) -> str:
    tiles[row][column] = "@"
    return "\n".join(" ".join(line) for line in tiles)


def _place(place: tuple[int, int]) -> str:
    return f"(row {place[0]}, column {place[1]})"


TOYS = {
    "FrozenLakeEnv": Words(
        "Cross the frozen lake to the goal G without falling into a hole H. You are @.",
        ("left", "down", "right", "up"),
        _lake,
        lambda reward, ended: ended and reward > 0,
    ),
    "CliffWalkingEnv": Words(
        "Walk to the goal G. Who steps on a cliff C falls and starts over. You are @.",
        ("up", "right", "down", "left"),
        _cliff,
        lambda reward, ended: ended,
    ),
    "TaxiEnv": Words(
        "Pick the passenger up and drop them off at the goal. The taxi is @; it can't pass | walls.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        _taxi,
        lambda reward, ended: ended,
    ),
    "BlackjackEnv": Words(
        "Blackjack: come closer to 21 than the dealer without going over.",
        ("stick", "hit"),
        _hand,
        lambda reward, ended: reward > 0,
    ),
}
