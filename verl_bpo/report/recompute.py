"""``verl-bpo report recompute``: every dumped advantage, computed again from the dumped trees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_bpo.advantages.bpo import sibling_advantages
from verl_bpo.report.dump import Dump, TreeAdvantages, TreeRecord
from verl_bpo.tree.forest import Forest

TOLERANCE = 1e-6
"""Largest difference that the order of a sum may make."""


@dataclass(frozen=True)
class StepCheck:
    """One training step."""

    step: int
    trees: int
    turns: int
    difference: float
    """Largest absolute difference of an advantage or weight; infinite where one side masks a turn and the other doesn't."""
    problem: str = ""
    """Why the step could not be checked."""

    @property
    def matches(self) -> bool:
        return not self.problem and self.difference <= TOLERANCE


def recompute(folder: str | Path) -> list[StepCheck]:
    """Check every training step of a dump.

    Raises:
        FileNotFoundError: the folder holds no trees or no advantages.
    """
    steps = Dump(folder).advantage_steps
    if not steps:
        raise FileNotFoundError(
            f"{folder} holds no advantages: only a run with algorithm.adv_estimator=bpo writes them"
        )
    return [_check(Dump(folder, step), step) for step in steps]


def _check(dump: Dump, step: int) -> StepCheck:
    wanted = {key: value for key, value in dump.advantages.items() if key[0] == step}
    # A run that was resumed leaves trees of its first try, which no advantage was computed from.
    records = {r.key: r for r in dump if r.key in wanted}
    if dump.broken:
        # A sibling that can't be read would shift every baseline of its prompt.
        return StepCheck(step, len(wanted), 0, np.nan, f"unreadable: {', '.join(sorted(dump.broken))}")
    missing = len(wanted.keys() - records.keys())
    if missing:
        return StepCheck(step, len(wanted), 0, np.nan, f"the dump lacks {missing} of {len(wanted)} trees")
    return StepCheck(step, len(wanted), *_difference(wanted, records))


def _difference(wanted: dict[tuple, TreeAdvantages], records: dict[tuple, TreeRecord]) -> tuple[int, float]:
    # In the trainer's own order, which fixes the order of its sums.
    names = {f"{uid}_{session}": (step, uid, session) for step, uid, session in wanted}
    trees = {name: records[key].tree for name, key in names.items()}
    options = next(iter(wanted.values())).options
    result = sibling_advantages(Forest.of(trees, {name: key[1] for name, key in names.items()}), **options)
    advantage, weight, valid = (
        np.array([x for w in wanted.values() for x in getattr(w, field)]) for field in ("advantage", "weight", "valid")
    )
    if len(valid) != len(result.valid):
        return len(valid), np.inf
    if not len(valid):
        return 0, 0.0
    if (valid != result.valid.numpy()).any():
        return len(valid), np.inf
    pairs = ((advantage, result.advantage), (weight, result.weight))
    return len(valid), float(max(np.abs(dumped - again.numpy()).max() for dumped, again in pairs))


def main(folder: str | Path) -> int:
    """Print one line a step and a verdict.

    Returns:
        0 if every advantage matches, else 1.
    """
    checks = recompute(folder)
    for c in checks:
        said = c.problem or f"{c.turns} turns of {c.trees} trees, max difference {c.difference:.3g}"
        print(f"step {c.step}: {'match' if c.matches else 'NOT CHECKED' if c.problem else 'MISMATCH'}: {said}")
    bad = [c for c in checks if not c.matches]
    turns = sum(c.turns for c in checks)
    if bad:
        print(f"{len(bad)} of {len(checks)} steps do not match: {', '.join(str(c.step) for c in bad)}")
        return 1
    largest = max(c.difference for c in checks)
    print(f"all {turns} advantages of {len(checks)} steps match (max difference {largest:.3g})")
    return 0
