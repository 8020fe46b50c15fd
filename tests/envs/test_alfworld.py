"""ALFWorld as an environment: equal to the original, snapshots exact, nothing left behind."""

import json
import os
import random
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("textworld")
pytest.importorskip("alfworld")

import textworld
import textworld.gym
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
from textworld.envs.pddl import logic as pddl_logic
from textworld.envs.pddl import pddl, textgen

from verl_bpo.envs.alfworld import fast_pddl
from verl_bpo.envs.alfworld.environment import TASK_TYPES, AlfworldEnvironment, _is_playable, _task_type
from verl_bpo.sandbox.base import SandboxError, TaskError

GOAL = "put a clean apple in fridge"

OBJECTS = {
    "Apple_bar_1": "Apple", "Apple_bar_2": "Apple", "Knife_bar_1": "Knife", "Mug_bar_1": "Mug", "DeskLamp_bar_1": "DeskLamp",
}  # fmt: skip
RECEPTACLES = {
    "Fridge_bar_1": "Fridge", "Sink_bar_1_bar_SinkBasin": "SinkBasin", "Microwave_bar_1": "Microwave",
    "CounterTop_bar_1": "CounterTop",
}  # fmt: skip
PROPERTIES = {
    "Apple": ["pickupable", "cleanable", "heatable", "coolable", "sliceable"], "Knife": ["pickupable", "cleanable"],
    "Mug": ["pickupable", "cleanable", "heatable", "coolable"], "DeskLamp": ["toggleable"],
}  # fmt: skip

WALKTHROUGH = [
    "go to countertop 1", "take apple 2 from countertop 1", "go to sinkbasin 1", "clean apple 2 with sinkbasin 1",
    "go to fridge 1", "open fridge 1", "move apple 2 to fridge 1",
]  # fmt: skip


def small_problem() -> str:
    """A kitchen: everything movable lies on the counter, fridge and microwave are closed."""
    facts = ["(atLocation agent1 loc_start)", "(= (total-cost) 0)"]
    for receptacle, kind in RECEPTACLES.items():
        facts += [f"(receptacleAtLocation {receptacle} loc_{kind})", f"(receptacleType {receptacle} {kind}Type)"]
        facts += [f"(openable {receptacle})"] if kind in ("Fridge", "Microwave") else []
        facts += [f"(canContain {kind}Type {name}Type)" for name in ("Apple", "Knife", "Mug")]
    for name, kind in OBJECTS.items():
        facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} CounterTop_bar_1)"]
        facts += [f"(objectAtLocation {name} loc_CounterTop)", *(f"({p} {name})" for p in PROPERTIES[kind])]
    return f"""
    (define (problem small) (:domain alfred)
      (:objects agent1 - agent
        {" ".join(OBJECTS)} - object
        {" ".join(RECEPTACLES)} - receptacle
        loc_start {" ".join("loc_" + kind for kind in RECEPTACLES.values())} - location
        {" ".join(sorted({kind + "Type" for kind in OBJECTS.values()}))} - otype
        {" ".join(kind + "Type" for kind in RECEPTACLES.values())} - rtype)
      (:init {" ".join(facts)})
      (:goal (and (exists (?r - receptacle) (exists (?o - object) (and
        (cleanable ?o) (objectType ?o AppleType) (receptacleType ?r FridgeType) (isClean ?o) (inReceptacle ?o ?r)))))))
    """


def write_game(folder: Path, **changes: object) -> Path:
    """A game of ALFWorld's own domain and grammar; a change of None drops the key."""
    game = {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL", GOAL),
        "pddl_problem": small_problem(),
        "solvable": True,
        "walkthrough": WALKTHROUGH,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps({key: value for key, value in game.items() if value is not None}))
    return path


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    return str(write_game(tmp_path_factory.mktemp("alfworld") / "pick_clean_then_place_in_recep-Apple" / "trial_1"))


@pytest.fixture
def environment():
    environment = AlfworldEnvironment()
    yield environment
    environment.close()


@pytest.fixture
def real_games(benchmark_data):
    """One real game of each kind of task (the official one is a pick_heat)."""
    games = sorted((benchmark_data / "alfworld").glob("json_2.1.1/**/game.tw-pddl"))
    games += sorted((benchmark_data / "alfworld").glob("rebuilt_from_alfred/**/game.tw-pddl"))
    by_kind = {}
    for path in games:
        by_kind.setdefault(path.parent.parent.name.split("-")[0], str(path))
    if not by_kind:
        pytest.skip(f"no ALFWorld games in {benchmark_data}")
    return list(by_kind.values())


