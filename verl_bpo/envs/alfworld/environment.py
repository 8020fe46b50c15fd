"""ALFWorld's text games as an environment with native snapshots.

Texts, admissible commands and rewards are those of ``alfworld``'s own ``AlfredTWEnv``; :mod:`.fast_textworld` makes them
cheap. Get the games with ``alfworld-download``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from tqdm import tqdm

from verl_bpo.envs.alfworld.fast_pddl import FastPddlEnv
from verl_bpo.sandbox.base import Environment, Observation, SandboxError, TaskError

GAME_FILE = "game.tw-pddl"
GENERATED = "generated"
"""Marks games of ``verl-bpo make-games --kind alfworld`` in their paths and files."""

TASK_TYPES = (
    "pick_and_place",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

SPLITS = ("train", "valid_seen", "valid_unseen")

_GOAL = "Your task is to: "


@dataclass(frozen=True)
class _Saved:
    episode: object
    game: dict[str, Any]
    score: float


class AlfworldEnvironment(Environment):
    """One ALFWorld household, played by text commands.

    A task is the path of a ``game.tw-pddl``, absolute or relative to ``$ALFWORLD_DATA``. The reward is 1.0 on the step
    that reaches the goal, which also terminates the episode; there is no step limit here. Games have no chance in them:
    the seed changes nothing.

    ``info`` holds ``won`` (bool), ``task_type`` (one of :data:`TASK_TYPES`, or None where the game doesn't say) and ``goal``
    (the task in words).
    """

    def __init__(self) -> None:
        self._game = FastPddlEnv()
        self._env = AlfredDemangler(self._game, shuffle=False)
        self._episode: object | None = None

    def reset(self, task: str, seed: int = 0) -> Observation:
        self._episode = None
        path = _find_game(task)
        try:
            self._env.load(str(path))
            state = self._env.reset()
        except (Exception, SystemExit) as error:  # parsers of three packages, one of which exits
            raise TaskError(
                f"{path} isn't a readable ALFWorld game ({type(error).__name__}: {error}). Download it again with "
                "`alfworld-download --force`, or leave it out of the prompt file."
            ) from error
        self._episode = object()
        self._score = 0.0
        self._task_type = _task_type(path)
        self._goal = state.feedback.partition(_GOAL)[2].strip()
        self._initial = self.save_state()
        return self._observe()

    def step(self, action: str) -> Observation:
        self._require_episode()
        self._env.step(action)
        before, self._score = self._score, float(self._game.state["score"])
        return self._observe(reward=self._score - before)

    def save_state(self) -> _Saved:
        self._require_episode()
        return _Saved(self._episode, self._game.save(), self._score)

    def load_state(self, state: _Saved) -> None:
        """Go back to ``state``.

        Raises:
            SandboxError: it was saved by another environment or before the last reset.
        """
        self._require_episode()
        if state.episode is not self._episode:
            raise SandboxError("this ALFWorld state was saved in another environment or before the last reset")
        self._game.load_saved(state.game)
        self._score = state.score

    def expert_actions(self) -> list[str] | None:
        """The walkthrough stored with the game in the commands that it understands now.

        None when there is none or when it doesn't win. It is played from the initial state; the present state is kept.
        """
        present = self.save_state()
        self.load_state(self._initial)
        try:
            return self._play(self._game.walkthrough or [])
        finally:
            self.load_state(present)

    def close(self) -> None:
        self._episode = None
        self._game.close()

    @classmethod
    def tasks(cls, split: str = "train", root: str | os.PathLike[str] | None = None, **kwargs: Any) -> list[str]:
        """Solvable games of a split, sorted; the kinds of task that ALFWorld leaves out are left out here too.

        Args:
            split: ``train``, ``valid_seen`` or ``valid_unseen``.
            root: where to look instead of ``$ALFWORLD_DATA``: a folder with ``json_2.1.1``, one with the splits, or one
                without splits, of which every game is listed.

        Returns:
            Paths relative to ``$ALFWORLD_DATA``, or absolute ones when ``root`` is given.

        Raises:
            TaskError: the folder is missing or holds no game.
        """
        if split not in SPLITS:
            raise TaskError(f"ALFWorld has no split {split!r}; it has {', '.join(SPLITS)}")
        base = _data_folder() if root is None else Path(root).expanduser().absolute()
        folder = _split_folder(base, split)
        found = sorted(map(str, folder.rglob(GAME_FILE))) if folder.is_dir() else []
        shown = tqdm(found, desc=f"reading {split}", unit="game", leave=False, disable=None)
        games = [path for path in shown if _is_playable(Path(path))]
        if not games:
            raise TaskError(f"no ALFWorld games of split {split!r} in {folder}: {_HOW_TO_GET}")
        return games if root is not None else [os.path.relpath(game, base) for game in games]

    @classmethod
    def data_source(cls, task: str, split: str) -> str:
        """Metrics are apart for each split, and for generated games."""
        return f"alfworld_{GENERATED}_{split}" if f"trial_{GENERATED}" in task else f"alfworld_{split}"

    @classmethod
    def task_file(cls, task: str) -> Path:
        return _find_game(task)

    def _require_episode(self) -> None:
        if self._episode is None:
            raise SandboxError("no ALFWorld game is open: call reset first")

    def _observe(self, reward: float = 0.0) -> Observation:
        state = self._game.state
        won = bool(state["won"])
        return Observation(
            text=state.feedback,
            reward=reward,
            terminated=bool(state.done),
            actions=tuple(state["admissible_commands"]),
            info={"won": won, "task_type": self._task_type, "goal": self._goal},
        )

    def _play(self, walkthrough: list[str]) -> list[str] | None:
        actions = []
        for command in walkthrough:
            known = self._game.state["admissible_commands"]
            action = next((spelling for spelling in _spellings(command) if spelling in known), None)
            if action is None:
                return None
            actions.append(action)
            if self.step(action).info["won"]:
                return actions
        return None


_HOW_TO_GET = (
    "run `alfworld-download`, or set ALFWORLD_DATA to the folder that holds json_2.1.1; without the official games, make "
    "some with `verl-bpo make-games --kind alfworld`"
)


def _data_folder() -> Path:
    """``$ALFWORLD_DATA``; importing alfworld has set it to its own default if the user did not."""
    return Path(os.path.expandvars(os.environ["ALFWORLD_DATA"])).expanduser().absolute()


def _find_game(task: str) -> Path:
    path = _data_folder() / Path(task).expanduser()
    if not path.is_file():
        raise TaskError(f"no ALFWorld game at {path}: {_HOW_TO_GET}")
    return path


def _split_folder(base: Path, split: str) -> Path:
    for parent in (base / "json_2.1.1", base):
        if any((parent / name).is_dir() for name in SPLITS):
            return parent / split
    return base


def _is_playable(path: Path) -> bool:
    # Movable receptacles and slicing aren't supported by the text games (AlfredTWEnv.collect_game_files).
    if any("movable" in name or "Sliced" in name for name in _own_folders(path)):
        return False
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("solvable") is True
    except (OSError, ValueError):
        return False


def _task_type(path: Path) -> str | None:
    try:
        declared = [json.loads(path.with_name("traj_data.json").read_text(encoding="utf-8"))["task_type"]]
    except (OSError, ValueError, KeyError, TypeError):
        declared = _own_folders(path)
    return next((name for name in TASK_TYPES for text in declared if str(text).startswith(name)), None)


def _own_folders(path: Path) -> tuple[str, ...]:
    """The folders that ALFWorld names after a game: its task's and its trial's. Those above are the user's."""
    return path.parts[-3:-1]


def _spellings(command: str) -> list[str]:
    """The same command in the grammars of ALFWorld: putting down is "put A in/on B" in older ones, "move A to B" since."""
    if command.startswith("put "):
        return [command, command.replace("put ", "move ", 1).replace(" in/on ", " to ", 1)]
    if command.startswith("move "):
        return [command, command.replace("move ", "put ", 1).replace(" to ", " in/on ", 1)]
    return [command]
