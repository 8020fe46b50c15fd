"""Gymnasium's environments: ``gymnasium:FrozenLake-v1``, and one's own by the module or file that registers it.

``gymnasium:my_package:MyEnv-v0`` and ``gymnasium:path/to/file.py:MyEnv-v0`` import the module or the file first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from verl_bpo.envs.adapters.seeds import mixed, seed_tasks
from verl_bpo.envs.adapters.toy_text import Words, words_of
from verl_bpo.sandbox.base import Environment, Observation, SnapshotUnsupported, TaskError
from verl_bpo.sandbox.loading import EnvironmentUnavailable, load_module, subclass_for

ADAPTER = "adapt"
FORM = "ID"
INSTALL = "pip install gymnasium"

_MOST_NUMBERS = 64
"""A larger array makes no text that anybody reads."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def adapt(name: str) -> type[GymnasiumEnvironment]:
    """The class for a registered id, in front of which may stand what registers it.

    Raises:
        ImportError: gymnasium isn't installed.
        EnvironmentUnavailable: nothing has registered that id.
    """
    import gymnasium

    module, _, env_id = name.rpartition(":")
    try:
        if module:
            load_module(module)
        gymnasium.spec(env_id)
    except (gymnasium.error.Error, ImportError) as error:
        raise EnvironmentUnavailable(f"environment 'gymnasium:{name}': {' '.join(str(error).split())}") from error
    return subclass_for(GymnasiumEnvironment, name, env_id=env_id)


class GymnasiumEnvironment(Environment):
    """An environment of Gymnasium. A task is its seed: ``7``, or ``{"seed": 7, "options": {...}}`` with reset's options.

    Copied where that is exact. What rebuilds itself from its arguments when it is copied (``gymnasium.utils.EzPickle``) loses
    its state by that and is refused; ``fork`` and ``replay`` serve it.

    Args:
        make: arguments of ``gymnasium.make``. With ``render_mode="ansi"`` what it renders is shown beside the observation.

    Raises:
        ValueError: a space that no text stands for; names it.
    """

    env_id: str
    """The id that it is registered by."""

    def __init__(self, **make: Any) -> None:
        import gymnasium

        self._mask: Any = None
        self._read_spaces(gymnasium.make(self.env_id, disable_env_checker=True, **make))

    def _read_spaces(self, env: Any) -> None:
        self._env = env
        self._words: Words | None = words_of(self._env)
        self._names = _action_names(self._env.action_space, self._words)
        self._show = self._words.state if self._words else shown(self._env.observation_space)

    @classmethod
    def tasks(cls, split: str = "train", **make: Any) -> list[str]:
        return seed_tasks(split)

    def reset(self, task: str, seed: int = 0) -> Observation:
        number, options = _read(task)
        state, info = self._env.reset(seed=mixed(number, seed), options=options)
        head = self._words.task if self._words else f"{self.env_id}."
        known = f"\nActions: {', '.join(self._names)}." if self._names and not self._words else ""
        return self._observe(state, info, head=f"{head}{known}\n")

    def step(self, action: str) -> Observation:
        chosen, problem = self._read_action(action)
        if problem:
            return Observation(problem, actions=self._actions())
        state, reward, terminated, truncated, info = self._env.step(chosen)
        # A time limit that is reached by the step that ends the game cuts nothing.
        return self._observe(state, info, float(reward), bool(terminated), bool(truncated and not terminated))

    def expert_actions(self) -> list[str] | None:
        """The shortest way, where the words for an environment know one."""
        return self._words.way(self._env.unwrapped) if self._words else None

    def close(self) -> None:
        self._env.close()

    def __getstate__(self) -> dict[str, Any]:
        """For copies."""
        from gymnasium.utils import EzPickle

        layer = self._env
        while True:
            if isinstance(layer, EzPickle):
                raise SnapshotUnsupported(f"a copy of {type(layer).__name__} is made anew and has lost its state")
            if layer is layer.unwrapped:
                return {"env": self._env, "mask": self._mask}
            layer = layer.env

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Functions that show a state are made anew: most can't be pickled, which is several times faster than a deep copy."""
        self._mask = state["mask"]
        self._read_spaces(state["env"])

    def _observe(
        self,
        state: Any,
        info: Mapping[str, Any],
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
        head: str = "",
    ) -> Observation:
        text = head + self._show(self._env.unwrapped if self._words else state)
        if self._env.render_mode == "ansi":
            text += f"\n{_COLOUR.sub('', str(self._env.render())).strip()}"
        self._mask = info.get("action_mask")
        won = {}
        if self._words and (terminated or truncated):
            won["won"] = self._words.won(reward, terminated)
        return Observation(text, reward, terminated, truncated, self._actions(), won)

    def _actions(self) -> tuple[str, ...] | None:
        """Those that the environment's ``action_mask`` lets through, where it has one."""
        if self._names is None or self._mask is None or len(self._mask) != len(self._names):
            return self._names
        return tuple(name for name, allowed in zip(self._names, self._mask) if allowed) or self._names

    def _read_action(self, action: str) -> tuple[Any, str]:
        space = self._env.action_space
        if self._names is None:
            if space.contains(action):
                return action, ""
            return None, f"The environment takes no such text: {space}."
        key = action.strip().lower()
        for number, name in enumerate(self._names):
            if key in (name.lower(), str(space.start + number)):
                return space.start + number, ""
        return None, f"I don't know {action[:80]!r}. Actions: {', '.join(self._names)}."


def _read(task: str) -> tuple[int, dict[str, Any] | None]:
    try:
        read = json.loads(task)
        read = {"seed": read} if isinstance(read, int) else read
        return int(read["seed"]), read.get("options")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TaskError(f'{task!r} is no task: use a seed such as 7, or {{"seed": 7, "options": {{}}}}') from None


def _action_names(space: Any, words: Words | None) -> tuple[str, ...] | None:
    """Names of a Discrete space's actions; None: actions are text."""
    kind = type(space).__name__
    if kind == "Discrete":
        if words and len(words.actions) == space.n:
            return words.actions
        return tuple(str(space.start + number) for number in range(space.n))
    if kind == "Text":
        return None
    raise ValueError(
        f"a policy can't name actions of {space}: wrap the environment so that they are Discrete or Text "
        "(gymnasium.ActionWrapper)"
    )


def shown(space: Any) -> Callable[[Any], str]:
    """How states of an observation space are written.

    Raises:
        ValueError: no text stands for them.
    """
    kind = type(space).__name__
    if kind in ("Discrete", "Text"):
        return str
    if kind in ("Box", "MultiDiscrete", "MultiBinary") and math.prod(space.shape) <= _MOST_NUMBERS:
        return lambda state: json.dumps(_rounded(state.tolist()))
    if kind in ("Tuple", "Sequence") and not getattr(space, "stack", False):
        parts = [shown(part) for part in space.spaces] if kind == "Tuple" else None
        each = None if parts else shown(space.feature_space)
        return lambda state: f"({', '.join(show(x) for show, x in zip(parts or [each] * len(state), state))})"
    if kind == "Dict":
        named = {name: shown(part) for name, part in space.spaces.items()}
        return lambda state: "\n".join(f"{name}: {show(state[name])}" for name, show in named.items())
    raise ValueError(
        f"no text stands for observations of {space}: wrap the environment so that they are Discrete, Text, a Box of at "
        f"most {_MOST_NUMBERS} numbers, or a Tuple or Dict of those (gymnasium.ObservationWrapper)"
    )


def _rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return float(f"{values:.4g}") if isinstance(values, float) else values