def open_original(path):
    """``alfworld``'s text environment for one game, put together as ``AlfredTWEnv.init_env`` does."""
    infos = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
    wrappers = [AlfredDemangler(shuffle=False), AlfredInfos]
    return textworld.gym.make(
        textworld.gym.register_games([path], infos, batch_size=1, max_episode_steps=None, wrappers=wrappers)
    )


def commands_to_try(path, actions, rng, steps):
    """Random play, then the walkthrough, with a few things said that the game doesn't know."""
    walkthrough = json.loads(Path(path).read_text()).get("walkthrough") or []
    for step in range(steps + len(walkthrough)):
        if rng.random() < 0.1:
            yield rng.choice(["", "dance", "go to nowhere 1", " look ", "take apple 1"])
        yield rng.choice(actions()) if step < steps else walkthrough[step - steps]


def assert_equals_original(environment, path, steps, seed=0):
    original = open_original(path)
    (text,), infos = original.reset()
    observation = environment.reset(path)
    score = 0
    assert (observation.text, observation.actions) == (text, tuple(infos["admissible_commands"][0]))
    for command in commands_to_try(path, lambda: observation.actions, random.Random(seed), steps):  # noqa: B023
        (text,), (new_score,), (done,), infos = original.step([command])
        observation = environment.step(command)
        expected = (text, tuple(infos["admissible_commands"][0]), new_score - score, done, infos["won"][0])
        seen = (observation.text, observation.actions, observation.reward, observation.done, observation.info["won"])
        assert seen == expected, command
        score = new_score
        if done:  # the original repeats its last answer from here on
            break
    original.close()


def random_walk(environment, actions, steps, seed=0):
    """Observations of ``steps`` random admissible actions, starting where the environment is."""
    rng = random.Random(seed)
    observations = []
    for _ in range(steps):
        observations.append(environment.step(rng.choice(actions)))
        actions = observations[-1].actions
    return observations


def test_small_game_equals_alfworlds_own_environment(environment, game):
    for seed in range(2):
        assert_equals_original(environment, game, steps=30, seed=seed)


def test_commands_that_depend_on_the_state_equal_the_original(environment, tmp_path):
    grammar = Path(ALFRED_TWL2_PATH).read_text()
    changed = grammar.replace('"examine {r}"', '"count [{o.name | inreceptacle(o:object, r:receptacle)}] in {r}"')
    assert changed != grammar
    assert_equals_original(environment, str(write_game(tmp_path, grammar=changed, walkthrough=WALKTHROUGH)), steps=10)


@pytest.mark.data
def test_real_games_equal_alfworlds_own_environment(environment, real_games):
    for path in real_games[:4]:
        assert_equals_original(environment, path, steps=10)


def test_reset_shows_goal_and_kind_of_task(environment, game):
    observation = environment.reset(game)
    assert observation.text.endswith(f"Your task is to: {GOAL}.")
    assert observation.info == {"won": False, "task_type": "pick_clean_then_place_in_recep", "goal": f"{GOAL}."}


def test_only_the_winning_step_is_rewarded_and_terminates(environment, game):
    environment.reset(game)
    observations = [environment.step(action) for action in WALKTHROUGH]
    assert [o.reward for o in observations] == [0.0] * 6 + [1.0]
    assert [o.terminated for o in observations] == [False] * 6 + [True]
    assert observations[-1].info["won"]


@pytest.mark.data
def test_real_games_are_won_by_their_walkthrough_and_name_their_kind(environment, real_games):
    for path in real_games:
        assert environment.reset(path).info["task_type"] in TASK_TYPES
        actions = environment.expert_actions()
        assert actions and [environment.step(action).reward for action in actions][-1] == 1.0


def test_loaded_state_continues_exactly_any_number_of_times_in_any_order(environment, game):
    actions = environment.reset(game).actions
    saved = []
    for seed in range(15):
        state = environment.save_state()
        walk = random_walk(environment, actions, steps=12, seed=seed)
        saved.append((state, actions, seed, walk))
        actions = walk[-1].actions
    rng = random.Random(0)
    for state, actions, seed, walk in rng.sample(saved, k=15) + rng.sample(saved, k=15):
        environment.load_state(state)
        assert random_walk(environment, actions, steps=12, seed=seed) == walk


