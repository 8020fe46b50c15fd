"""Tasks that are seeds, and random numbers that belong to a branch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TRAIN, _OTHER = (0, 10_000), (1_000_000, 1_000)
"""First seed and number of the tasks of split ``train``, and of any other."""


def seed_tasks(split: str) -> list[str]:
    """The tasks of a split, where a task is its seed."""
    first, count = _TRAIN if split == "train" else _OTHER
    return [str(seed) for seed in range(first, first + count)]


def mixed(number: int, seed: int) -> int:
    """The task's own seed; another one for each further seed of the row."""
    from numpy.random import SeedSequence

    return number if seed == 0 else int(SeedSequence([number, seed]).generate_state(1)[0])


class OwnChance:
    """Python's and numpy's global random numbers, as one branch has them: set for its calls alone, and copied with it."""

    def __init__(self) -> None:
        self._state: tuple[Any, Any] | None = None

    @contextmanager
    def __call__(self, seed: int | None = None) -> Iterator[None]:
        """The process's random numbers are this branch's meanwhile; begun anew with a seed."""
        numpy = sys.modules.get("numpy")
        outside = random.getstate(), numpy and numpy.random.get_state()
        if seed is not None:
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
        elif self._state is not None:
            random.setstate(self._state[0])
            if self._state[1] is not None:
                sys.modules["numpy"].random.set_state(self._state[1])
        try:
            yield
        finally:
            self._state = random.getstate(), numpy and numpy.random.get_state()
            random.setstate(outside[0])
            if numpy:
                numpy.random.set_state(outside[1])
