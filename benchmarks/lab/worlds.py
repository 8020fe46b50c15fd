"""Worlds of the lab: small tasks whose success and values are known exactly.

A task is passed by finding ``right`` actions, one after the other, within ``turns`` turns. All tasks of a batch are tables, so
one dynamic programme gives V of every state under any policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Family:
    """A family of tasks. A state is (progress, dead or not, turn's phase)."""

    turns: int
    right: int
    """Right actions to find."""
    actions: int
    wrong: Literal["nothing", "trap", "back"] = "nothing"
    """What the one bad action of a state does: nothing, ends all hope, or undoes a step of progress."""
    period: int = 1
    """Only every so-manieth turn's choice matters; the others are distractors."""
    graded: bool = False
    """Whether a failure is paid for the share of its progress, at its end."""
    fresh: bool = False
    """New tasks every update, told apart by features only."""
    tasks: int = 8
    features: int = 8
    """Of one state of a fresh task."""

    @property
    def states(self) -> int:
        return 2 * self.right * self.period

    def state(self, progress: int, dead: bool, turn: int) -> int:
        return (2 * progress + dead) * self.period + turn % self.period


@dataclass(frozen=True)
class Tasks:
    """``tasks`` tasks as tables; a state of -1 is the end of an episode that was won."""

    family: Family
    following: np.ndarray
    """int [tasks, states, actions]."""
    final: np.ndarray
    """[states]: what the limit of turns pays in the state that it ends in."""
    context: np.ndarray
    """[tasks, states, features]: what a network sees of a state."""

    def values(self, policy: np.ndarray) -> np.ndarray:
        """V [tasks, turns + 1, states] of ``policy`` [tasks, states, actions], exactly."""
        family = self.family
        v = np.zeros((len(self.following), family.turns + 1, family.states))
        v[:, -1] = self.final
        ended = self.following < 0
        rows = np.arange(len(self.following))[:, None, None]
        for turn in range(family.turns - 1, -1, -1):
            after = np.where(ended, 1.0, v[rows, turn + 1, self.following])
            v[:, turn] = (policy * after).sum(-1)
        return v

    def success(self, policy: np.ndarray) -> float:
        """Probability that a task is won, mean over the tasks: graded pay doesn't count."""
        ungraded = Tasks(self.family, self.following, np.zeros_like(self.final), self.context)
        return float(ungraded.values(policy)[:, 0, 0].mean())


def sample_tasks(family: Family, rng: np.random.Generator, teacher: np.ndarray) -> Tasks:
    """Tasks of a family. ``teacher`` [actions, features] says what is right where tasks are fresh."""
    shape = (family.tasks, family.right)
    seen = rng.normal(size=(*shape, family.features))
    if family.fresh:
        order = (seen @ teacher.T).argsort(-1)
        right, bad = order[..., -1], order[..., 0]
    else:
        right = rng.integers(family.actions, size=shape)
        bad = (right + rng.integers(1, family.actions, size=shape)) % family.actions
    following = np.zeros((family.tasks, family.states, family.actions), dtype=int)
    context = np.zeros((family.tasks, family.states, family.features + 3))
    final = np.zeros(family.states)
    for progress in range(family.right):
        for dead in (False, True):
            for phase in range(family.period):
                state = family.state(progress, dead, phase)
                following[:, state] = family.state(progress, dead, phase + 1)
                final[state] = progress / family.right if family.graded else 0
                context[:, state, :-3] = seen[:, progress]
                context[:, state, -3:] = progress / family.right, dead, phase == 0
                if dead or phase:
                    continue
                won = progress + 1 == family.right
                after = -1 if won else family.state(progress + 1, False, phase + 1)
                np.put_along_axis(following[:, state], right[:, progress, None], after, 1)
                if family.wrong != "nothing":
                    lost = family.wrong == "trap"
                    after = family.state(progress if lost else max(progress - 1, 0), lost, phase + 1)
                    np.put_along_axis(following[:, state], bad[:, progress, None], after, 1)
    return Tasks(family, following, final, context)
