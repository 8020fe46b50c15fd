"""A world that pays something for every turn: what share of the action's letters are vowels."""

from verl_bpo.sandbox import Environment, Observation


class LettersGame(Environment):
    @classmethod
    def tasks(cls, split="train"):
        return [f"{split}-{i}" for i in range(8)]

    def reset(self, task, seed=0):
        self.left = 3
        return Observation(f"Say something ({task}).")

    def step(self, action):
        self.left -= 1
        vowels = sum(letter in "aeiou" for letter in action.lower())
        return Observation(f"{self.left} left.", reward=0.2 + vowels / max(len(action), 1), terminated=self.left == 0)
