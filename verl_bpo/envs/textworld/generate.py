"""Small TextWorld games for small policies, generated in process.

A game is a house of a few rooms. The objective names one object and the place that it belongs to; the rest has to be
found. Rooms, objects, places and verbs come from one small vocabulary that all games share: what differs is the layout,
where things lie and what is asked for, so that a policy can generalise from train to valid games.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random

from textworld import GameMaker, GameOptions
from textworld.generator.data import LOGIC_DATA_PATH, KnowledgeBase
from textworld.generator.game import Event, Game, GameProgression, Quest
from textworld.generator.inform7 import Inform7Game
from textworld.generator.maker import WorldEntity, WorldRoom
from textworld.generator.world import World
from textworld.logic import GameLogic
from tqdm import tqdm

from verl_bpo.envs.manifest import open_folder, write_whole

ROOMS = ("kitchen", "bedroom", "bathroom", "office", "garden", "cellar")
SUPPORTERS = ("table", "shelf", "desk", "bench")
CONTAINERS = ("box", "chest", "cabinet", "drawer")
OBJECTS = ("apple", "carrot", "cup", "book", "lamp", "ball", "pen", "coin")
FOOD = ("apple", "carrot")
_WAYS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
_BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
_VERSION = 1


@dataclass(frozen=True)
class Level:
    """How hard a game is. ``moves`` is the range of the shortest known solution's length."""

    rooms: int
    supporters: int
    containers: int
    objects: int
    moves: tuple[int, int]
    hidden: bool = False
    """The object lies in a closed container."""
    locked: bool = False
    """The object belongs into a locked container whose key lies somewhere."""
    spoilable: bool = False
    """Putting another thing where the object belongs, or eating it, loses the game."""


LEVELS: dict[int, Level] = {
    0: Level(rooms=1, supporters=3, containers=0, objects=3, moves=(2, 2)),
    1: Level(rooms=2, supporters=2, containers=0, objects=4, moves=(3, 4)),
    2: Level(rooms=3, supporters=2, containers=0, objects=4, moves=(3, 5), spoilable=True),
    3: Level(rooms=2, supporters=2, containers=1, objects=2, moves=(4, 5), hidden=True, spoilable=True),
    4: Level(rooms=4, supporters=2, containers=2, objects=3, moves=(6, 9), hidden=True, locked=True, spoilable=True),
}


def make(out: Path, train: int, valid: int, seed: int, level: int) -> None:
    """What ``verl-bpo make-games --kind textworld`` does."""
    make_textworld_games(out, {"train": train, "valid": valid}, seed=seed, level=level)


def make_textworld_games(
    out_dir: str | Path,
    counts: Mapping[str, int] | None = None,
    seed: int = 0,
    level: int = 1,
    progress: bool = True,
) -> Path:
    """Write ``<out_dir>/<split>/<number>.json`` games; no game is in two splits.

    The same arguments give the same games. Nothing is done when they are there already; a folder made with other
    arguments, or left half made, is an error or completed, never mixed.

    Args:
        counts: games per split; default 64 train and 32 valid.
        level: 0 to 4, see :data:`LEVELS`.

    Returns:
        ``out_dir``.

    Raises:
        ValueError: unknown level, a count below 1, or ``out_dir`` holds games made with other arguments.
    """
    counts = dict(counts or {"train": 64, "valid": 32})
    if level not in LEVELS:
        raise ValueError(f"level={level}: use one of {', '.join(map(str, LEVELS))}")
    if not counts or min(counts.values()) < 1:
        raise ValueError(f"counts={counts}: each split needs at least one game")
    folder = Path(out_dir).expanduser()
    options = {"version": _VERSION, "counts": counts, "seed": seed, "level": level, **asdict(LEVELS[level])}
    options = json.loads(json.dumps(options))
    made = open_folder(folder, options, "*/*.json")
    if made is not None:
        return folder
    random = Random(f"{seed}/{level}")
    seen: set[str] = set()
    games: dict[str, str] = {}
    with tqdm(total=sum(counts.values()), desc="making games", unit="game", disable=not progress) as bar:
        for split, count in counts.items():
            (folder / split).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                game, content = _new_game(random, LEVELS[level], seen)
                name = f"{split}/{number:04d}.json"
                write_whole(folder / name, _serialized(game))
                games[name] = content
                bar.update()
    write_whole(folder / "manifest.json", json.dumps({"options": options, "games": games}, indent=1))
    return folder


