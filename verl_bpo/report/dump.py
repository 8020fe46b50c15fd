"""Reading what a run left in ``bpo.dump_dir``: its trees and the advantages of their turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_bpo.tree.topology import Tree

Key = tuple[int, str, int]
"""(step, uid, session): one tree."""


@dataclass(frozen=True)
class TreeAdvantages:
    """What the trainer made of one tree. Lists have one entry per turn."""

    options: dict[str, str]
    """The values of ``bpo.advantage`` they were computed with."""
    advantage: list[float]
    weight: list[float]
    valid: list[bool]
    """False where a turn was left out of the loss."""


@dataclass(frozen=True)
class TreeRecord:
    """One dumped tree. ``advantages`` is None when none were dumped for it."""

    step: int
    uid: str
    """The prompt: the first turns of all trees of one (step, uid) are siblings."""
    session: int
    env: str
    task: str
    tree: Tree
    advantages: TreeAdvantages | None

    @property
    def key(self) -> Key:
        return self.step, self.uid, self.session


class Dump:
    """A run's dump folder. Iterating reads the trees from disk, one at a time, so that long runs fit in memory.

    Args:
        folder: what ``bpo.dump_dir`` named.
        step: read this training step alone.

    Raises:
        FileNotFoundError: the folder holds no trees (of that step).
    """

    def __init__(self, folder: str | Path, step: int | None = None) -> None:
        self.folder = Path(folder)
        pattern = "*.jsonl" if step is None else f"{step:06d}*.jsonl"
        self._files = sorted((self.folder / "trees").glob(pattern))
        if not self._files:
            what = "no trees/*.jsonl" if step is None else f"no trees of step {step}"
            raise FileNotFoundError(f"{folder} holds {what}: give the folder that bpo.dump_dir named in the run")
        self.broken: set[str] = set()
        """``file:line`` of every line that could not be read, such as the last one of a run that was killed."""
        self.advantages: dict[Key, TreeAdvantages] = {}
        for path in sorted((self.folder / "advantages").glob(pattern)):
            for r in self._lines(path):
                self.advantages[r["step"], r["uid"], r["session"]] = TreeAdvantages(
                    dict(r["options"]), r["advantage"], r["weight"], [bool(v) for v in r["valid"]]
                )

    @property
    def advantage_steps(self) -> list[int]:
        """Training steps whose advantages were dumped, in order."""
        return sorted({step for step, _, _ in self.advantages})

    def __iter__(self) -> Iterator[TreeRecord]:
        for path in self._files:
            for r in self._lines(path):
                key = (r["step"], r["uid"], r["session"])
                yield TreeRecord(*key, r["env"], r["task"], Tree.from_dict(r["tree"]), self.advantages.get(key))

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(line)
                except ValueError:
                    self.broken.add(f"{path.name}:{number}")
                    continue
                yield record
