"""Worlds as users may bring them: one that cannot be copied, one whose process dies now and then."""

import os
import signal
import threading

from verl_bpo.sandbox import Environment
from verl_bpo.sandbox.loading import load_environment

LettersGame: type[Environment] = load_environment(f"{os.path.dirname(__file__)}/letters_game.py:LettersGame")


class Uncopyable(LettersGame):
    def reset(self, task, seed=0):
        self.lock = threading.Lock()
        return super().reset(task, seed)


class Dying(LettersGame):
    def step(self, action):
        observation = super().step(action)
        if self.left == 1 and len(action) % 3 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return observation