def _new_game(random: Random, level: Level, seen: set[str]) -> tuple[Game, str]:
    """A solvable game with content not in ``seen`` (to which it is added), and its content's hash."""
    for _ in range(1000):
        house = _House(random, level)
        walkthrough = house.walkthrough()
        if not level.moves[0] <= len(walkthrough) <= level.moves[1]:
            continue
        game = house.game(walkthrough)
        content = _content(game)
        if content not in seen and _is_won_by(game, walkthrough):
            seen.add(content)
            return game, content
    raise ValueError(f"no further game of this level found after {len(seen)}: ask for fewer games")


class _House:
    """One random house with its task."""

    def __init__(self, random: Random, level: Level) -> None:
        self.random, self.level = random, level
        options = GameOptions()
        options.kb = _knowledge()
        self.maker = GameMaker(options)
        self.rooms = self._connected_rooms()
        self.place: dict[str, WorldRoom] = {}
        """Room of everything, by name."""
        supporters = [self._furniture("s", name) for name in random.sample(SUPPORTERS, level.supporters)]
        containers = [self._furniture("c", name) for name in random.sample(CONTAINERS, level.containers)]
        for container in containers:
            container.add_property("closed")
        names = random.sample(OBJECTS, level.objects)
        self.objects = [self.maker.new(type="f" if name in FOOD else "o", name=name) for name in names]
        self.target = self.objects[0]
        self.key: WorldEntity | None = None
        if level.locked:
            self.goal = containers[0]
            self.goal.remove_property("closed")
            self.goal.add_property("locked")
            self.key = self.maker.new(type="k", name="key")
            self.maker.add_fact("match", self.key, self.goal)
        else:
            self.goal = random.choice(supporters)
        free = [s for s in supporters if s is not self.goal]
        closed = [c for c in containers if c is not self.goal]
        self._lay(self.target, random.choice(closed) if level.hidden else random.choice([*free, *self.rooms]))
        for thing in self.objects[1:] + ([self.key] if self.key else []):
            self._lay(thing, random.choice([*free, *self.rooms, *([] if thing is self.key else closed)]))
        self.start = random.choice(self.rooms)
        self.maker.set_player(self.start)

    def game(self, walkthrough: list[str]) -> Game:
        maker = self.maker
        game = Game(World.from_facts(maker.facts, kb=maker.options.kb), quests=[self._quest()])
        for key in game.infos:
            if key in maker._entities:
                game.infos[key] = maker._entities[key].infos
        relation = "into" if self.goal.type == "c" else "on"
        game.objective = f"Your task: put the {self.target.name} {relation} the {self.goal.name}."
        game.metadata["walkthrough"] = walkthrough
        game.metadata["task_type"] = f"house_{len(self.rooms)}_rooms"
        return game

    def _connected_rooms(self) -> list[WorldRoom]:
        """Rooms on a grid, each joined to one that is there already."""
        spots: dict[tuple[int, int], WorldRoom] = {}
        self.paths: dict[str, dict[str, str]] = {}
        """Room name to the rooms beside it, with the way there."""
        for name in self.random.sample(ROOMS, self.level.rooms):
            room = self.maker.new_room(name)
            self.paths[name] = {}
            if not spots:
                spots[0, 0] = room
                continue
            options = [
                (spot, way, (spot[0] + dx, spot[1] + dy))
                for spot in spots
                for way, (dx, dy) in _WAYS.items()
                if (spot[0] + dx, spot[1] + dy) not in spots
            ]
            spot, way, new_spot = self.random.choice(options)
            beside = spots[spot]
            self.maker.connect(beside.exits[way], room.exits[_BACK[way]])
            self.paths[beside.name][name], self.paths[name][beside.name] = way, _BACK[way]
            spots[new_spot] = room
        return list(spots.values())

    def _furniture(self, kind: str, name: str) -> WorldEntity:
        entity = self.maker.new(type=kind, name=name)
        room = self.random.choice(self.rooms)
        room.add(entity)
        self.place[name] = room
        return entity

    def _lay(self, thing: WorldEntity, where: WorldEntity) -> None:
        where.add(thing)
        self.place[thing.name] = where if where in self.rooms else self.place[where.name]

    def _quest(self) -> Quest:
        relation = "in" if self.goal.type == "c" else "on"
        won = Event(conditions={self.maker.new_fact(relation, self.target, self.goal)})
        lost = []
        if self.level.spoilable:
            lost = [Event(conditions={self.maker.new_fact(relation, o, self.goal)}) for o in self.objects[1:]]
            if self.target.type == "f":
                lost.append(Event(conditions={self.maker.new_fact("eaten", self.target)}))
        return Quest(win_events=[won], fail_events=lost, reward=1)

    def walkthrough(self) -> list[str]:
        """The shorter of the ways to fetch everything and to bring it."""
        errands = [[self.target]] if self.key is None else [[self.target, self.key], [self.key, self.target]]
        return min((self._errand(things) for things in errands), key=len)

    def _errand(self, things: list[WorldEntity]) -> list[str]:
        commands: list[str] = []
        here, opened = self.start.name, set()
        for thing in things:
            commands += self._walk(here, self.place[thing.name].name)
            here = self.place[thing.name].name
            holder = thing.parent
            if holder.type == "c" and holder.name not in opened:
                commands.append(f"open {holder.name}")
                opened.add(holder.name)
            commands.append(f"take {thing.name}" + ("" if holder.type == "r" else f" from {holder.name}"))
        commands += self._walk(here, self.place[self.goal.name].name)
        if self.key is not None:
            commands.append(f"unlock {self.goal.name} with {self.key.name}")
        if self.goal.type == "c":
            return [*commands, f"open {self.goal.name}", f"insert {self.target.name} into {self.goal.name}"]
        return [*commands, f"put {self.target.name} on {self.goal.name}"]

    def _walk(self, here: str, there: str, came: str = "") -> list[str] | None:
        """The only way between two rooms of a tree-shaped house."""
        if here == there:
            return []
        for beside, way in self.paths[here].items():
            if beside != came and (rest := self._walk(beside, there, here)) is not None:
                return [f"go {way}", *rest]
        return None


