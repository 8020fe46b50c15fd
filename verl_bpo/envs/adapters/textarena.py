"""TextArena's games for one player: ``textarena:GuessTheNumber-v0``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl_bpo.sandbox.base import Environment, Observation, TaskError
from verl_bpo.sandbox.loading import EnvironmentUnavailable, subclass_for

ADAPTER = "adapt"
FORM = "ID"
INSTALL = "pip install textarena"

TASKS, VALID = 10_000, 1_000


def adapt(name: str) -> type[TextArenaEnvironment]:
    """The class for a registered id.

    Raises:
        ImportError: textarena isn't installed.
        EnvironmentUnavailable: nothing is registered by that id.
    """
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        near = sorted(known for known in ENV_REGISTRY if known.split("-")[0].lower() == name.split("-")[0].lower())
        told = f": use one of {', '.join(near)}" if near else ""
        raise EnvironmentUnavailable(f"environment 'textarena:{name}': textarena has no such game{told}")
    return subclass_for(TextArenaEnvironment, name, env_id=name)


class TextArenaEnvironment(Environment):
    """A game of TextArena for one player. A task is a seed.

    The observation is what the game says that it hasn't said before; the policy's own words aren't repeated. The game's final
    reward comes with its last step. Games draw from the random numbers of the whole process: each instance has a state of
    them of its own, which is set for its calls alone and copied with it.

    Args:
        make: arguments of the game's class, ``max_turns`` say.

    Raises:
        ValueError: the game is for more players, or needs what isn't here.
    """

    env_id: str
    """The id that it is registered by."""

    def __init__(self, **make: Any) -> None:
        import textarena

        try:
            self._env = self._game = textarena.make(self.env_id, **make)
            while isinstance(self._game, textarena.Wrapper):
                self._game = self._game.env
            self.reset("0")
        except LookupError as error:
            raise ValueError(f"{self.env_id} reads words of NLTK's, which aren't here: {_missing(error)}") from None
        except Exception as error:  # whatever the game has against it
            problem = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{self.env_id} can't be played by one player: {problem}") from error

    @classmethod
    def tasks(cls, split: str = "train", **make: Any) -> list[str]:
        first, count = (0, TASKS) if split == "train" else (1_000_000, VALID)
        return [str(seed) for seed in range(first, first + count)]

    def reset(self, task: str, seed: int = 0) -> Observation:
        import numpy

        if not task.isdigit():
            raise TaskError(f"{task!r} is no task: use a seed such as 7")
        number = int(task) if seed == 0 else int(numpy.random.SeedSequence([int(task), seed]).generate_state(1)[0])
        self._chance = (random.Random(number).getstate(), numpy.random.RandomState(number).get_state())
        with self._own_chance():
            self._env.reset(num_players=1, seed=number)
            return Observation(self._said())

    def step(self, action: str) -> Observation:
        with self._own_chance():
            done, _ = self._env.step(action=action)
            text = self._said()
            if not done:
                return Observation(text)
            rewards, facts = self._game.close()
        reward, reason = (rewards or {}).get(0, 0.0), facts[0].get("reason")
        if isinstance(reward, str):  # Countdown, Cryptarithm and Slitherlink mix the two up where a move is invalid
            reward, reason = 0.0, reward
        reward, text = float(reward), "\n".join(part for part in (text, reason) if part)
        return Observation(text, reward, terminated=True, info={"won": reward >= 1.0, "score": reward})

    def _said(self) -> str:
        """Without wrappers, which would say everything again."""
        from textarena import ObservationType

        _, messages = self._game.get_observation()
        return "\n".join(str(text) for _, text, kind in messages if kind != ObservationType.PLAYER_ACTION)

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        """The process's random numbers are this game's meanwhile."""
        import numpy

        others = (random.getstate(), numpy.random.get_state())
        _set_chance(self._chance)
        try:
            yield
        finally:
            self._chance = (random.getstate(), numpy.random.get_state())
            _set_chance(others)


def _set_chance(state: tuple[Any, Any]) -> None:
    import numpy

    random.setstate(state[0])
    numpy.random.set_state(state[1])


def _missing(error: LookupError) -> str:
    """The command that NLTK tells."""
    return next(
        (line.strip().removeprefix(">>> ") for line in str(error).splitlines() if "nltk.download" in line), "words"
    )
