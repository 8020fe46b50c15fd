"""Reading what a run left in ``bpo.dump_dir``: its trees and the advantages of their turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from verl_bpo.tree.record import ADVANTAGES, TREES, AdvantageRecord, Key, TreeRecord
from verl_bpo.tree.topology import Tree

Record = TypeVar("Record", TreeRecord, AdvantageRecord)
_KEY = {"step": int, "uid": str, "session": int}
_TYPES = {cls: TypeAdapter(cls) for cls in (TreeRecord, AdvantageRecord)}


@dataclass(frozen=True)
class DumpedTree:
    """One dumped tree. ``advantages`` is None when none were dumped for it."""

    record: TreeRecord
    advantages: AdvantageRecord | None

    @property
    def tree(self) -> Tree:
        return self.record.tree


class Dump:
    """A run's dump folder. Iterating reads the trees from disk, one at a time, so that long runs fit in memory.

    A run that was killed and resumed may have rolled trees that it never learned from. They are left out: of two with one
    key the one written first, and in a step with advantages all that have none.

    Args:
        folder: what ``bpo.dump_dir`` named.
        step: read this training step alone.

    Raises:
        FileNotFoundError: the folder holds no trees (of that step).
    """

    def __init__(self, folder: str | Path, step: int | None = None) -> None:
        self.folder = Path(folder)
        pattern = "*.jsonl" if step is None else f"{step:06d}*.jsonl"
        files = sorted((self.folder / TREES).glob(pattern), key=lambda path: (path.stat().st_mtime, path.name))
        if not files:
            what = "no trees/*.jsonl" if step is None else f"no trees of step {step}"
            raise FileNotFoundError(f"{folder} holds {what}: give the folder that bpo.dump_dir named in the run")
        self.broken: set[str] = set()
        """``file:line`` of every line that could not be read, such as the last one of a run that was killed."""
        self.advantages: dict[Key, AdvantageRecord] = {}
        for path in sorted((self.folder / ADVANTAGES).glob(pattern)):
            for at, _ in self._lines(path):
                record = _record(AdvantageRecord, path, at)
                self.advantages[record.key] = record
        found = [((r["step"], r["uid"], r["session"]), (p, at)) for p in files for at, r in self._lines(p)]
        trained = set(self.advantage_steps)
        latest = {key: place for key, place in found if key in self.advantages or key[0] not in trained}
        self.left_out = len(found) - len(latest)
        """Trees of an interrupted try."""
        self._places = sorted(latest.values(), key=lambda place: (place[0].name, place[1]))

    @property
    def advantage_steps(self) -> list[int]:
        """Training steps whose advantages were dumped, in order."""
        return sorted({step for step, _, _ in self.advantages})

    def __iter__(self) -> Iterator[DumpedTree]:
        for path, at in self._places:
            record = _record(TreeRecord, path, at)
            yield DumpedTree(record, self.advantages.get(record.key))

    def _lines(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        """(where it begins, what it holds) of every line that can be read."""
        at = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    data = json.loads(line)
                except (ValueError, RecursionError):
                    data = None
                if isinstance(data, dict) and all(type(data.get(key)) is kind for key, kind in _KEY.items()):
                    yield at, data
                else:
                    self.broken.add(f"{path.name}:{number}")
                at += len(line)


def _record(cls: type[Record], path: Path, at: int) -> Record:
    """The record in the line that begins at ``at``.

    Raises:
        ValueError: it is none: a field is missing, unknown or of another type.
    """
    with open(path, "rb") as file:
        file.seek(at)
        line = file.readline()
    try:
        _TYPES[cls].validate_json(line, strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        said = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
    else:
        said = ""
    try:
        record = cls.from_dict(json.loads(line))
    except (TypeError, KeyError, AttributeError, IndexError) as error:  # of types that are wrong, which pydantic names
        raise ValueError(f"{path} is no dump of trees: {said or error}") from None
    if said:
        raise ValueError(f"{path} is no dump of trees: {said}")
    return record
