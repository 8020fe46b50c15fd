"""An OpenEnv environment as a server has it: find a number from 1 to 9, in process by
``bpo.env.name=openenv:recipes/adapters/number_server.py:NumberEnvironment``, or served by running this file."""

import random
import sys

from openenv.core.env_server import Action, Environment, Observation
from openenv.core.env_server.types import State


class Guess(Action):
    number: int


class Answer(Observation):
    said: str


class NumberEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id, step_count=0)
        self.number = random.Random(seed).randint(1, 9)
        return Answer(said="Find my number from 1 to 9.")

    def step(self, action: Guess, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.number == self.number:
            return Answer(said="Right.", reward=1.0, done=True)
        return Answer(said="Higher." if action.number < self.number else "Lower.", done=self._state.step_count == 3)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    import uvicorn
    from openenv.core.env_server import create_fastapi_app

    app = create_fastapi_app(NumberEnvironment, Guess, Answer, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
