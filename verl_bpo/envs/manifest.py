"""Folders of generated tasks, whose ``manifest.json`` tells how they were made."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def open_folder(folder: Path, options: Mapping[str, object], pattern: str) -> dict[str, str] | None:
    """The games of ``folder`` if they are all there and made with ``options``, as its manifest tells; None: make them.

    Raises:
        ValueError: it holds games made with other options, or (by ``pattern``) games without a manifest.
    """
    manifest = folder / "manifest.json"
    if manifest.is_file():
        made = json.loads(manifest.read_text())
        if made["options"] != options:
            shown = ", ".join(f"{key} {made['options'].get(key)}" for key in ("kind", "level", "seed", "counts"))
            raise ValueError(
                f"{folder} holds games made with other options ({shown}): choose another folder or remove it"
            )
        if made["games"] and all((folder / name).is_file() for name in made["games"]):
            return made["games"]
    elif any(folder.glob(pattern)):
        raise ValueError(f"{folder} holds games but no manifest: choose another folder or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    # written first, so that an unfinished run isn't mixed with another one's games
    write_whole(manifest, json.dumps({"options": options, "games": {}}))
    return None


def write_whole(path: Path, text: str) -> None:
    """Never leaves a half-written file behind."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)
