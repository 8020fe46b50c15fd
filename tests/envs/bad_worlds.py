"""A counting game, and one that breaks each rule of the contract in its own way."""

import itertools
import os
import random
import threading
from pathlib import Path

from verl_bpo.sandbox import VOLATILE
from verl_bpo.sandbox.base import Environment, Observation
from verl_bpo.shells.base import Workspace
from verl_bpo.shells.environment import SUBMIT, ShellEnvironment


class Counter(Environment):
    """Add numbers until the sum is the secret. Keeps every rule."""

    def reset(self, task, seed=0):
        self.secret = 5 + random.Random(f"{task}/{seed}").randrange(5)
        self.total, self.log = 0, []
        return self._observe()

    def step(self, action):
        self.total += int(action) if action in ("1", "2", "3") else 0
        self.log.append(action)
        return self._observe(1.0 if self.total == self.secret else 0.0)

    def expert_actions(self):
        return ["1"] * self.secret

    @classmethod
    def tasks(cls, split="train", **kwargs):
        return [f"{split}-{i}" for i in range(4)]

    def _observe(self, reward=0.0):
        text = f"{self.total} of {self.secret}. Said: {' '.join(self.log[-3:])}"
        return Observation(text, reward, terminated=self.total >= self.secret, actions=("1", "2", "3"))


class ListsNoTasks(Environment):
    pass


class SaysNumbers(Counter):
    def _observe(self, reward=0.0):
        return Observation(self.total, reward, actions=("1",))


class ListsActions(Counter):
    def _observe(self, reward=0.0):
        return Observation("", reward, actions=["1", "2"])


class NotANumber(Counter):
    def step(self, action):
        super().step(action)
        return self._observe(float("nan"))


class OverAtOnce(Counter):
    def reset(self, task, seed=0):
        super().reset(task, seed)
        return Observation("", terminated=True)


class UselessExpert(Counter):
    def expert_actions(self):
        return ["0", "0"]


class UsesGlobalChance(Counter):
    def reset(self, task, seed=0):
        super().reset(task, seed)
        return Observation(os.urandom(4).hex(), actions=("1", "2", "3"))


class RemembersEpisodes(Counter):
    played = itertools.count()

    def __init__(self):
        self.episodes = 0

    def reset(self, task, seed=0):
        super().reset(task, seed)
        self.episodes += 1
        return Observation(f"episode {self.episodes}", actions=("1", "2", "3"))


class ListsASet(Counter):
    """The order of a set of strings differs between processes."""

    def _observe(self, reward=0.0):
        observation = super()._observe(reward)
        words = {f"word{i}" for i in range(20)}
        return Observation(" ".join(words), reward, observation.terminated, actions=observation.actions)


class RaisesAtNonsense(Counter):
    def step(self, action):
        int(action)
        return super().step(action)


class SharesItsLog(Counter):
    """A snapshot that a later step changes in place."""

    def save_state(self):
        return self.secret, self.total, self.log

    def load_state(self, state):
        self.secret, self.total, self.log = state


class ForgetsItsLog(Counter):
    def save_state(self):
        return self.secret, self.total

    def load_state(self, state):
        self.secret, self.total = state
        self.log = []


class CantBeCopied(Counter):
    def __init__(self):
        self.lock = threading.Lock()


class SharedBoard(Counter):
    """Instances write on one board."""

    board: list = []

    def reset(self, task, seed=0):
        type(self).board.clear()
        return super().reset(task, seed)

    def step(self, action):
        type(self).board.append(action)
        observation = super().step(action)
        return Observation(
            str(len(type(self).board)), observation.reward, observation.terminated, actions=("1", "2", "3")
        )


class LeavesFiles(Counter):
    kept: list = []

    def reset(self, task, seed=0):
        type(self).kept.append(Path(__file__).open())  # noqa: SIM115
        return super().reset(task, seed)


class LeavesThreads(Counter):
    def reset(self, task, seed=0):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().reset(task, seed)


class Clerk(ShellEnvironment):
    """Commands in a sandbox, with a clock's second hand, a draw or a file of chance thrown in as ``extra`` says."""

    def __init__(self, extra="true", files="auto"):
        super().__init__(observation="plain", shell={"files": files}, limits={"disk": 16 << 20, "memory": 256 << 20})
        self.extra = extra

    @classmethod
    def tasks(cls, split="train", **kwargs):
        return ["desk"]

    def expert_actions(self):
        return ["echo one > letter", "cat letter", f"echo {SUBMIT}"]

    def step(self, action):
        return super().step(f"{self.extra}; {action}" if "letter" in action else action)

    def _open(self, task, seed):
        shell = self._shell or self._open_shell(Workspace({"/testbed": None}))
        shell.reset()
        return shell, "Write a letter."

    def _actions(self):
        return "cat letter", "echo dear >> letter"

    def _score(self, shell):
        return float(shell.execute("cat letter").output.startswith("one")), {}


class StrictClerk(Clerk):
    """Nothing of what it says may differ."""

    volatile = {}


class ClerkWithPort(Clerk):
    volatile = {**VOLATILE, "port": r"port \d+"}
