"""``verl-bpo report recompute``: every dumped advantage, computed again from the dumped trees by another way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from verl_bpo.report.dump import Dump
from verl_bpo.report.slow_bpo import SlowAdvantages, slow_advantages
from verl_bpo.report.slow_gigpo import slow_gigpo
from verl_bpo.report.slow_state_graph import slow_state_graph
from verl_bpo.tree.record import AdvantageRecord

SLOW = {"bpo": slow_advantages, "gigpo": slow_gigpo, "state_graph": slow_state_graph}
"""The second definitions, by the name of the estimator."""

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
            f"{folder} holds no advantages: a run with algorithm.adv_estimator={' or '.join(SLOW)} writes such as can be "
            "checked"
        )
    return [_check(Dump(folder, step), step) for step in steps]


def _check(dump: Dump, step: int) -> StepCheck:
    count = len(dump.advantages)
    # A sibling that can't be read would shift every baseline of its prompt.
    if dump.broken:
        return StepCheck(step, count, 0, math.nan, f"unreadable: {', '.join(sorted(dump.broken))}")
    found = list(dump)
    if missing := count - len(found):
        return StepCheck(step, count, 0, math.nan, f"the dump lacks {missing} of {count} trees")
    made = found[0].advantages
    if made.estimator not in SLOW:
        known = ", ".join(SLOW)
        return StepCheck(
            step, count, 0, math.nan, f"of {made.estimator} there is no second definition, only of {known}"
        )
    again = SLOW[made.estimator]([(dumped.record.uid, dumped.tree) for dumped in found], **made.options)
    turns = sum(len(dumped.tree.nodes) for dumped in found)
    return StepCheck(step, count, turns, max(map(_difference, (d.advantages for d in found), again)))


def _difference(dumped: AdvantageRecord, again: SlowAdvantages) -> float:
    if dumped.valid != again.valid:
        return math.inf
    pairs = [*zip(dumped.advantage, again.advantage), *zip(dumped.weight, again.weight)]
    return max((abs(x - y) for x, y in pairs), default=0.0)


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