def test_loading_a_state_from_before_the_win_allows_to_win_again(environment, game):
    environment.reset(game)
    for action in WALKTHROUGH[:-1]:
        environment.step(action)
    state = environment.save_state()
    assert environment.step(WALKTHROUGH[-1]).reward == 1.0
    environment.load_state(state)
    assert environment.step(WALKTHROUGH[-1]).reward == 1.0


def test_state_of_an_earlier_reset_or_another_environment_is_refused(environment, game):
    environment.reset(game)
    state = environment.save_state()
    other = AlfworldEnvironment()
    other.reset(game)
    for holder in (other, environment):
        if holder is environment:
            environment.reset(game)
        with pytest.raises(SandboxError, match="before the last reset"):
            holder.load_state(state)
    other.close()


def test_stepping_without_reset_is_refused(environment):
    with pytest.raises(SandboxError, match="call reset first"):
        environment.step("look")


def test_environments_of_one_process_are_independent(environment, game):
    other = AlfworldEnvironment()
    start = environment.reset(game)
    alone = random_walk(environment, start.actions, steps=30)
    environment.reset(game)
    other.reset(game)
    rng, observation, together = random.Random(0), start, []
    for i in range(30):
        other.step(WALKTHROUGH[i % len(WALKTHROUGH)])
        observation = environment.step(rng.choice(observation.actions))
        together.append(observation)
    other.close()
    assert together == alone


def test_resets_in_parallel_threads_agree_and_leave_stdout_and_argv_alone(game):
    before = sys.stdout, list(sys.argv)

    def play(_):
        environment = AlfworldEnvironment()
        walk = random_walk(environment, environment.reset(game).actions, steps=20)
        environment.close()
        return walk

    fast_pddl._load_game.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        walks = list(pool.map(play, range(8)))
    assert all(walk == walks[0] for walk in walks)
    assert (sys.stdout, sys.argv) == before


def test_expert_actions_keep_the_present_state(environment, game):
    environment.reset(game)
    for action in WALKTHROUGH[:2]:
        environment.step(action)
    assert environment.expert_actions() == WALKTHROUGH
    assert environment.step("inventory").text == "You are carrying: a apple 2."


def test_expert_actions_speak_the_commands_of_the_live_game(environment, tmp_path):
    older = [*WALKTHROUGH[:-1], "put apple 2 in/on fridge 1"]
    environment.reset(str(write_game(tmp_path, walkthrough=older)))
    assert environment.expert_actions() == WALKTHROUGH


@pytest.mark.parametrize("walkthrough", [None, [], WALKTHROUGH[:-1], ["dance"]])
def test_no_expert_actions_without_a_walkthrough_that_wins(environment, tmp_path, walkthrough):
    environment.reset(str(write_game(tmp_path, walkthrough=walkthrough)))
    assert environment.expert_actions() is None


def test_changed_game_file_is_read_anew(environment, tmp_path):
    assert GOAL in environment.reset(str(write_game(tmp_path))).text
    grammar = Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL", "do something else entirely")
    assert "something else entirely" in environment.reset(str(write_game(tmp_path, grammar=grammar))).text


def test_missing_game_says_where_and_what_to_do(environment, monkeypatch, tmp_path):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(TaskError, match=rf"{tmp_path}/no/game.tw-pddl.*alfworld-download.*ALFWORLD_DATA"):
        environment.reset("no/game.tw-pddl")


@pytest.mark.parametrize(
    "changes",
    [{"pddl_problem": None}, {"pddl_problem": "(define (problem"}, {"pddl_domain": "no pddl"}, {"grammar": "action {"}],
)
def test_broken_game_is_a_task_error_and_the_environment_goes_on(environment, game, tmp_path, changes):
    path = write_game(tmp_path, **changes)
    with pytest.raises(TaskError, match="isn't a readable ALFWorld game"):
        environment.reset(str(path))
    assert environment.reset(game).actions


def test_truncated_game_is_a_task_error(environment, tmp_path):
    path = write_game(tmp_path)
    path.write_text(path.read_text()[:1000])
    with pytest.raises(TaskError, match="isn't a readable ALFWorld game"):
        environment.reset(str(path))


