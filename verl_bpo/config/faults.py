"""``bpo.faults``: what a run does about trajectories that are lost to their environment."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from verl_bpo.options import Options

Share = Annotated[float, Field(ge=0, le=1)]


class FaultConfig(Options):
    retries: Annotated[int, Field(ge=0)] = 1
    """Times that a trajectory whose world crashed or hung goes on: from its last snapshot, or a new reset, its actions are
    played again, and where the world answers as before the step is taken once more. 0: it is lost at once."""
    warn_share: Share = 0.05
    """A step or validation that loses more than this share of its trajectories says so: those left are no fair sample, for
    short ones survive more often."""
    stop_share: Share = 0.5
    """The run ends where more than this share is lost in ``stop_after`` steps in a row. 1: never for this."""
    stop_after: Annotated[int, Field(ge=1)] = 3
    """Steps in a row, see ``stop_share``."""
