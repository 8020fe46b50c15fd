"""An environment of your own: find a number between 1 and 9 in three guesses."""

import random
import re

from verl_bpo.sandbox import Environment, Observation


class NumberGame(Environment):
    @classmethod
    def tasks(cls, split="train"):
        return [f"{split}-{i}" for i in range(32)]

    def reset(self, task, seed=0):
        self.secret = random.Random(f"{task}/{seed}").randint(1, 9)
        self.left = 3
        return Observation("Find my number from 1 to 9. You have 3 guesses.", actions=self._actions())

    def step(self, action):
        self.left -= 1
        digits = re.findall("[1-9]", action)
        guess = int(digits[0]) if digits else None
        if guess == self.secret:
            return Observation("Right.", reward=1.0, terminated=True, info={"won": True})
        if guess is None:
            answer = "Say a number."
        else:
            answer = "Higher." if guess < self.secret else "Lower."
        return Observation(answer, terminated=self.left == 0, actions=self._actions(), info={"won": False})

    def _actions(self):
        return tuple(f"guess {i}" for i in range(1, 10))
