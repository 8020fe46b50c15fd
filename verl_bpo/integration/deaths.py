"""What a run says when something that it can't do without has died."""

from __future__ import annotations

import errno
import os
import re

from ray.exceptions import RayActorError, RayTaskError

from verl_bpo.ending import disk_full, is_disk_full


def told(error: BaseException) -> str | None:
    """One line on an error of Ray that is not the program: a process that died, a full disk. None: it is another one."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    if isinstance(error, RayActorError):
        return _death(str(error))
    if is_disk_full(error):
        return disk_full(error)
    text = str(error)
    if "ActorDiedError" in text or "ActorUnavailableError" in text:
        return _death(text)
    return disk_full(error) if os.strerror(errno.ENOSPC) in text else None


def _death(text: str) -> str:
    """What Ray says over ten lines of an actor's end."""
    kind = re.search(r"class_name: (\S+)", text)
    why = re.search(
        r"(?:Worker exit detail|The actor died because[^:\n]*|The actor is dead because)[:,]? *([^\n]*)", text
    )
    who = {"TransformersServer": "the rollout engine", "vLLMHttpServer": "the rollout engine"}.get(
        kind[1] if kind else "", f"the process of {kind[1]}" if kind else "a process of the run"
    )
    reason = " ".join(why[0].split())[:200] if why else "see the log above"
    return f"{who} died ({reason}): the run ends; the same command goes on from the last checkpoint"