def _is_won_by(game: Game, commands: list[str]) -> bool:
    """Whether exactly these commands win: no earlier end, none refused."""
    progression, inform7 = GameProgression(game), Inform7Game(game)
    for command in commands:
        actions = progression.valid_actions
        commands_now = inform7.gen_commands_from_actions(actions)
        if progression.done or command not in commands_now:
            return False
        progression.update(actions[commands_now.index(command)])
    return progression.completed


def _content(game: Game) -> str:
    """Hash of what a player could tell apart: facts by name and the objective."""
    inform7 = Inform7Game(game)
    facts = sorted(str(inform7.get_human_readable_fact(fact)) for fact in game.world.facts)
    return hashlib.sha256("\n".join([game.objective, *facts]).encode()).hexdigest()


@cache
def _knowledge() -> KnowledgeBase:
    """TextWorld's rules without ``examine``: it would tell nothing new here and be half of all commands."""
    text = "\n".join(path.read_text() for path in sorted(Path(LOGIC_DATA_PATH).glob("*.twl")))
    kept = (line for line in text.splitlines() if not line.strip().startswith("examine/"))
    return KnowledgeBase(GameLogic.parse("\n".join(kept)), "")


def _serialized(game: Game) -> str:
    """The game as JSON, byte for byte the same in every process (TextWorld lists facts in hash order)."""
    data = game.serialize()
    data["world"].sort(key=json.dumps)
    return json.dumps(data)
