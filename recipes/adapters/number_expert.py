"""The OpenEnv example with an expert, for ``recipes/imitation``."""

from recipes.adapters.bisection import bisect
from verl_bpo.sandbox.loading import load_environment


class Number(load_environment("openenv:recipes/adapters/number_server.py:NumberEnvironment")):
    def expert_actions(self):
        return bisect(self._env.number, 1, 9)
