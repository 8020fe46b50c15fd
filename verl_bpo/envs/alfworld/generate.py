"""Games in ALFWorld's format, for those who don't have the official ones.

Made from what the ``alfworld`` package ships: its rooms (which furniture stands where, which things belong to a room), its
tables of what fits where and what can be cleaned, heated or cooled, its domain, grammar and goals. What the official games
have from a simulator, where each thing lies at the start, is drawn at random here, and furniture whose position the package
doesn't tell stands at a random free spot. Results on these games are results on generated games: their folders, their
files, their manifest and their metrics say so.

A game is solvable by construction: its walkthrough fetches a thing from where it was put.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from types import SimpleNamespace

import alfworld.gen
import numpy as np
from alfworld.agents.utils.misc import Demangler
from alfworld.gen import constants
from alfworld.gen.goal_library import gdict
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
from tqdm import tqdm

from verl_bpo.envs.alfworld.environment import GENERATED, SPLITS
from verl_bpo.envs.manifest import open_folder, write_whole

LAYOUTS = Path(alfworld.gen.__file__).parent / "layouts"

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""The six task types that ALFWorld's text games have; each split cycles through them."""

ROOMS = {"train": "TRAIN", "valid_seen": "TRAIN", "valid_unseen": "TEST"}
"""Which of the package's room lists a split draws from: ``valid_unseen`` has rooms of its own, as in ALFWorld."""

TOOLS = {
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin", "clean"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave", "heat"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge", "cool"),
}
LAMPS = ("DeskLamp", "FloorLamp")
LAMP_STANDS = ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable", "DiningTable", "CounterTop")
COUNTS = {"StoveBurner": 4, "HandTowelHolder": 2}
"""How many of a receptacle there are where the package tells only that there are some; 1 of the others."""
LEVELS = {0: "few things a room", 1: "whole rooms"}
FEW_RECEPTACLES, FEW_THINGS = 7, 6
"""Level 0: how many receptacles, and how many kinds of portable things, a room keeps."""
_VERSION = 1

_SLICED = "Sliced"
_FITS = {
    holder: frozenset(thing for thing in things if not thing.endswith(_SLICED))
    for holder, things in constants.VAL_RECEPTACLE_OBJECTS.items()
    if holder not in constants.MOVABLE_RECEPTACLES_SET
}
"""What can lie in or on what, without sliced things, which the text games leave out."""
_PORTABLE = frozenset().union(*_FITS.values())


@dataclass(frozen=True)
class _Room:
    """A room of the package. Spots are (x, z, rotation, horizon) of an agent, in quarter metres and degrees."""

    number: int
    things: tuple[str, ...]
    receptacles: tuple[tuple[str, str, str], ...]
    """(identity, type, location) of those whose position is known."""
    spots: tuple[str, ...]
    """Locations that stay free for the others."""

    @property
    def receptacle_types(self) -> frozenset[str]:
        return frozenset(kind for _, kind, _ in self.receptacles) | (frozenset(self.things) & _FITS.keys())


def make(out: Path, train: int, valid: int, seed: int, level: int) -> None:
    """What ``verl-bpo make-games --kind alfworld`` does; ``valid`` games in each of the held-out splits."""
    counts = {"train": train, "valid_seen": valid, "valid_unseen": valid}
    make_alfworld_games(out, counts, seed=seed, level=level)
    print(f"{out}: generated games, not ALFWorld's own; play them with ALFWORLD_DATA={out}")


