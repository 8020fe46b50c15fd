"""TextArena's GuessTheNumber with an expert, for ``recipes/imitation``."""

from recipes.adapters.bisection import bisect
from verl_bpo.sandbox.loading import load_environment


class Guess(load_environment("textarena:GuessTheNumber-v0")):
    def expert_actions(self):
        return bisect(self._game.game_number, 1, 20)
