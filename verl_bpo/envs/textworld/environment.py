"""TextWorld games (https://github.com/microsoft/TextWorld) played from their JSON files, in process.

TextWorld narrates games through a compiled story file and a Z-machine. Its JSON files hold the whole logic (state,
rules, quests) but no narration, so the text is written here from the facts: short, the same for every game, and free of
the interpreter's state, which makes a snapshot a copy of a few sets.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from textworld.generator.game import EventProgression, Game, GameProgression, QuestProgression
from textworld.generator.inform7 import Inform7Game
from textworld.logic import Action

from verl_bpo.sandbox.base import Environment, Observation, TaskError
from verl_bpo.sandbox.history import digest_of

_WAYS = {"north_of": "north", "south_of": "south", "east_of": "east", "west_of": "west"}
_LOOKS = ("uncut", "sliced", "diced", "chopped", "raw", "roasted", "grilled", "fried", "burned")
"""Properties of TextWorld's cooking games that change a thing's name."""
_LOADING = threading.Lock()
"""TextWorld's parser isn't made for threads."""


class TextworldEnvironment(Environment):
    """One TextWorld game. A task is the path of a ``.json`` file made by TextWorld's generator.

    Args:
        reward: ``win``: 1.0 on the step that wins; ``score``: each step's share of the game's points, 1.0 in all.
    """

    def __init__(self, reward: str = "win") -> None:
        if reward not in ("win", "score"):
            raise ValueError(f"reward={reward!r}: use 'win' or 'score'")
        self._reward = reward

    def reset(self, task: str, seed: int = 0) -> Observation:
        """Open a game. ``seed`` changes nothing: TextWorld's logic has no chance in it."""
        path = Path(task).expanduser()
        try:
            self._rules = _load(str(path), path.stat().st_mtime_ns)
        except OSError as error:
            raise TaskError(f"no game {task} ({error.strerror}): make games with `verl-bpo make-games`") from error
        except Exception as error:
            raise TaskError(f"{task} is no game of TextWorld's generator ({type(error).__name__}: {error})") from error
        self._progression = GameProgression(self._rules.game)
        self._score = self._progression.score
        self._list_commands()
        text = self._rules.describe_room(self._progression)
        if objective := self._rules.game.objective.strip():
            text = f"{objective}\n\n{text}"
        return self._observation(text, 0.0)

    def step(self, action: str) -> Observation:
        if self._progression.done:
            return self._observation("The game is over.", 0.0)
        command = action.strip()
        taken = self._commands.get(command)
        if taken is None:
            return self._observation("You can't do that.", 0.0)
        self._progression.update(taken)
        self._list_commands()
        text = self._rules.narrate(taken, self._progression)
        gained, self._score = self._progression.score - self._score, self._progression.score
        if self._progression.completed:
            text += " You have won!"
        elif self._progression.failed:
            text += " You have lost."
        if self._reward == "win":
            return self._observation(text, float(self._progression.completed))
        return self._observation(text, gained / self._rules.max_score)

    def save_state(self) -> Any:
        return _copy(self._progression), self._commands, self._actions, self._score

    def load_state(self, state: Any) -> None:
        progression, self._commands, self._actions, self._score = state
        self._progression = _copy(progression)

    def digest(self) -> dict[str, str]:
        """The facts, and which of the quests' events have happened: all that the future of a game depends on."""
        events = [e.done for q in self._progression.quest_progressions for e in (*q.win_events, *q.fail_events)]
        facts = "\n".join(sorted(map(str, self._progression.state.facts)))
        return {"facts": digest_of(facts), "quests": digest_of(repr(events))}

    def expert_actions(self) -> list[str] | None:
        walkthrough = self._rules.game.walkthrough
        return list(walkthrough) if walkthrough else None

    @classmethod
    def tasks(cls, split: str = "train", root: str = "data/textworld", **kwargs: Any) -> list[str]:
        """Paths of the games in ``<root>/<split>``, sorted by name."""
        folder = Path(root).expanduser() / split
        games = sorted(str(path) for path in folder.glob("*.json"))
        if not games:
            raise TaskError(f"no games in {folder}: make some with `verl-bpo make-games {root}`")
        return games

    def _list_commands(self) -> None:
        actions = self._progression.valid_actions
        self._commands: dict[str, Action] = {}
        for command, action in zip(self._rules.inform7.gen_commands_from_actions(actions), actions):
            self._commands.setdefault(command, action)
        self._actions = tuple(sorted(self._commands))

    def _observation(self, text: str, reward: float) -> Observation:
        progression = self._progression
        info = {"won": progression.completed, "lost": progression.failed, "score": self._score / self._rules.max_score}
        if task_type := self._rules.game.metadata.get("task_type"):
            info["task_type"] = task_type
        return Observation(text, reward, terminated=progression.done, actions=self._actions, info=info)