def make_alfworld_games(
    out_dir: str | Path,
    counts: Mapping[str, int] | None = None,
    seed: int = 0,
    progress: bool = True,
    level: int = 1,
) -> Path:
    """Write ``<out_dir>/json_2.1.1/<split>/<task>/<trial>/game.tw-pddl``, so that ``out_dir`` serves as ``$ALFWORLD_DATA``.

    The same arguments give the same files. Nothing is done when they are there already.

    Args:
        counts: games of each of ALFWorld's splits; default 120 train, 24 valid_seen and 24 valid_unseen.
        level: 1 furnishes a room as the package does. 0 keeps :data:`FEW_RECEPTACLES` pieces and :data:`FEW_THINGS` kinds of
            things of it, for policies that are too small for whole rooms.

    Returns:
        ``out_dir``.

    Raises:
        ValueError: an unknown split or level, a count below 1, or ``out_dir`` holds games made with other arguments.
    """
    counts = dict(counts or {"train": 120, "valid_seen": 24, "valid_unseen": 24})
    for split in counts:
        if split not in SPLITS:
            raise ValueError(f"ALFWorld has no split {split!r}; it has {', '.join(SPLITS)}")
    if not counts or min(counts.values()) < 1:
        raise ValueError(f"counts={counts}: each split needs at least one game")
    if level not in LEVELS:
        levels = " and ".join(f"{number} ({what})" for number, what in LEVELS.items())
        raise ValueError(f"level={level}: ALFWorld-format games have {levels}")
    folder = Path(out_dir).expanduser()
    options = {"kind": "alfworld", "version": _VERSION, "counts": counts, "seed": seed}
    if level == 0:
        options["level"] = level
    made = open_folder(folder, options, "json_2.1.1/*/*/*/game.tw-pddl")
    if made is not None:
        return folder
    games: dict[str, str] = {}
    seen: set[str] = set()
    with tqdm(total=sum(counts.values()), desc="making games", unit="game", disable=not progress) as bar:
        for split, count in counts.items():
            for number in range(count):
                game = _new_game(
                    Random(f"{seed}/{split}/{number}"), split, KINDS[number % len(KINDS)], seen, level == 0
                )
                place = folder / "json_2.1.1" / split / game.name / f"trial_{GENERATED}_{seed}_{number:05d}"
                place.mkdir(parents=True, exist_ok=True)
                text = game.text(seed)
                write_whole(place / "traj_data.json", json.dumps(game.record(), indent=1))
                write_whole(place / "game.tw-pddl", text)
                games[str((place / "game.tw-pddl").relative_to(folder))] = hashlib.sha256(text.encode()).hexdigest()
                bar.update()
    write_whole(folder / "manifest.json", json.dumps({"options": options, "games": games}, indent=1))
    return folder


def _new_game(random: Random, split: str, kind: str, seen: set[str], sparse: bool = False) -> _Game:
    """A game whose problem isn't in ``seen``, to which it is added."""
    rooms = [room for room in _rooms(ROOMS[split]) if _tasks(room, kind)]
    for _ in range(100):
        room = random.choice(rooms)
        game = _Game(random, room, kind, *random.choice(_tasks(room, kind)), sparse)
        if game.problem not in seen:
            seen.add(game.problem)
            return game
    raise ValueError(f"no further game of type {kind} found after {len(seen)}: ask for fewer games")


@lru_cache(maxsize=2)
def _rooms(which: str) -> tuple[_Room, ...]:
    numbers = constants.TRAIN_SCENE_NUMBERS if which == "TRAIN" else constants.TEST_SCENE_NUMBERS
    return tuple(_read_room(number) for number in numbers)


def _read_room(number: int) -> _Room:
    stem = f"{LAYOUTS}/FloorPlan{number}"
    things = json.loads(Path(f"{stem}-objects.json").read_text())
    positions = json.loads(Path(f"{stem}-openable.json").read_text())
    receptacles = []
    for identity, (x, z, rotation, horizon) in sorted(positions.items()):
        kind = identity.rsplit("|", 1)[-1] if identity.endswith("Basin") else identity.split("|")[0]
        if kind in _FITS:
            receptacles.append((identity, kind, _location(x, z, rotation, horizon)))
    taken = {location.rsplit("|", 2)[0] for *_, location in receptacles}
    free = sorted({(float(x), float(z)) for x, z in np.load(f"{stem}-layout.npy")})
    spots = [_location(x, z, 0, 30) for x, z in free]
    spots = [spot for spot in spots if spot.rsplit("|", 2)[0] not in taken]
    return _Room(number, tuple(sorted(things)), tuple(receptacles), tuple(spots))


def _location(x: float, z: float, rotation: float, horizon: float) -> str:
    return f"loc|{round(4 * x)}|{round(4 * z)}|{round(rotation / 90)}|{round(horizon)}"


