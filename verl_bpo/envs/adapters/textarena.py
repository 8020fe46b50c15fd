"""TextArena's games for one player: ``textarena:GuessTheNumber-v0``."""

from __future__ import annotations

from typing import Any

from verl_bpo.envs.adapters.seeds import OwnChance, mixed, seed_tasks
from verl_bpo.sandbox.base import Environment, Observation, TaskError
from verl_bpo.sandbox.errors import in_a_line
from verl_bpo.sandbox.loading import EnvironmentUnavailable, subclass_for

ADAPTER = "adapt"
FORM = "ID"
INSTALL = "pip install textarena"


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

        self._own_chance = OwnChance()
        try:
            self._env = self._game = textarena.make(self.env_id, **make)
            while isinstance(self._game, textarena.Wrapper):
                self._game = self._game.env
            self.reset("0")
        except LookupError as error:
            raise ValueError(f"{self.env_id} reads words of NLTK's, which aren't here: {_missing(error)}") from None
        except Exception as error:  # whatever the game has against it
            raise ValueError(f"{self.env_id} can't be played by one player: {in_a_line(error)}") from error

    @classmethod
    def tasks(cls, split: str = "train", **make: Any) -> list[str]:
        return seed_tasks(split)

    def reset(self, task: str, seed: int = 0) -> Observation:
        if not task.isdigit():
            raise TaskError(f"{task!r} is no task: use a seed such as 7")
        number = mixed(int(task), seed)
        with self._own_chance(number):
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


def _missing(error: LookupError) -> str:
    """The command that NLTK tells."""
    return next(
        (line.strip().removeprefix(">>> ") for line in str(error).splitlines() if "nltk.download" in line), "words"
    )
