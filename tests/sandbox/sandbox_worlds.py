"""Small worlds to test the backends with. Loaded by path, in child processes too."""

import asyncio
import ctypes
import os
import random
import socket
import subprocess
import sys
import threading
import time

from verl_bpo.sandbox.base import Environment, Observation, SandboxError, TaskError
from verl_bpo.sandbox.turns import Message


class Diary(Environment):
    """Shows every action since reset; its state can be deep-copied."""

    def __init__(self, log=None):
        self.log = log
        self.actions = []

    def note(self, event):
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(event + "\n")

    def reset(self, task, seed=0):
        if task == "missing":
            raise TaskError("no task 'missing'")
        self.note("reset")
        self.actions = [f"{task}/{seed}"]
        return self.observe()

    def step(self, action):
        self.actions.append(action)
        return self.observe()

    def observe(self):
        text = " ".join(self.actions)
        return Observation(text, reward=float(len(self.actions)), actions=(str(len(self.actions)),))

    def close(self):
        self.note("close")


class SavingDiary(Diary):
    """Has a save_state and load_state of its own, which are counted."""

    def save_state(self):
        self.note("save")
        return tuple(self.actions)

    def load_state(self, state):
        self.note("load")
        self.actions = list(state)


class DigestedDiary(SavingDiary):
    def digest(self):
        return {"entries": " ".join(self.actions[1:])}


class HeavyState(tuple):
    nbytes = 1000


class HeavyDiary(SavingDiary):
    """Its states say how large they are."""

    def save_state(self):
        return HeavyState(self.actions)


class Uncopyable(Diary):
    def __init__(self, log=None):
        super().__init__(log)
        self.handle = sys.stdout  # files can't be copied

    def __deepcopy__(self, memo):
        raise TypeError("cannot copy an open file")


class Drifting(Diary):
    """Not deterministic: the action ``drift`` shows which process and instance it is played in."""

    def step(self, action):
        observation = super().step(action)
        return Observation(f"{os.getpid()} {id(self)} {time.time_ns()}") if action == "drift" else observation


class OwnError(SandboxError):
    def __init__(self, code, text):
        super().__init__(text)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


class Hostile(Diary):
    """Does to its process whatever the action says."""

    def step(self, action):
        attack = getattr(self, f"do_{action}", None)
        if attack is None:
            return super().step(action)
        self.actions.append(action)
        return attack() or self.observe()

    def do_raise(self):
        raise ValueError("the wall fell down")

    def do_own_error(self):
        raise OwnError(7, "out of lives")

    def do_exit(self):
        os._exit(3)

    def do_sysexit(self):
        sys.exit(4)

    def do_hang(self):
        time.sleep(1000)

    def do_hang_in_c(self):
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter all the time

    def do_print(self):
        print("noise " * 1000, flush=True)
        os.write(1, b"more noise\n" * 100)

    def do_big(self):
        return Observation("x" * 10_000_000)

    def do_recurse(self):
        self.do_recurse()

    def do_deep_info(self):
        nested = []
        for _ in range(100_000):
            nested = [nested]
        return Observation("deep", info={"nested": nested})

    def do_unpicklable(self):
        return Observation("odd", info={"thing": Unpicklable()})

    def do_pid(self):
        return Observation(str(os.getpid()))

    def do_modules(self):
        return Observation(" ".join(m for m in ("torch", "ray", "verl", "transformers") if m in sys.modules))

    def do_spawn(self):
        return Observation(str(subprocess.Popen(["sleep", "1000"], close_fds=False).pid))

    def do_tempfile(self):
        import tempfile

        return Observation(tempfile.mkdtemp())


class Machine(Diary):
    """State that no copy can hold: a generator, the process's own random numbers, an open file."""

    def __init__(self, log=None, path=None):
        super().__init__(log)
        self.file = open(path) if path else None  # noqa: SIM115 (held open on purpose)

    def reset(self, task, seed=0):
        random.seed(seed)
        if task == "large":
            self.heap = [bytearray(1 << 20) for _ in range(160)]
        self.numbers = (i * i for i in range(1000))
        return super().reset(task, seed)

    def step(self, action):
        if action == "thread":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        elif action == "child":
            self.child = subprocess.Popen(["sleep", "1000"])
        elif action == "connection":
            self.pair = socket.socketpair()
        elif action == "exit":
            os._exit(3)
        elif action == "pid":
            return Observation(str(os.getpid()))
        elif action == "read":
            return Observation(self.file.readline())
        elif action == "big":
            self.heap = [bytearray(1 << 20) for _ in range(64)]
        elif action.startswith("touch"):
            for block in self.heap[: int(action.split()[1])]:
                block[0] += 1
        elif action == "sizes":
            with open("/proc/self/smaps_rollup") as file:
                return Observation(" ".join(file.read().split()))
        elif action == "run":
            return Observation(str(subprocess.run(["sh", "-c", "exit 5"]).returncode))
        super().step(action)
        return Observation(f"{next(self.numbers)} {random.random():.6f} {len(self.actions)}")


class Structured(Environment):
    """Tool calls in, messages out, opened by its prompt row, asynchronously."""

    TOOL = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add to the sum.",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    }

    async def reset(self, task, seed=0, row=None):
        await asyncio.sleep(0)
        self.sum = row["start"] if row else 0
        self.loop = id(asyncio.get_running_loop())
        told = (Message("system", "Add."), Message("user", f"The sum is {self.sum}."))
        return Observation(messages=told, tools=(self.TOOL,))

    async def step(self, action):
        await asyncio.sleep(0)
        if isinstance(action, str):
            return Observation(f"You said {action}.", reward=self.sum, terminated=True)
        results = []
        for call in action.calls:
            self.sum += call.arguments["n"]
            results.append(call.answered(f"The sum is {self.sum}."))
        return Observation(messages=tuple(results), info={"threads": threading.active_count()})