@lru_cache(maxsize=1024)
def _tasks(room: _Room, kind: str) -> tuple[tuple[str, str], ...]:
    """(thing, receptacle) that a task of this type in this room may be about; the receptacle is a lamp for looking."""
    room_type = next(name for name, numbers in constants.SCENE_TYPE.items() if room.number in numbers)
    if room_type not in constants.GOALS_VALID[kind]:
        return ()
    holders = room.receptacle_types
    things = [thing for thing in room.things if thing in _PORTABLE and any(thing in _FITS[h] for h in holders)]
    if kind == "look_at_obj_in_light":
        lamp = next((lamp for lamp in LAMPS if lamp in room.things and holders & set(LAMP_STANDS)), None)
        return tuple((thing, lamp) for thing in things) if lamp else ()
    tool = None
    if kind in TOOLS:
        able, tool, _ = TOOLS[kind]
        things = [thing for thing in things if thing in constants.VAL_ACTION_OBJECTS[able]] if tool in holders else []
    pairs = ((thing, holder) for thing in things for holder in sorted(holders - {tool}) if thing in _FITS[holder])
    # The thing must be able to lie somewhere else at first.
    return tuple((t, h) for t, h in pairs if any(t in _FITS[other] for other in holders - {h}))


class _Game:
    """One game. All draws are made here, in a fixed order.

    Args:
        thing: type of what the task is about.
        target: type of the receptacle, or of the lamp, that it is about.
        sparse: keep only some of the room's furniture and things.
    """

    def __init__(self, random: Random, room: _Room, kind: str, thing: str, target: str, sparse: bool = False) -> None:
        self.room, self.kind, self.thing, self.target = room, kind, thing, target
        self.holders: dict[str, str] = {}
        """Receptacle to its type."""
        self.things: dict[str, str] = {}
        """Thing to its type."""
        self.at: dict[str, str] = {}
        """Receptacle or thing to its location."""
        self.inside: dict[str, str] = {}
        """Thing to the receptacle that it lies in or on."""
        self.spots = random.sample(room.spots, len(room.spots))
        self.start = self.spots.pop()
        self._furnish(random)
        contents = room.things
        if sparse:
            self._clear_out(random)
            contents = self._few_things(random)
        self._lay_out(random, contents)
        self.template = random.choice(gdict[kind]["templates"])
        self.names = self._names()
        self.walkthrough = self._walkthrough(random)

    @property
    def name(self) -> str:
        """As ALFWorld names a task's folder."""
        return f"{self.kind}-{self.thing}-None-{self.target}-{self.room.number}"

    def _furnish(self, random: Random) -> None:
        for identity, kind, location in self.room.receptacles:
            self.holders[identity], self.at[identity] = kind, location
        placed = set(self.holders.values())
        for kind in self.room.things:
            if kind in _FITS and kind not in placed:
                for _ in range(COUNTS.get(kind, 1)):
                    self._put_up(random, kind, self.holders)

    def _put_up(self, random: Random, kind: str, where: dict[str, str]) -> str:
        """A piece of furniture at a free spot (or, once there are none, beside another piece)."""
        location = self.spots.pop() if self.spots else random.choice(sorted(set(self.at.values())))
        return self._add(random, kind, location, where)

    def _add(self, random: Random, kind: str, location: str, where: dict[str, str]) -> str:
        x, z = (int(number) / 4 for number in location.split("|")[1:3])
        while True:
            offset, height = random.uniform(-0.6, 0.6), random.uniform(0.1, 1.6)
            identity = f"{kind}|{x + offset:+06.2f}|{height:+06.2f}|{z + random.uniform(-0.6, 0.6):+06.2f}"
            if identity not in self.at:
                where[identity], self.at[identity] = kind, location
                return identity

    def _clear_out(self, random: Random) -> None:
        """Keep the furniture that the task can't do without, and other pieces up to :data:`FEW_RECEPTACLES`."""
        looks = self.kind == "look_at_obj_in_light"
        needed = [lambda holder: holder in LAMP_STANDS if looks else holder == self.target]
        if self.kind in TOOLS:
            needed.append(lambda holder: holder == TOOLS[self.kind][1])
        needed.append(lambda holder: self.thing in _FITS[holder] and holder != self.target)
        kept: list[str] = []
        for fits in needed:
            if not any(fits(self.holders[identity]) for identity in kept):
                kept.append(random.choice([identity for identity, holder in self.holders.items() if fits(holder)]))
        others = [identity for identity in self.holders if identity not in kept]
        kept += random.sample(others, min(len(others), FEW_RECEPTACLES - len(kept)))
        self.holders = {identity: kind for identity, kind in self.holders.items() if identity in kept}
        self.at = {identity: location for identity, location in self.at.items() if identity in kept}

    def _few_things(self, random: Random) -> list[str]:
        """Types of what lies in the room: the task's, others up to :data:`FEW_THINGS`, and a lamp that the task is about."""
        others = [kind for kind in self.room.things if kind in _PORTABLE and kind != self.thing]
        few = {self.thing, *random.sample(others, min(len(others), FEW_THINGS - 1))}
        return [kind for kind in self.room.things if kind in few or kind == self.target in LAMPS]

    def _lay_out(self, random: Random, contents: Sequence[str]) -> None:
        """Put things into receptacles that can hold them; those of the task's type not where they belong."""
        for kind in contents:
            if kind in _PORTABLE:
                count = random.randint(1, constants.MAX_NUM_OF_OBJ_INSTANCES)
                if kind == self.thing and self.kind == "pick_two_obj_and_place":
                    count = max(2, count)
                for _ in range(count):
                    self._lay(random, kind)
            elif kind in LAMPS:
                stands = [identity for identity, holder in self.holders.items() if holder in LAMP_STANDS]
                if stands:
                    self._place(random, kind, random.choice(stands))
            elif kind not in _FITS:  # a window, a chair, a light switch: it stands there and can only be seen
                self._put_up(random, kind, self.things)

    def _lay(self, random: Random, kind: str) -> None:
        target = self.target if kind == self.thing else None
        free = [identity for identity, holder in self.holders.items() if kind in _FITS[holder] and holder != target]
        if free:
            self._place(random, kind, random.choice(free))

    def _place(self, random: Random, kind: str, holder: str) -> None:
        identity = self._add(random, kind, self.at[holder], self.things)
        self.inside[identity] = holder

    def _names(self) -> dict[str, str]:
        """What ALFWorld's own wrapper will call everything: it numbers the planner's lower-case identities."""
        identities = [*self.holders, *self.things]
        planner = {identity: _mangle(identity).lower() for identity in identities}
        demangler = Demangler(game_infos={name: SimpleNamespace(id=name) for name in planner.values()})
        return {identity: demangler.demangle_alfred_name(name) for identity, name in planner.items()}

    def _walkthrough(self, random: Random) -> list[str]:
        mine = [identity for identity, kind in self.things.items() if kind == self.thing]
        walk = _Walk(self)
        if self.kind == "look_at_obj_in_light":
            lamp = next(identity for identity, kind in self.things.items() if kind == self.target)
            walk.fetch(mine[0])
            walk.go(self.inside[lamp])
            return [*walk.commands, f"use {self.names[lamp]}"]
        goal = random.choice([identity for identity, kind in self.holders.items() if kind == self.target])
        for thing in mine[: 2 if self.kind == "pick_two_obj_and_place" else 1]:
            walk.fetch(thing)
            if self.kind in TOOLS:
                _, tool, verb = TOOLS[self.kind]
                where = next(identity for identity, kind in self.holders.items() if kind == tool)
                walk.go(where)
                walk.commands.append(f"{verb} {self.names[thing]} with {self.names[where]}")
            walk.open(goal)
            walk.commands.append(f"move {self.names[thing]} to {self.names[goal]}")
        return walk.commands

    @property
    def problem(self) -> str:
        """The game in PDDL, in the order of ALFWorld's own files."""
        locations = sorted({self.start, *self.at.values()})
        things, holders = sorted(self.things), sorted(self.holders)
        declared = [
            ("agent", ["agent1"]),
            ("object", things),
            ("otype", sorted({f"{kind}Type" for kind in [*self.things.values(), *_PORTABLE]})),
            ("rtype", sorted({f"{kind}Type" for kind in self.holders.values()})),
            ("receptacle", holders),
            ("location", locations),
        ]
        objects = "\n".join(f"    {_mangle(name)} - {kind}" for kind, names in declared for name in names)
        facts = "\n".join(f"    ({name} {' '.join(map(_mangle, arguments))})" for name, *arguments in self._facts())
        goal = gdict[self.kind]["pddl"].format(obj=self.thing, recep=self.target, toggle=self.target)
        goal = "\n".join(line for line in goal.replace("#", "-").splitlines() if line.strip())
        # The library's goals differ in whether they close the problem.
        goal += ")" * (goal.count("(") - goal.count(")") + 1) if goal.count("(") >= goal.count(")") else ""
        name = re.sub(r"\W", "_", self.name)
        return f"(define (problem {name})\n(:domain alfred)\n(:objects\n{objects}\n)\n(:init\n{facts}\n)\n{goal}\n"

    def _facts(self) -> Iterator[Sequence[str]]:
        things, holders = sorted(self.things), sorted(self.holders)
        for holder in holders:
            yield "receptacleType", holder, f"{self.holders[holder]}Type"
        for thing in things:
            yield "objectType", thing, f"{self.things[thing]}Type"
        for kind in sorted(set(self.holders.values())):
            for thing in sorted(_FITS[kind]):
                yield "canContain", f"{kind}Type", f"{thing}Type"
        for thing in things:
            kind = self.things[thing]
            if kind in _PORTABLE:
                yield "pickupable", thing
            if kind in constants.MOVABLE_RECEPTACLES_SET:
                yield "isReceptacleObject", thing
            for able, kinds in constants.VAL_ACTION_OBJECTS.items():
                if kind in kinds:
                    yield able.lower(), thing
        for holder in holders:
            if self.holders[holder] in constants.OPENABLE_CLASS_SET:
                yield "openable", holder
        yield "atLocation", "agent1", self.start
        for thing in things:
            if thing in self.inside:
                yield "inReceptacle", thing, self.inside[thing]
        for holder in holders:
            yield "receptacleAtLocation", holder, self.at[holder]
        for thing in things:
            yield "objectAtLocation", thing, self.at[thing]

    def text(self, seed: int) -> str:
        """Content of ``game.tw-pddl``."""
        words = {"obj": self.thing, "recep": self.target, "toggle": self.target}
        task = self.template.format(**{key: word.lower() for key, word in words.items()})
        game = {
            "pddl_domain": _read(ALFRED_PDDL_PATH),
            "grammar": _read(ALFRED_TWL2_PATH).replace("UNKNOWN GOAL", task),
            "pddl_problem": self.problem,
            "walkthrough": self.walkthrough,
            "solvable": True,
            GENERATED: {"by": "verl_bpo", "version": _VERSION, "seed": seed},
        }
        return json.dumps(game)

    def record(self) -> dict[str, object]:
        """Content of ``traj_data.json``, as far as the text games read it."""
        looks = self.kind == "look_at_obj_in_light"
        return {
            "task_type": self.kind,
            GENERATED: True,
            "scene": {"floor_plan": f"FloorPlan{self.room.number}", "scene_num": self.room.number},
            "pddl_params": {
                "object_target": self.thing,
                "parent_target": "" if looks else self.target,
                "toggle_target": self.target if looks else "",
                "mrecep_target": "",
                "object_sliced": False,
            },
        }