def make_split(split):
    """Two playable games and every kind that is left out."""
    for name in ("pick_b", "pick_a"):
        write_game(split / name / "trial_1")
    write_game(split / "pick_unsolvable" / "trial_1", solvable=False)
    write_game(split / "pick_unknown" / "trial_1", solvable=None)
    write_game(split / "pick_and_place_with_movable_recep" / "trial_1")
    write_game(split / "pick_AppleSliced" / "trial_1")
    (split / "pick_broken").mkdir()
    (split / "pick_broken" / "game.tw-pddl").write_text("{")


def test_tasks_are_the_solvable_games_sorted_and_can_be_opened(environment, monkeypatch, tmp_path):
    make_split(tmp_path / "json_2.1.1" / "valid_seen")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    tasks = AlfworldEnvironment.tasks("valid_seen")
    assert tasks == [f"json_2.1.1/valid_seen/pick_{x}/trial_1/game.tw-pddl" for x in "ab"]
    assert environment.reset(tasks[0]).actions


@pytest.mark.parametrize("layout", ["json_2.1.1/train", "train", "."])
def test_tasks_of_a_folder_are_absolute_paths(layout, tmp_path):
    make_split(tmp_path / layout)
    tasks = AlfworldEnvironment.tasks("train", root=tmp_path)
    assert tasks == [str(tmp_path / layout / f"pick_{x}" / "trial_1" / "game.tw-pddl") for x in "ab"]


def test_missing_split_says_where_and_what_to_do(monkeypatch, tmp_path):
    make_split(tmp_path / "json_2.1.1" / "train")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(TaskError, match=rf"{tmp_path}/json_2.1.1/valid_unseen.*alfworld-download.*ALFWORLD_DATA"):
        AlfworldEnvironment.tasks("valid_unseen")
    with pytest.raises(TaskError, match="has no split 'test'"):
        AlfworldEnvironment.tasks("test")


OPEN_AND_CLOSE = """
import sys, tempfile
from pathlib import Path
from verl_bpo.envs.alfworld.environment import AlfworldEnvironment

tempfile.tempdir = sys.argv[2]

def opened_then_closed(count):
    environments = [AlfworldEnvironment() for _ in range(count)]
    for environment in environments:
        environment.reset(sys.argv[1])
    for environment in environments:
        environment.close()
    return sum("libdownward" in line for line in Path("/proc/self/maps").read_text().splitlines())

print([opened_then_closed(3) for _ in range(3)])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads /proc")
def test_closed_environments_leave_no_file_no_growing_planners_and_no_crash_at_exit(game, tmp_path):
    script = [sys.executable, "-c", OPEN_AND_CLOSE, game, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(set(json.loads(done.stdout))) == 1
    assert not list(tmp_path.iterdir())


def test_environment_can_be_closed_twice_and_without_a_game(game):
    environment = AlfworldEnvironment()
    environment.close()
    environment.close()
    environment = AlfworldEnvironment()
    assert environment.reset(game).actions
    environment.close()


def test_other_users_of_textworld_are_unaffected(environment, game):
    environment.reset(game)
    environment.step("look")
    environment.expert_actions()
    for module in (textgen, pddl_logic, pddl):
        for cls in (c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__):
            functions = [f for f in vars(cls).values() if isinstance(f, types.FunctionType)]
            assert all(f.__module__ in (module.__name__, "dataclasses") for f in functions), cls
        functions = [
            f for name, f in vars(module).items() if isinstance(f, types.FunctionType) and name[:6] == "_parse"
        ]
        assert all(f.__module__ == module.__name__ for f in functions)


def test_only_a_games_own_folders_say_what_kind_it_is():
    """The folders above are the user's, whatever they are called."""
    game = Path("/data/pick_and_place/immovable/look_at_obj_in_light-Mug-None-DeskLamp-1/trial_1/game.tw-pddl")
    assert _task_type(game) == "look_at_obj_in_light"
    assert _task_type(Path("/data/pick_and_place/mine/trial_1/game.tw-pddl")) is None


def test_games_below_a_folder_with_an_unlucky_name_are_playable(tmp_path):
    game = tmp_path / "immovable/pick_and_place-1/trial_1/game.tw-pddl"
    game.parent.mkdir(parents=True)
    game.write_text('{"solvable": true}')
    assert _is_playable(game)
