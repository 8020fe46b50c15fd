"""A run's logged numbers, whichever of verl's loggers wrote them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

RUN_FILE = "run.json"
"""What benchmarks/paper writes beside the metrics of a run."""


@dataclass(frozen=True)
class Log:
    """All metrics of one run: ``frame`` has one row a step (the index) and one column a metric."""

    path: Path
    frame: pd.DataFrame
    record: dict[str, Any] = field(default_factory=dict)
    """``run.json``, where the run has one; ``evaluation`` in it is ``eval/result.json``."""


def find_logs(path: str | Path) -> list[Log]:
    """The runs at ``path``: a file of verl's file logger, a TensorBoard folder or event file, a W&B run (folder or ``.wandb``
    file), a folder of benchmarks/paper's runs, or any folder with one of these in it.

    Raises:
        FileNotFoundError: there is nothing at ``path``, or no run in it.
        ValueError: a file that holds no metrics.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give a run's metrics file or folder")
    if path.is_file():
        return [Log(path, _read_file(path))]
    if (path / RUN_FILE).is_file():
        return [read_run(path)]
    runs = sorted(path.rglob(RUN_FILE))
    if runs:
        return [read_run(file.parent) for file in runs if any(file.parent.glob("metrics-*.jsonl"))]
    wandb = sorted(path.rglob("*.wandb"))
    if wandb:
        return [Log(file.parent, read_wandb(file)) for file in wandb]
    events = sorted({file.parent for file in path.rglob("*tfevents*")})
    if events:
        return [Log(folder, read_tensorboard(folder)) for folder in events]
    raise FileNotFoundError(f"{path} holds no run: neither run.json, W&B nor TensorBoard files")


def _read_file(path: Path) -> pd.DataFrame:
    if path.suffix == ".wandb":
        return read_wandb(path)
    return read_tensorboard(path) if "tfevents" in path.name else read_metrics(path)


def read_metrics(path: str | Path) -> pd.DataFrame:
    """A file of verl's file logger.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no metrics.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give the file that VERL_FILE_LOGGER_PATH named in the run")
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            rows.append({"step": record["step"], **record["data"]})
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a run that was killed, or of one still writing
    if not rows:
        raise ValueError(
            f"{path} holds no metrics: is it a file of verl's file logger (trainer.logger=[console,file])?"
        )
    return _by_step(rows)


def read_run(folder: Path) -> Log:
    """A run of benchmarks/paper: its attempts' logs, each taking over where the last one's checkpoint was.

    Raises:
        ValueError: no attempt logged anything.
    """
    record = json.loads((folder / RUN_FILE).read_text())
    result = folder / "eval/result.json"
    if result.is_file():
        record["evaluation"] = json.loads(result.read_text())
    frame = None
    for file in sorted(folder.glob("metrics-*.jsonl"), key=lambda f: int(f.stem.rsplit("-", 1)[1])):
        try:
            later = read_metrics(file)
        except ValueError:
            continue  # it ended before its first step
        if frame is not None:
            # What the earlier attempt did after the checkpoint was done again; validation before training repeats its step.
            later = pd.concat([frame[frame.index <= later.index.min()], later]).groupby(level=0).last()
        frame = later
    if frame is None:
        raise ValueError(f"{folder} holds no metrics yet")
    return Log(folder, frame, record)


def read_tensorboard(path: str | Path) -> pd.DataFrame:
    """Scalars of an event file, or of all in a folder.

    Raises:
        ImportError: TensorBoard isn't installed.
        ValueError: there are no scalars.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ImportError(f"{path}: reading TensorBoard's files needs it: pip install tensorboard") from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    rows = [{"step": e.step, tag: e.value} for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    if not rows:
        raise ValueError(f"{path} holds no scalars")
    return _by_step(rows)


def read_wandb(path: str | Path) -> pd.DataFrame:
    """History of a W&B run file (``run-ID.wandb``), also one that was never synced.

    Raises:
        ImportError: W&B isn't installed: its package brings the records' format.
        ValueError: there is no history.
    """
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        raise ImportError(f"{path}: reading W&B's files needs it: pip install wandb") from error
    rows = []
    for data in _wandb_records(Path(path)):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        row = {"step": record.history.step.num}
        for item in record.history.item:
            key = item.key or "/".join(item.nested_key)
            value = json.loads(item.value_json)
            if key == "_step":
                row["step"] = value
            elif isinstance(value, (int, float)) and not key.startswith("_"):
                row[key] = value
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no history")
    return _by_step(rows)


BLOCK, HEADER = 32768, 7


def _wandb_records(path: Path) -> Iterator[bytes]:
    """Records of a W&B file, which is LevelDB's log format (https://github.com/google/leveldb/blob/main/doc/log_format.md)
    behind a header of 7 bytes: blocks of 32 KiB; a record is a checksum (4 bytes), a length (2, little-endian), a type (whole,
    first, middle, last) and that many bytes. Ends at what a killed run left unfinished."""
    content, at, parts = path.read_bytes(), HEADER, []
    if content[:4] != b":W&B":
        raise ValueError(f"{path} is no W&B run file")
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK  # the padded end of a block
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        data = content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind not in (1, 2, 3, 4) or len(data) < length:
            return
        parts = [data] if kind in (1, 2) else [*parts, data]
        if kind in (1, 4):
            yield b"".join(parts)


def _by_step(rows: list[dict[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows).apply(pd.to_numeric, errors="coerce")
    return frame.groupby("step").last()  # validation may be logged on a line of its own
