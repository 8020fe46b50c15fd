"""OpenEnv's base class in process, and its own server by its own client."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("openenv.core", reason="no openenv: pip install openenv-core")

import httpx

from verl_bpo.commands.check_env import check_environment
from verl_bpo.sandbox import MemorySandbox, SandboxError, SnapshotUnsupported, TaskError
from verl_bpo.sandbox.fork import ForkBackend
from verl_bpo.sandbox.loading import EnvironmentMaker, EnvironmentUnavailable, load_environment
from verl_bpo.sandbox.replay import ReplayBackend

FILE = Path(__file__).resolve().parents[3] / "recipes/adapters/number_server.py"
OURS = f"openenv:{FILE}:NumberEnvironment"
OTHERS = """
from enum import Enum
from openenv.core.env_server import Action, Environment, Observation

class Way(Enum):
    LEFT = "left"
    RIGHT = "right"

class Move(Action):
    way: Way

class Order(Action):
    item: str
    count: int = 1

class Seen(Observation):
    x: int = 0
    log: list = []

class Walk(Environment):
    def reset(self):
        self.x = 0
        return Seen()

    def step(self, action: Move, timeout_s=None):
        self.x += 1 if action.way is Way.RIGHT else -1
        return Seen(x=self.x, log=[action.way.value], reward=self.x)

    @property
    def state(self):
        return None

class Shop(Walk):
    def step(self, action: Order, timeout_s=None):
        return Seen(x=action.count, log=[action.item])

class Untyped(Walk):
    def step(self, action, timeout_s=None):
        return Seen()
"""


@pytest.fixture
def others(tmp_path):
    file = tmp_path / "others.py"
    file.write_text(OTHERS)
    return lambda name: load_environment(f"openenv:{file}:{name}")


@pytest.fixture(scope="module")
def server():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(FILE), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):  # until it answers; it may be slow to start
            try:
                httpx.get(f"{url}/health", timeout=5)
                break
            except httpx.HTTPError:
                assert process.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def test_the_class_in_process_passes_with_every_backend():
    report = check_environment(OURS, ["0", "4"], max_turns=3)
    assert report.ok and report.backends == {"fork": "", "memory": "", "replay": ""}, report.render()


def _won(env, task):
    env.reset(task)
    low, high = 1, 9
    while True:
        guess = (low + high) // 2
        observation = env.step(str(guess))
        if observation.done:
            return observation
        low, high = (guess + 1, high) if observation.text == "Higher." else (low, guess - 1)


def test_one_field_takes_plain_text_and_json_names_it():
    env = load_environment(OURS)()
    assert env.reset("5").text == "Find my number from 1 to 9."
    assert env.step("1").text == env.step('{"number": 1}').text == "Higher."
    assert _won(env, "5").reward == 1.0


@pytest.mark.parametrize("action", ["", "seven", '{"number": "x"}', '{"numbers": 1}', "[1]"])
def test_what_is_no_action_is_answered_and_takes_no_step(action):
    env = load_environment(OURS)()
    env.reset("0")
    answer = env.step(action)
    assert answer.text.startswith("That is no action: number") and not answer.done
    assert env._env.state.step_count == 0


def test_a_fixed_set_of_values_is_what_may_be_done(others):
    env = others("Walk")()
    assert env.reset("0").actions == ("left", "right")
    seen = env.step("right")
    assert seen.text == 'x: 1\nlog: ["right"]' and seen.reward == 1.0 and seen.actions == ("left", "right")
    assert "way: Input should be 'left' or 'right'" in env.step("up").text


def test_several_fields_ask_for_an_object(others):
    env = others("Shop")()
    env.reset("0")
    assert env.step("tea").text == "That is no action: write a JSON object with item, count"
    assert env.step('{"item": "tea"}').text == 'x: 1\nlog: ["tea"]'


def test_arguments_of_reset_are_a_task_and_rows_seeds_make_others():
    env = load_environment(OURS)()
    env.reset('{"seed": 4, "level": 2}')
    number = env._env.number
    env.reset("4")
    assert env._env.number == number
    assert len({(env.reset("4", seed), env._env.number)[1] for seed in range(8)}) > 2
    with pytest.raises(TaskError, match="use a seed such as 7"):
        env.reset("first")


def test_a_server_plays_the_same_and_forks_by_replay(server):
    name = f"openenv:{server}"
    ours, theirs = load_environment(OURS)(), load_environment(name)()
    for task in ("0", "1"):
        assert ours.reset(task) == theirs.reset(task)
        for action in ("5", "seven", '{"number": 2}'):
            mine, other = ours.step(action), theirs.step(action)
            assert (mine.reward, mine.done) == (other.reward, other.done)
            assert mine.text == other.text or "no action" in mine.text and "no action" in other.text
            if mine.done:
                break
    theirs.close()
    report = check_environment(name, ["0"], max_turns=3, backend="replay")
    assert report.ok and not report.backends["replay"], report.render()
    assert "the state of http" in report.backends["memory"] and "replay" in report.backends["fork"]


def test_a_servers_state_is_not_copied_and_not_forked(server):
    name = f"openenv:{server}"
    with MemorySandbox(load_environment(name)()) as sandbox:
        sandbox.reset("0")
        with pytest.raises(SnapshotUnsupported, match="bpo.env.backend=replay"):
            sandbox.snapshot()
    backend = ForkBackend(name, {})
    try:
        sandbox = backend.sandbox()
        sandbox.reset("0")
        with pytest.raises(SnapshotUnsupported, match="threads.*bpo.env.backend=replay"):
            sandbox.snapshot()
    finally:
        backend.close()
    backend = ReplayBackend(name, {})
    with backend.sandbox() as sandbox:
        sandbox.reset("4")
        sandbox.step("1")
        (fork,) = sandbox.snapshot().fork()
        assert fork.step("9").text == sandbox.step("9").text
        fork.close()


def test_no_server_is_said_in_one_line():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(SandboxError, match="no OpenEnv server answers at"):
            load_environment(f"openenv:{url}")()


@pytest.mark.parametrize("name", ["json:JSONDecoder", "NoModule", "json:Nothing"])
def test_another_class_is_refused_in_one_line(name):
    with pytest.raises(EnvironmentUnavailable, match="name a class derived from") as error:
        EnvironmentMaker(f"openenv:{name}", {})
    assert "\n" not in str(error.value)


def test_an_action_without_a_class_is_refused(others):
    with pytest.raises(ValueError, match="Untyped.step must say of which class its action is"):
        others("Untyped")()
