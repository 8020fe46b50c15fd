"""Frozen lakes, a new one for every seed: ``bpo.env.name=gymnasium:recipes/adapters/lakes.py:Lakes-v0``."""

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map


class Lakes(FrozenLakeEnv):
    """Gymnasium's own game; each reset freezes another lake."""

    def __init__(self, size: int = 4, **options):
        super().__init__(map_name=f"{size}x{size}", is_slippery=False, **options)
        self.size = size

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        lake = generate_random_map(self.size, seed=int(self.np_random.integers(2**31)))
        super().__init__(desc=lake, is_slippery=False, render_mode=self.render_mode)
        return super().reset(seed=seed, options=options)


gymnasium.register("Lakes-v0", Lakes, max_episode_steps=20)
