"""What ``bpo.dump_dir`` holds: a line for each tree, and one for what the estimator made of it.

trees/<step>-<process>.jsonl     :class:`TreeRecord`
advantages/<step>.jsonl          :class:`AdvantageRecord`
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from verl_bpo.tree.plain import read
from verl_bpo.tree.topology import Tree

TREES, ADVANTAGES = "trees", "advantages"
Key = tuple[int, str, int]
"""(step, uid, session): one tree."""


@dataclass(frozen=True)
class TreeRecord:
    """One tree and where it belongs."""

    step: int
    uid: str
    """The prompt: the first turns of all trees of one (step, uid) are siblings."""
    session: int
    env: str
    task: str
    tree: Tree

    @property
    def key(self) -> Key:
        return self.step, self.uid, self.session

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> TreeRecord:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: a field is missing or unknown, or the tree is none.
        """
        record = read(cls, data, "a dumped tree")
        return replace(record, tree=Tree.from_dict(record.tree))


@dataclass(frozen=True)
class ComparisonRecord:
    """How the advantages of one tree came out. Lists have one entry per turn."""

    head: list[int]
    """First turn of the turn's segment: the turn whose siblings decide."""
    value: list[float | None]
    """The turn's return as a sibling; None when its trajectory was lost."""
    baseline: list[float | None]
    """``value`` of the head less this is the advantage, before any normalisation; None where nothing defines one."""
    compared: list[int]
    """Siblings that the baseline is a mean of."""
    fair: list[bool]
    """The turn may stand in its siblings' baseline."""


@dataclass(frozen=True)
class AdvantageRecord:
    """What the trainer made of one tree. Lists have one entry per turn."""

    step: int
    uid: str
    session: int
    options: dict[str, Any]
    """The estimator's parameters."""
    advantage: list[float]
    weight: list[float]
    valid: list[bool]
    """False where a turn was left out of the loss."""
    comparison: ComparisonRecord | None = None
    """None where the estimator compares no siblings, and in the dumps of release 0.1."""
    estimator: str = "bpo"
    """What ``algorithm.adv_estimator`` named."""

    @property
    def key(self) -> Key:
        return self.step, self.uid, self.session

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> AdvantageRecord:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: a field is missing or unknown, or lists differ in length.
        """
        record = read(cls, data, "dumped advantages")
        lists = [record.advantage, record.weight, record.valid]
        if record.comparison is not None:
            record = replace(record, comparison=read(ComparisonRecord, record.comparison, "a dumped comparison"))
            lists += vars(record.comparison).values()
        if len(lengths := {len(x) for x in lists}) > 1:
            raise ValueError(
                f"dumped advantages have lists of {sorted(lengths)} turns: they must have one entry per turn"
            )
        return record


def dump_tree(folder: str | Path, record: TreeRecord) -> None:
    """Append one tree; several processes may write at once."""
    path = Path(folder) / TREES / f"{record.step:06d}-{os.getpid()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(record.to_dict()) + "\n")


def dump_advantages(folder: str | Path, step: int, records: Iterable[AdvantageRecord]) -> None:
    """Write all advantages of a step."""
    path = Path(folder) / ADVANTAGES / f"{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        file.writelines(json.dumps(record.to_dict()) + "\n" for record in records)


def set_aside(folder: str | Path, after: int) -> None:
    """Move what an earlier try dumped of the steps behind ``after`` to ``aside-<n>``: this run takes those steps again."""
    folder = Path(folder)
    left = [p for kind in (TREES, ADVANTAGES) for p in (folder / kind).glob("*.jsonl") if int(p.name[:6]) > after]
    if not left:
        return
    aside = next(place for n in count(1) if not (place := folder / f"aside-{n}").exists())
    for path in left:
        (aside / path.parent.name).mkdir(parents=True, exist_ok=True)
        path.rename(aside / path.parent.name / path.name)
