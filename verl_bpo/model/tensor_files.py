"""Files of tensors, read as data: nothing in them runs, and one that is cut is told by its name before anything is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from verl_bpo.sandbox.errors import in_a_line

CUT = "it is cut short or no such file: take another checkpoint, or copy it again"


@contextmanager
def _known_names() -> Iterator[None]:
    """While it is open torch takes, beside its own, what verl saves: sharded tensors and numpy's random state."""
    import numpy
    import torch.distributed.tensor  # noqa: F401  (importing it makes its classes known)

    multiarray = "numpy._core.multiarray" if hasattr(numpy, "_core") else "numpy.core.multiarray"
    reconstruct = importlib.import_module(multiarray)._reconstruct
    kinds = [type(numpy.dtype(kind)) for kind in ("uint32", "int64", "float64")]
    # numpy 2 reads what numpy 1 wrote, under its older name
    names = [(reconstruct, f"numpy.{room}.multiarray._reconstruct") for room in ("core", "_core")]
    with safe_globals([numpy.ndarray, numpy.dtype, *kinds, *names]):
        yield


def check_tensors(file: Path) -> None:
    """See that a file which ``torch.save`` wrote is whole and holds tensors and plain values alone. Loads nothing.

    Raises:
        ValueError: it isn't; the message names the file, and what it would run.
    """
    try:
        with _known_names():
            names = get_unsafe_globals_in_checkpoint(file)
    except Exception as error:  # torch's reader raises anything on a damaged file
        raise ValueError(f"{file} can't be read ({in_a_line(error, 160)}): {CUT}") from None
    if names:
        raise ValueError(
            f"{file} is refused: loading it would run {', '.join(sorted(names)[:4])}, and a checkpoint holds tensors and "
            f"plain values alone"
        )


def load_tensors(file: Path) -> Any:
    """What a file holds, on the CPU.

    Raises:
        ValueError: see :func:`check_tensors`.
    """
    check_tensors(file)
    try:
        with _known_names():
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{file} can't be loaded ({in_a_line(error, 160)}): {CUT}") from None


def check_safetensors(file: Path) -> None:
    """See that a safetensors file is as long as its header says.

    Raises:
        ValueError: it isn't.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} can't be read ({in_a_line(error, 160)}): {CUT}") from None


def check_files(folder: Path) -> list[str]:
    """What is wrong with the files of tensors in a folder and those below it, one line a file; empty: nothing."""
    wrong = []
    for pattern, check in (("*.pt", check_tensors), ("*.safetensors", check_safetensors)):
        for file in sorted(folder.rglob(pattern)):
            try:
                check(file)
            except ValueError as error:
                wrong.append(str(error))
    return wrong
