"""Generated ALFWorld games: solvable, of all types, the same for the same seed, labelled."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from alfworld.gen import constants

from verl_bpo.commands.make_data import read_record, write_prompts
from verl_bpo.envs.alfworld.environment import TASK_TYPES, AlfworldEnvironment
from verl_bpo.envs.alfworld.generate import FEW_RECEPTACLES, KINDS, make_alfworld_games

COUNTS = {"train": 18, "valid_seen": 6, "valid_unseen": 6}


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    return make_alfworld_games(tmp_path_factory.mktemp("generated"), COUNTS, seed=3, progress=False)


def room_of(task: str) -> int:
    return int(Path(task).parts[-3].rsplit("-", 1)[1])


def test_every_split_has_its_games_of_all_six_types(games):
    for split, count in COUNTS.items():
        kinds = Counter(Path(task).parts[-3].split("-")[0] for task in AlfworldEnvironment.tasks(split, root=games))
        assert set(kinds) == set(KINDS) and set(kinds.values()) == {count // 6}


def test_the_stored_walkthrough_wins_command_by_command(games):
    environment, types = AlfworldEnvironment(), set()
    for split in ("train", "valid_unseen"):
        for task in AlfworldEnvironment.tasks(split, root=games)[::3]:
            first = environment.reset(task)
            walkthrough = json.loads(Path(task).read_text())["walkthrough"]
            assert environment.expert_actions() == walkthrough  # won by its last command, none before it, none reworded
            assert 3 <= len(walkthrough) <= 20 and not first.info["won"]
            types.add(first.info["task_type"])
    environment.close()
    assert types <= set(TASK_TYPES)


def test_sparse_rooms_hold_what_their_tasks_need(tmp_path):
    folder = make_alfworld_games(tmp_path, {"train": 24}, seed=3, progress=False, level=0)
    environment = AlfworldEnvironment()
    for task in AlfworldEnvironment.tasks("train", root=folder):
        observation = environment.reset(task)
        assert sum(action.startswith("go to ") for action in observation.actions) <= FEW_RECEPTACLES
        actions = environment.expert_actions()
        assert [environment.step(action).reward for action in actions][-1] == 1.0
    environment.close()
    with pytest.raises(ValueError, match="level=2: ALFWorld-format games have 0"):
        make_alfworld_games(tmp_path / "other", {"train": 1}, progress=False, level=2)
    with pytest.raises(ValueError):  # made otherwise
        make_alfworld_games(folder, {"train": 24}, seed=3, progress=False)


def test_unseen_rooms_are_apart_from_train_rooms(games):
    rooms = {split: {room_of(t) for t in AlfworldEnvironment.tasks(split, root=games)} for split in COUNTS}
    assert rooms["train"] | rooms["valid_seen"] <= set(constants.TRAIN_SCENE_NUMBERS)
    assert rooms["valid_unseen"] <= set(constants.TEST_SCENE_NUMBERS)
    assert not set(constants.TRAIN_SCENE_NUMBERS) & set(constants.TEST_SCENE_NUMBERS)


def test_the_same_seed_gives_the_same_bytes_in_every_process(games, tmp_path):
    script = (
        "from verl_bpo.envs.alfworld.generate import make_alfworld_games as m; import sys; "
        f"m(sys.argv[1], {COUNTS}, seed=3, progress=False)"
    )
    environment = {"PYTHONHASHSEED": "11", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=environment, timeout=300)
    assert (tmp_path / "manifest.json").read_text() == (games / "manifest.json").read_text()


def test_another_seed_gives_other_games_and_folders_are_not_mixed(games, tmp_path):
    other = make_alfworld_games(tmp_path, {"train": 6}, seed=4, progress=False)
    hashes = [set(json.loads((folder / "manifest.json").read_text())["games"].values()) for folder in (games, other)]
    assert not hashes[0] & hashes[1]
    with pytest.raises(ValueError, match="holds games made with other options"):
        make_alfworld_games(games, COUNTS, seed=4, progress=False)
    before = (games / "manifest.json").stat().st_mtime_ns
    make_alfworld_games(games, COUNTS, seed=3, progress=False)
    assert (games / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("counts, message", [({"test": 3}, "no split 'test'"), ({"train": 0}, "at least one game")])
def test_wrong_counts_are_named(tmp_path, counts, message):
    with pytest.raises(ValueError, match=message):
        make_alfworld_games(tmp_path, counts, progress=False)


def test_generated_games_say_so_wherever_they_appear(games):
    task = AlfworldEnvironment.tasks("train", root=games)[0]
    assert "trial_generated_" in task and "generated" in json.loads(Path(task).read_text())
    assert AlfworldEnvironment.data_source(task, "train") == "alfworld_generated_train"
    assert AlfworldEnvironment.data_source("json_2.1.1/train/x/trial_T2019/game.tw-pddl", "train") == "alfworld_train"


def test_the_problem_has_the_facts_that_official_ones_have(games, benchmark_data):
    """Kinds of facts of the official game of the same type; what it lacks are things inside things."""
    official = next((benchmark_data / "alfworld" / "json_2.1.1").rglob("game.tw-pddl"))
    mine = next(t for t in AlfworldEnvironment.tasks("train", root=games) if "pick_heat" in t)
    problems = [json.loads(Path(file).read_text())["pddl_problem"] for file in (official, mine)]
    facts = [set(re.findall(r"\n\s*\((\w+)", problem.split("(:init")[1])) for problem in problems]
    assert facts[0] - facts[1] == {"inReceptacleObject"} and not facts[1] - facts[0]


def test_a_generated_game_plays_like_any_other_in_the_original(games):
    from test_alfworld import assert_equals_original

    environment = AlfworldEnvironment()
    assert_equals_original(environment, AlfworldEnvironment.tasks("valid_unseen", root=games)[2], steps=4)
    environment.close()


def test_a_panel_is_the_same_sample_wherever_the_games_lie(games, tmp_path, monkeypatch):
    records = []
    moved = tmp_path / "elsewhere"
    moved.symlink_to(games)
    for place in (games, moved):
        monkeypatch.setenv("ALFWORLD_DATA", str(place))
        file = tmp_path / "panel.parquet"
        write_prompts("alfworld", "train", file, panel=6)
        records.append(read_record(file))
    assert records[0] == records[1] and records[0]["rows"] == 6
    assert len({room_of(task) for task in tasks_of(file)}) > 2
    with pytest.raises(ValueError, match="--panel 99 is more than the 18 tasks"):
        write_prompts("alfworld", "train", file, panel=99)


def test_the_checksum_follows_content_and_seed(games, tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(games))
    file = tmp_path / "all.parquet"
    first = write_prompts("alfworld", "valid_seen", file)["sha256"]
    assert write_prompts("alfworld", "valid_seen", file)["sha256"] == first
    assert write_prompts("alfworld", "valid_seen", file, seed=1)["sha256"] != first
    assert write_prompts("alfworld", "valid_seen", file, limit=5)["sha256"] != first


def tasks_of(file: Path) -> list[str]:
    import pandas

    return [row["task"] for row in pandas.read_parquet(file).extra_info]
