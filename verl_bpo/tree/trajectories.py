"""Trajectories out of rows, for verl's own estimators. Pure tensors.

verl's estimators take a row for a trajectory. In ``window`` context a trajectory is a row for each of its turns; joined
again, a turn gets the advantage that it has in ``full`` context, where one row is the whole trajectory. Left apart, RLOO
would count a trajectory once for each of its turns, in its own baseline too, and GAE would end at every turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence


class Trajectories:
    """Which rows make up which trajectory, in order.

    Args:
        keys: one a row, ``{uid}_{session}_{index}``: the rows of a session are one trajectory, in the order of ``index``.
        lengths: response tokens of each row.
    """

    def __init__(self, keys: Sequence[str], lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        rows: dict[str, list[tuple[int, int]]] = {}
        for row, key in enumerate(keys):
            session, index = key.rsplit("_", 1)
            rows.setdefault(session, []).append((int(index), row))
        self.rows = [[row for _, row in sorted(members)] for members in rows.values()]

    @property
    def last(self) -> list[int]:
        """Each trajectory's last row, which stands for it where a row has one entry."""
        return [members[-1] for members in self.rows]

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """[rows, tokens] -> [trajectories, tokens]: the rows of each trajectory one behind the other, 0 behind the last."""
        joined = [torch.cat([values[row, : self.lengths[row]] for row in members]) for members in self.rows]
        return pad_sequence(joined, batch_first=True)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """[trajectories, tokens] -> the tokens of each row, in the order of ``keys``."""
        out: list[torch.Tensor] = [values[0, :0]] * len(self.lengths)
        for trajectory, members in zip(values, self.rows):
            sizes = [self.lengths[row] for row in members]
            for row, tokens in zip(members, trajectory[: sum(sizes)].split(sizes)):
                out[row] = tokens
        return out
