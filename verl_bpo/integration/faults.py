"""What a run does about trajectories that its environments lose."""

from __future__ import annotations

from collections.abc import Mapping

from verl_bpo.config.faults import FaultConfig
from verl_bpo.config.schema import RunError

NO_SAMPLE = "what is left is no fair sample, for short episodes survive more often"


class LostShare:
    """Watches the share that is lost, step by step."""

    def __init__(self, config: FaultConfig) -> None:
        self.config = config
        self._above = 0
        """Steps in a row above ``stop_share``."""

    def see(self, what: str, shares: Mapping[str, float], first: object) -> None:
        """Print a warning where a step or validation lost too much.

        Args:
            what: names it.
            shares: by cause, the likeliest first.
            first: a failure, as an example.
        """
        if sum(shares.values()) > self.config.warn_share:
            print(
                f"verl_bpo: WARNING: {what} lost {_told(shares)}, more than bpo.faults.warn_share="
                f"{self.config.warn_share:g}: {NO_SAMPLE}; one of them: {_line(first)}"
            )

    def step(self, number: int, shares: Mapping[str, float], first: object) -> None:
        """The same for a training step, and an end where too many lose too much.

        Raises:
            RunError: this is the last of ``stop_after`` steps in a row that lost more than ``stop_share``.
        """
        self.see(f"step {number}", shares, first)
        self._above = self._above + 1 if sum(shares.values()) > self.config.stop_share else 0
        if self._above >= self.config.stop_after:
            raise RunError(
                f"step {number} lost {_told(shares)}, and for {self._above} steps (bpo.faults.stop_after) it was more than "
                f"bpo.faults.stop_share={self.config.stop_share:g}: {NO_SAMPLE}; one of them: {_line(first)}"
            )


def _told(shares: Mapping[str, float]) -> str:
    causes = ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items())
    return f"{sum(shares.values()):.0%} of its trajectories to their environment ({causes})"


def _line(value: object) -> str:
    return " ".join(str(value).split())[:300]
