"""A class with tools, as TRL's GRPOTrainer takes it. On trees: ``bpo.env.name=trl:recipes/extend/cups.py:Cups``."""

import random
from typing import Literal

CUPS = ("red", "green", "blue")


class Cups:
    """Three times a coin lies under one of three cups, and it is said which."""

    def reset(self, **row) -> str:
        self.found, self.lifted = 0, 0
        self.coin = random.choice(CUPS)
        return f"Lift the {self.coin} cup."

    def lift(self, cup: Literal["red", "green", "blue"]) -> str:
        """Lift a cup.

        Args:
            cup: Its colour.

        Returns:
            What lies under it, and where the next coin is.
        """
        if self.lifted == 3:
            raise ValueError("all cups are lifted")
        told = "A coin." if cup == self.coin else "Nothing."
        self.found += cup == self.coin
        self.lifted += 1
        self.coin = random.choice(CUPS)
        return f"{told} Lift the {self.coin} cup." if self.lifted < 3 else f"{told} Done."

    def get_reward(self) -> float:
        return self.found / 3
