"""What a tree may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["leaves", "env_steps", "tokens"]


@dataclass
class Budget:
    """Costs are reserved before a trajectory starts, at the most it can cost, and corrected when it ends.

    So a tree never exceeds its limit, however many trajectories run at once.
    """

    unit: Unit
    limit: int
    max_turns: int
    max_action_tokens: int
    spent: int = 0
    reserved: int = 0

    def longest(self, depth: int) -> int:
        """The most that a trajectory starting after ``depth`` turns can cost."""
        turns = max(self.max_turns - depth, 0)
        return {"leaves": 1, "env_steps": turns, "tokens": turns * self.max_action_tokens}[self.unit]

    def affordable(self, depth: int) -> int:
        """How many trajectories starting after ``depth`` turns fit into what is left."""
        return max(self.limit - self.spent - self.reserved, 0) // max(self.longest(depth), 1)

    def reserve(self, depth: int) -> None:
        self.reserved += self.longest(depth)

    def settle(self, depth: int, env_steps: int, tokens: int) -> None:
        """A trajectory that was reserved at ``depth`` has ended after this many steps and tokens of its own."""
        self.reserved -= self.longest(depth)
        self.spent += {"leaves": 1, "env_steps": env_steps, "tokens": tokens}[self.unit]