class _Walk:
    """The commands of a walkthrough, and what they have done so far."""

    def __init__(self, game: _Game) -> None:
        self.game, self.here, self.opened = game, game.start, set()
        self.commands: list[str] = []

    def go(self, holder: str) -> None:
        """Go there, unless it is within reach already: then ALFWorld has no such command."""
        if self.game.at[holder] != self.here:
            self.commands.append(f"go to {self.game.names[holder]}")
            self.here = self.game.at[holder]

    def open(self, holder: str) -> None:
        self.go(holder)
        if self.game.holders[holder] in constants.OPENABLE_CLASS_SET and holder not in self.opened:
            self.commands.append(f"open {self.game.names[holder]}")
            self.opened.add(holder)

    def fetch(self, thing: str) -> None:
        holder = self.game.inside[thing]
        self.open(holder)
        self.commands.append(f"take {self.game.names[thing]} from {self.game.names[holder]}")


@lru_cache(maxsize=2)
def _read(path: str) -> str:
    return Path(path).read_text()


def _mangle(identity: str) -> str:
    """An identity in the letters that PDDL allows, as ALFWorld writes it."""
    for sign, word in (("|", "_bar_"), ("+", "_plus_"), ("-", "_minus_"), (".", "_dot_"), (",", "_comma_")):
        identity = identity.replace(sign, word)
    return identity