class _Rules:
    """What never changes in a game, and the text of what does. Shared by all environments that play it."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.inform7 = Inform7Game(game)
        self.max_score = game.max_score if 0 < game.max_score < float("inf") else 1
        self.names = {key: info.name or key for key, info in game.infos.items()}
        self.the_names = {key: f"the {name}" for key, name in self.names.items()}

    def narrate(self, action: Action, progression: GameProgression) -> str:
        """What the player sees after ``action``."""
        verb = action.name.split("/")[0]
        if verb in ("go", "look"):
            return self.describe_room(progression)
        facts = _Facts(progression)
        if verb == "inventory":
            return f"You carry {_listing(self._names(facts.inventory, facts)) or 'nothing'}."
        command = action.format_command(self.the_names)
        if verb == "examine":
            seen = self._examined(action, facts)
            return f"You look at {command.partition(' ')[2]}. {seen}".strip()
        text = f"You {command}."
        if action.name == "open/c":
            container = next(f.arguments[0].name for f in action.added if f.name == "open")
            return f"{text} {self._inside(container, facts)}"
        return text

    def describe_room(self, progression: GameProgression) -> str:
        facts = _Facts(progression)
        sentences = [f"You are in {self.the_names[facts.room]}."]
        things = [self._thing(key, facts) for key in sorted(facts.at[facts.room], key=lambda k: (self.names[k], k))]
        if things:
            sentences.append(f"You see {_listing(things)}.")
        exits = [f"{way} ({self._door(door, facts)})" if door else way for way, door in sorted(facts.exits.items())]
        if exits:
            sentences.append(f"Exits: {', '.join(exits)}.")
        return " ".join(sentences)

    def _examined(self, action: Action, facts: _Facts) -> str:
        named = (v.name for v in action.variables if f"{{{v.name}}}" in action.command_template)
        key = next(named, None)
        if key is None:
            return ""
        told = (self.game.infos[key].desc or "").strip()
        if told and "[" not in told:  # TextWorld's own descriptions with [conditions] are code for its interpreter
            return told
        if key in facts.state:
            inside = self._inside(key, facts) if facts.state[key] == "open" and key not in facts.doors else ""
            return f"It is {facts.state[key]}. {inside}".strip()
        on_it = _listing(self._names(facts.on[key], facts))
        return f"On it: {on_it}." if on_it else ""

    def _thing(self, key: str, facts: _Facts) -> str:
        state = facts.state.get(key)
        if state is None:
            held, where = facts.on[key], "on"
        else:
            held, where = facts.inside[key] if state == "open" else [], "in"
        held = _listing(self._names(held, facts))
        return self._names([key], facts)[0] + (f" with {held} {where} it" if held else "")

    def _door(self, key: str, facts: _Facts) -> str:
        return f"{facts.state.get(key, '')} {self.names[key]}".strip()

    def _inside(self, container: str, facts: _Facts) -> str:
        held = _listing(self._names(facts.inside[container], facts))
        return f"Inside: {held}." if held else "It is empty."

    def _names(self, keys: Iterable[str], facts: _Facts) -> list[str]:
        """Names with their articles, sorted, so that a text depends on the state alone."""
        names = [
            " ".join(filter(None, [facts.state.get(key), *sorted(facts.looks[key]), self.names[key]]))
            for key in sorted(keys, key=lambda key: (self.names[key], key))
        ]
        return [_article(name) for name in names]


class _Facts:
    """One state's facts, sorted into what the text speaks of. Keys are entity ids."""

    def __init__(self, progression: GameProgression) -> None:
        types = progression.game.kb.types
        self.at: dict[str, list[str]] = _Lists()
        self.inside: dict[str, list[str]] = _Lists()
        self.on: dict[str, list[str]] = _Lists()
        self.inventory: list[str] = []
        self.state: dict[str, str] = {}
        """open, closed or locked, of containers and doors."""
        self.looks: dict[str, list[str]] = _Lists()
        self.doors: set[str] = set()
        ways: dict[tuple[str, str], str] = {}
        links: dict[tuple[str, str], str] = {}
        for fact in progression.state.facts:
            names = [argument.name for argument in fact.arguments]
            if fact.name == "at":
                if fact.arguments[0].type == "P":
                    self.room = names[1]
                else:
                    self.at[names[1]].append(names[0])
            elif fact.name == "in":
                (self.inventory if fact.arguments[1].type == "I" else self.inside[names[1]]).append(names[0])
            elif fact.name == "on":
                self.on[names[1]].append(names[0])
            elif fact.name in ("open", "closed", "locked"):
                self.state[names[0]] = fact.name
                if types.is_descendant_of(fact.arguments[0].type, "d"):
                    self.doors.add(names[0])
            elif fact.name in _LOOKS:
                self.looks[names[0]].append(fact.name)
            elif fact.name in _WAYS:
                ways[names[1], _WAYS[fact.name]] = names[0]
            elif fact.name == "link":
                links[names[0], names[2]] = names[1]
        self.exits = {way: links.get((room, to)) for (room, way), to in ways.items() if room == self.room}
        """Direction to the door in that direction, None where there is none."""


class _Lists(dict):
    def __missing__(self, key: str) -> list[str]:
        return self.setdefault(key, [])


def _article(name: str) -> str:
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _listing(items: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


@lru_cache(maxsize=64)
def _load(path: str, modified_ns: int) -> _Rules:
    with _LOADING:
        return _Rules(Game.load(path))


def _copy(progression: GameProgression) -> GameProgression:
    """A copy that plays on independently.

    ``GameProgression.copy`` would search all valid actions and rebuild all quest trees again. What a step changes in
    place is the fact sets and the quests' dependency trees; everything else is replaced or never changes.
    """
    new = copy.copy(progression)
    new.state = progression.state.copy()
    new.quest_progressions = [_copy_quest(quest) for quest in progression.quest_progressions]
    return new


def _copy_quest(quest: QuestProgression) -> QuestProgression:
    new = copy.copy(quest)
    new.win_events = [_copy_event(event) for event in quest.win_events]
    new.fail_events = [_copy_event(event) for event in quest.fail_events]
    return new


def _copy_event(event: EventProgression) -> EventProgression:
    new = copy.copy(event)
    new._tree = event._tree.copy()
    return new
