"""Gymnasium's own environments, played as they are."""

import json
import random

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="no gymnasium: pip install gymnasium")

import numpy as np
from gymnasium import spaces

from verl_bpo.commands.check_env import check_environment
from verl_bpo.commands.make_data import write_prompts
from verl_bpo.sandbox import MemorySandbox, SnapshotUnsupported, TaskError
from verl_bpo.sandbox.fork import ForkBackend
from verl_bpo.sandbox.loading import EnvironmentMaker, EnvironmentUnavailable, load_environment
from verl_bpo.sandbox.replay import ReplayBackend

OWN = """
import gymnasium
from gymnasium import spaces
from gymnasium.utils import EzPickle

class Echo(gymnasium.Env):
    observation_space = spaces.Dict({"said": spaces.Text(99), "sums": spaces.Box(-9, 9, (2,))})
    action_space = spaces.Text(9, min_length=1)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.count = (options or {}).get("count", 0)
        return self._state("nothing"), {}

    def step(self, action):
        self.count += 1
        return self._state(action), 1.0, False, self.count == 3, {}

    def _state(self, said):
        return {"said": said, "sums": self.np_random.normal(size=2).astype("float32")}

class Rebuilt(Echo, EzPickle):
    def __init__(self):
        EzPickle.__init__(self)

gymnasium.register("Echo-v0", Echo)
gymnasium.register("Rebuilt-v0", Rebuilt)
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "echo_world.py"
    file.write_text(OWN)
    return f"gymnasium:{file}"


def make(name, **kwargs):
    return load_environment(name)(**kwargs)


TOYS = ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"]


@pytest.mark.parametrize("name", TOYS)
def test_toy_games_keep_the_rules_out_of_the_box(name):
    report = check_environment(f"gymnasium:{name}", ["0"], max_turns=6)
    assert report.ok, report.render()


@pytest.mark.parametrize(
    "name, kwargs, lines",
    [
        ("FrozenLake-v1", {}, ["@ F F F", "H F F G", "row 0, column 0"]),
        ("CliffWalking-v1", {}, ["@ C C C C C C C C C C G"]),
        ("Taxi-v4", {}, ["The taxi is in row", "The passenger is at", "Goal: "]),
        ("Blackjack-v1", {}, ["Your hand: ", "The dealer shows"]),
        ("CartPole-v1", {}, ["CartPole-v1.", "Actions: 0, 1.", "[0."]),
        ("FrozenLake-v1", {"render_mode": "ansi"}, ["SFFF"]),
    ],
)
def test_the_policy_reads_text(name, kwargs, lines):
    observation = make(f"gymnasium:{name}", **kwargs).reset("0")
    for line in lines:
        assert line in observation.text, observation.text
    assert observation.actions


@pytest.mark.parametrize("name, kwargs", [("FrozenLake-v1", {"is_slippery": False}), ("Taxi-v4", {})])
def test_the_shortest_way_wins(name, kwargs):
    env = make(f"gymnasium:{name}", **kwargs)
    for task in "012":
        env.reset(task)
        way = env.expert_actions()
        last = [env.step(action) for action in way][-1]
        assert last.terminated and last.info["won"] and last.reward > 0
    assert name == "Taxi-v4" or len(way) == 6


@pytest.mark.parametrize("name, kwargs", [("FrozenLake-v1", {}), ("Blackjack-v1", {}), ("Taxi-v4", {"is_rainy": True})])
def test_there_is_no_expert_where_chance_plays_a_part(name, kwargs):
    env = make(f"gymnasium:{name}", **kwargs)
    env.reset("0")
    assert env.expert_actions() is None


def test_an_episode_is_gymnasiums_own_step_by_step():
    ours, theirs = make("gymnasium:FrozenLake-v1"), gymnasium.make("FrozenLake-v1")
    for seed in range(20):
        rng = random.Random(seed)
        ours.reset(str(seed)), theirs.reset(seed=seed)
        done = False
        while not done:
            action = rng.randrange(4)
            _, reward, terminated, truncated, _ = theirs.step(action)
            got = ours.step(("left", "down", "right", "up")[action])
            assert (got.reward, got.terminated, got.truncated) == (reward, terminated, truncated)
            assert ours._env.unwrapped.s == theirs.unwrapped.s
            done = terminated or truncated


def test_a_time_limit_truncates_and_a_rule_terminates():
    env = make("gymnasium:FrozenLake-v1", is_slippery=False, max_episode_steps=2)
    env.reset("0")
    env.step("left")
    cut = env.step("left")
    assert cut.truncated and not cut.terminated and cut.info == {"won": False}
    env.reset("0")
    env.step("right")
    fell = env.step("down")
    assert fell.terminated and not fell.truncated and fell.info == {"won": False}


def test_another_seed_of_a_row_is_another_game():
    env = make("gymnasium:Taxi-v4")
    assert len({env.reset("5", seed).text for seed in range(6)}) > 3
    assert env.reset("5").text == env.reset("5", 0).text


@pytest.mark.parametrize("action", ["", "xyzzy", "9"])
def test_an_unknown_action_is_answered_and_nothing_moves(action):
    env = make("gymnasium:Taxi-v4")
    env.reset("0")
    before = env._env.unwrapped.s
    assert "Actions: south" in env.step(action).text and env._env.unwrapped.s == before


def test_a_number_is_an_action_too_and_a_mask_says_which_are_offered():
    env = make("gymnasium:Taxi-v4")
    first = env.reset("0")
    mask = env._env.unwrapped.action_mask(env._env.unwrapped.s)
    assert len(first.actions) == sum(mask) and set(first.actions) <= set(env._names)
    assert env.step("0").text == (env.reset("0"), env.step("south"))[1].text


def test_text_actions_options_and_nested_observations(own):
    env = make(f"{own}:Echo-v0")
    first = env.reset(json.dumps({"seed": 1, "options": {"count": 1}}))
    assert first.actions is None and "said: nothing\nsums: [" in first.text
    assert "takes no such text" in env.step("far too long a text").text
    assert env.step("abc").text.startswith("said: abc") and env.step("abc").truncated
    with pytest.raises(TaskError, match="use a seed such as 7"):
        env.reset("first")


@pytest.mark.parametrize(
    "space, state, text",
    [
        (spaces.Discrete(5, start=2), np.int64(3), "3"),
        (
            spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))]),
            (1, np.array([0.123456, 1.0])),
            "(1, [0.1235, 1.0])",
        ),
        (spaces.MultiBinary(3), np.array([0, 1, 1]), "[0, 1, 1]"),
        (spaces.Sequence(spaces.Text(3)), ("a", "b"), "(a, b)"),
    ],
)
def test_spaces_are_written(space, state, text):
    from verl_bpo.envs.adapters.gymnasium import shown

    assert shown(space)(state) == text


@pytest.mark.parametrize(
    "name, kwargs, words",
    [
        ("Pendulum-v1", {}, "can't name actions of Box"),
        ("No-v0", {}, "No"),
        ("nosuchmodule:No-v0", {}, "nosuchmodule"),
        ("FrozenLake-v1", {"is_slipery": True}, "is_slipery"),
    ],
)
def test_what_cannot_be_played_says_why_in_one_line(name, kwargs, words):
    with pytest.raises(EnvironmentUnavailable, match=words) as error:
        EnvironmentMaker(f"gymnasium:{name}", kwargs)
    assert "\n" not in str(error.value)


def test_a_picture_is_no_text():
    from verl_bpo.envs.adapters.gymnasium import shown

    with pytest.raises(ValueError, match=r"observations of Box\(0, 255, \(96, 96, 3\), uint8\): wrap"):
        shown(spaces.Box(0, 255, (96, 96, 3), np.uint8))


def _goes_on(sandbox, rng):
    return [(o.text, o.reward) for o in (sandbox.step(rng.choice(("left", "down"))) for _ in range(4)) if o]


@pytest.mark.parametrize("backend", ["memory", "fork", "replay"])
def test_forks_draw_the_same_chance_as_their_origin(backend):
    """The slippery lake: what np_random draws next is part of the state."""
    name = "gymnasium:FrozenLake8x8-v1"
    if backend == "memory":
        sandbox, close = MemorySandbox(make(name)), lambda: None
    else:
        started = {"fork": ForkBackend, "replay": ReplayBackend}[backend](name, {})
        sandbox, close = started.sandbox(), started.close
    try:
        sandbox.reset("3")
        for _ in range(3):
            sandbox.step("right")
        forks = sandbox.snapshot().fork(2)
        played = [_goes_on(branch, random.Random(0)) for branch in (sandbox, *forks)]
        assert played[0] == played[1] == played[2]
    finally:
        close()


def test_what_a_copy_would_lose_is_refused_with_the_way_out(own):
    sandbox = MemorySandbox(make(f"{own}:Rebuilt-v0"))
    sandbox.reset("0")
    with pytest.raises(SnapshotUnsupported, match="Rebuilt is made anew .*bpo.env.backend=fork or replay"):
        sandbox.snapshot()


def test_prompt_files_name_the_environment_and_its_seeds(tmp_path):
    import pyarrow.parquet

    record = write_prompts("gymnasium:FrozenLake-v1", "valid", tmp_path / "valid.parquet", limit=3)
    rows = pyarrow.parquet.read_table(tmp_path / "valid.parquet").to_pylist()
    assert record["rows"] == 3 and [row["extra_info"]["task"] for row in rows] == ["1000000", "1000001", "1000002"]
    assert rows[0]["extra_info"]["env"] == "gymnasium:FrozenLake-v1" and rows[0]["data_source"] == "FrozenLake-v1"
