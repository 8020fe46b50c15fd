import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("textworld")

import textworld.challenges
from textworld import EnvInfos, GameMaker, GameOptions
from textworld.envs.tw import TextWorldEnv
from textworld.generator.game import Event, Game, GameProgression, Quest

from verl_bpo.envs.textworld import generate as make_games
from verl_bpo.envs.textworld.environment import TextworldEnvironment
from verl_bpo.envs.textworld.generate import LEVELS, make_textworld_games
from verl_bpo.sandbox import TaskError

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def houses(tmp_path_factory):
    """One folder of games per level."""
    root = tmp_path_factory.mktemp("houses")
    return {
        level: make_textworld_games(root / str(level), {"train": 40, "valid": 20}, level=level, progress=False)
        for level in LEVELS
    }


@pytest.fixture(scope="session")
def treasure(tmp_path_factory):
    """A game of TextWorld's own generator: quests with tracked actions, doors, all rules."""
    options = GameOptions()
    options.seeds = 3
    make = textworld.challenges.CHALLENGES["tw-treasure_hunter"][1]
    path = tmp_path_factory.mktemp("treasure") / "game.json"
    make({"level": 12}, options).save(str(path))
    return str(path)


@pytest.fixture(scope="session")
def two_quests(tmp_path_factory):
    """A game worth 4 points: 3 for taking the cup, 1 for eating the pie; dropping the cup in the yard loses it."""
    maker = GameMaker()
    kitchen, yard = maker.new_room("kitchen"), maker.new_room("yard")
    maker.connect(kitchen.north, yard.south)
    maker.set_player(kitchen)
    cup, pie, bag = maker.new("o", "cup"), maker.new("f", "pie"), maker.new("c", "bag")
    cup.infos.desc, bag.infos.desc = "A blue cup.", "[if open]It is open.[end if]"
    bag.add_property("closed")
    kitchen.add(cup, bag)
    bag.add(pie)
    maker.quests = [
        Quest(
            win_events=[Event(conditions={maker.new_fact("in", cup, maker.inventory)})],
            fail_events=[Event(conditions={maker.new_fact("at", cup, yard)})],
            reward=3,
        ),
        Quest(
            win_events=[Event(conditions={maker.new_fact("eaten", pie)})],
            fail_events=[Event(conditions={maker.new_fact("at", cup, yard)})],
            reward=1,
        ),
    ]
    path = tmp_path_factory.mktemp("quests") / "game.json"
    game = maker.build()
    game.objective = "Take the cup and eat the pie."
    game.save(str(path))
    return str(path)


@pytest.fixture(scope="session")
def tracked(tmp_path_factory):
    """A quest given by its actions: TextWorld keeps a tree of them, and the game is lost once the pie is eaten."""
    maker = GameMaker()
    kitchen = maker.new_room("kitchen")
    maker.set_player(kitchen)
    pie, bag, table = maker.new("f", "pie"), maker.new("c", "bag"), maker.new("s", "table")
    bag.add_property("closed")
    kitchen.add(bag, table)
    bag.add(pie)
    progression, actions = GameProgression(maker.build()), []
    for name in ("open/c", "take/c", "put"):
        actions.append(next(action for action in progression.valid_actions if action.name == name))
        progression.update(actions[-1])
    maker.quests = [Quest(win_events=[Event(actions=actions)])]
    path = tmp_path_factory.mktemp("tracked") / "game.json"
    maker.build().save(str(path))
    return str(path)


@pytest.fixture(params=["house", "treasure", "two_quests", "tracked"])
def games(request, houses, treasure, two_quests, tracked):
    own = [path for level in LEVELS for path in TextworldEnvironment.tasks("train", root=str(houses[level]))[:4]]
    return {"house": own, "treasure": [treasure], "two_quests": [two_quests], "tracked": [tracked]}[request.param]


def play(environment, actions):
    return [environment.step(action) for action in actions]


def test_state_and_rewards_are_those_of_textworlds_own_environment(games):
    """Over random play: admissible commands, won, lost, score; invalid commands included."""
    rng = random.Random(1)
    for path in games:
        original = TextWorldEnv(EnvInfos(admissible_commands=True, score=True, won=True, lost=True))
        original.load(path)
        ours = TextworldEnvironment(reward="score")
        for _ in range(3):
            state, observation, points = original.reset(), ours.reset(path), 0.0
            assert list(observation.actions) == state["admissible_commands"]
            for turn in range(25):
                action = "fly to the moon" if turn == 3 else rng.choice(observation.actions)
                state, score, done = original.step(action)
                observation = ours.step(action)
                points += observation.reward
                assert list(observation.actions) == state["admissible_commands"]
                assert (observation.info["won"], observation.info["lost"]) == (state["won"], state["lost"])
                assert points * state["max_score"] == pytest.approx(score)
                assert (observation.terminated, observation.truncated) == (done, False)
                if done:
                    break


def test_a_restored_state_goes_on_exactly_like_the_original(games):
    rng = random.Random(2)
    for path in games:
        environment = TextworldEnvironment()
        for _ in range(4):
            observation = environment.reset(path)
            for _ in range(rng.randrange(10)):
                if not observation.terminated:
                    observation = environment.step(rng.choice(observation.actions))
            state = environment.save_state()
            actions, original = [], []
            while not observation.terminated and len(actions) < 15:
                actions.append(rng.choice(observation.actions))
                observation = environment.step(actions[-1])
                original.append(observation)
            for _ in range(2):
                environment.load_state(state)
                assert play(environment, actions) == original
                environment.load_state(state)  # wander off between the two replays
                play(environment, rng.sample(actions, len(actions)))


def test_a_restored_state_can_be_lost_again(tracked):
    environment = TextworldEnvironment()
    environment.reset(tracked)
    play(environment, ["open bag", "take pie from bag"])
    state = environment.save_state()
    for _ in range(3):
        lost = environment.step("eat pie")
        assert lost.info["lost"] and lost.terminated
        environment.load_state(state)
    assert environment.step("put pie on table").info["won"]


def test_states_are_saved_and_loaded_in_less_than_a_millisecond(games):
    environment = TextworldEnvironment()
    environment.reset(games[-1])

    def fastest(function):
        times = []
        for _ in range(50):
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
        return min(times)

    state = environment.save_state()
    assert fastest(environment.save_state) < 0.001
    assert fastest(lambda: environment.load_state(state)) < 0.001


@pytest.mark.parametrize("reward", ["win", "score"])
def test_the_expert_wins_and_the_rewards_sum_to_one(games, reward):
    for path in games:
        environment = TextworldEnvironment(reward=reward)
        environment.reset(path)
        actions = environment.expert_actions() or ["take cup", "open bag", "take pie from bag", "eat pie"]
        observations = play(environment, actions)
        assert observations[-1].terminated and observations[-1].info["won"]
        assert not any(o.terminated for o in observations[:-1])
        assert sum(o.reward for o in observations) == pytest.approx(1.0)
        if reward == "win":
            assert [o.reward for o in observations[:-1]] == [0.0] * (len(actions) - 1)


def test_score_reward_is_each_quests_share(two_quests):
    environment = TextworldEnvironment(reward="score")
    environment.reset(two_quests)
    taken = environment.step("take cup")
    assert (taken.reward, taken.info["score"]) == (0.75, 0.75)
    assert [o.reward for o in play(environment, ["open bag", "take pie from bag", "eat pie"])] == [0.0, 0.0, 0.25]


def test_losing_terminates_without_reward(houses):
    path = next(
        path
        for path in TextworldEnvironment.tasks("train", root=str(houses[2]))
        if json.loads(Path(path).read_text())["objective"].split()[4] in ("apple", "carrot")
    )
    environment = TextworldEnvironment()
    environment.reset(path)
    food = json.loads(Path(path).read_text())["objective"].split()[4]
    take = next(i for i, a in enumerate(environment.expert_actions()) if a.startswith("take"))
    play(environment, environment.expert_actions()[: take + 1])
    lost = environment.step(f"eat {food}")
    assert lost.terminated and lost.info["lost"] and lost.reward == 0.0
    assert lost.text.endswith("You have lost.")
    after = environment.step("look")
    assert after.terminated and after.reward == 0.0


def test_a_command_that_is_not_understood_is_an_ordinary_step(two_quests):
    environment = TextworldEnvironment()
    before = environment.reset(two_quests)
    after = environment.step("take the moon")
    assert after.text == "You can't do that."
    assert (after.actions, after.reward, after.terminated) == (before.actions, 0.0, False)


def test_the_text_tells_what_the_facts_say(two_quests):
    environment = TextworldEnvironment()
    first = environment.reset(two_quests)
    assert first.text == (
        "Take the cup and eat the pie.\n\nYou are in the kitchen. You see a closed bag and a cup. Exits: north."
    )
    texts = {
        "inventory": "You carry nothing.",
        "examine cup": "You look at the cup. A blue cup.",
        "examine bag": "You look at the bag. It is closed.",
        "open bag": "You open the bag. Inside: a pie.",
        "look": "You are in the kitchen. You see an open bag with a pie in it and a cup. Exits: north.",
        "take pie from bag": "You take the pie from the bag.",
        "close bag": "You close the bag.",
        "go north": "You are in the yard. Exits: south.",
        " inventory ": "You carry a pie.",
        "drop pie": "You drop the pie.",
    }
    assert {action: environment.step(action).text for action in texts} == texts


def test_doors_and_locks_are_told(tmp_path):
    maker = GameMaker()
    hall, attic = maker.new_room("hall"), maker.new_room("attic")
    door = maker.new_door(maker.connect(hall.east, attic.west), "oak door")
    door.add_property("locked")
    key, desk = maker.new("k", "iron key"), maker.new("s", "desk")
    maker.add_fact("match", key, door)
    hall.add(desk)
    desk.add(key)
    maker.set_player(hall)
    maker.quests = [Quest(win_events=[Event(conditions={maker.new_fact("at", maker.player, attic)})])]
    maker.build().save(str(tmp_path / "game.json"))
    environment = TextworldEnvironment()
    first = environment.reset(str(tmp_path / "game.json")).text
    assert first.endswith("You see a desk with an iron key on it. Exits: east (locked oak door).")
    texts = [o.text for o in play(environment, ["take iron key from desk", "unlock oak door with iron key", "look"])]
    assert texts[1] == "You unlock the oak door with the iron key."
    assert texts[2] == "You are in the hall. You see a desk. Exits: east (closed oak door)."
    assert environment.step("examine oak door").text.startswith("You look at the oak door.")
    assert play(environment, ["open oak door", "go east"])[1].info["won"]


def test_a_missing_or_broken_game_is_a_task_error(tmp_path):
    environment = TextworldEnvironment()
    with pytest.raises(TaskError, match="make-games"):
        environment.reset(str(tmp_path / "none.json"))
    (tmp_path / "broken.json").write_text('{"version": 1}')
    with pytest.raises(TaskError, match="no game of TextWorld"):
        environment.reset(str(tmp_path / "broken.json"))


def test_tasks_are_the_games_of_a_split_in_order(houses, tmp_path):
    tasks = TextworldEnvironment.tasks("valid", root=str(houses[1]))
    assert [Path(task).name for task in tasks] == [f"{i:04d}.json" for i in range(20)]
    with pytest.raises(TaskError, match="make-games"):
        TextworldEnvironment.tasks("test", root=str(houses[1]))


def test_an_unknown_reward_is_refused():
    with pytest.raises(ValueError, match="'win' or 'score'"):
        TextworldEnvironment(reward="dense")


# --- made games -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_games_state_their_objective_in_short_texts_and_few_commands(houses, level):
    rng = random.Random(3)
    for task in TextworldEnvironment.tasks("train", root=str(houses[level])):
        environment = TextworldEnvironment()
        observation = environment.reset(task)
        assert observation.text.startswith("Your task: put the ")
        assert len(observation.text.split()) < 60
        assert len(environment.expert_actions()) in range(LEVELS[level].moves[0], LEVELS[level].moves[1] + 1)
        for _ in range(12):
            assert 3 <= len(observation.actions) <= 25
            observation = environment.step(rng.choice(observation.actions))
            assert len(observation.text.split()) < 45
            if observation.terminated:
                break


@pytest.mark.parametrize("level", LEVELS)
def test_train_and_valid_games_differ_in_content_and_share_their_words(houses, level):
    manifest = json.loads((houses[level] / "manifest.json").read_text())
    assert len(set(manifest["games"].values())) == len(manifest["games"]) == 60
    contents, words = {}, {}
    for split in ("train", "valid"):
        games = [Game.load(task) for task in TextworldEnvironment.tasks(split, root=str(houses[level]))]
        contents[split] = {(game.objective, *sorted(named_facts(game))) for game in games}
        words[split] = {info.name for game in games for info in game.infos.values()}
    assert len(contents["train"]) == 40 and len(contents["valid"]) == 20
    assert not contents["train"] & contents["valid"]
    assert words["valid"] <= words["train"]


def named_facts(game):
    names = {key: info.name or key for key, info in game.infos.items()}
    return [f"{fact.name} {' '.join(names[a.name] for a in fact.arguments)}" for fact in game.world.facts]


@pytest.mark.parametrize(("level", "low", "high"), [(1, 0.03, 0.2), (2, 0.01, 0.2), (3, 0.005, 0.2)])
def test_a_random_policy_sometimes_wins_in_twelve_steps(houses, level, low, high):
    rng, wins, episodes = random.Random(0), 0, 0
    environment = TextworldEnvironment()
    for task in TextworldEnvironment.tasks("train", root=str(houses[level])):
        first = environment.reset(task)
        start = environment.save_state()
        for _ in range(15):
            environment.load_state(start)
            observation = first
            for _ in range(12):
                observation = environment.step(rng.choice(observation.actions))
                if observation.terminated:
                    break
            wins += observation.info["won"]
            episodes += 1
    assert low <= wins / episodes <= high


SCRIPT = """
import hashlib, random, sys
from pathlib import Path
from verl_bpo.envs.textworld.generate import make_textworld_games
from verl_bpo.envs.textworld.environment import TextworldEnvironment
folder = make_textworld_games(sys.argv[1], {"train": 4, "valid": 2}, seed=5, level=4, progress=False)
seen = hashlib.sha256()
for path in sorted(folder.glob("*/*.json")):
    seen.update(path.read_bytes())
    environment, rng = TextworldEnvironment(), random.Random(0)
    observation = environment.reset(str(path))
    for _ in range(30):
        seen.update(repr(observation).encode())
        observation = environment.step(rng.choice(observation.actions))
print(seen.hexdigest())
"""


def test_games_and_texts_are_the_same_in_every_process(tmp_path):
    """Python's hash seed orders TextWorld's sets; neither a file nor an observation may show it."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_another_seed_makes_other_games(tmp_path):
    folders = [make_textworld_games(tmp_path / str(s), {"train": 3}, seed=s, progress=False) for s in (0, 1)]
    games = [json.loads((folder / "manifest.json").read_text())["games"].values() for folder in folders]
    assert not set(games[0]) & set(games[1])


def test_making_games_again_does_nothing_and_completes_what_is_missing(tmp_path):
    make = {"out_dir": tmp_path, "counts": {"train": 3, "valid": 2}, "progress": False}
    make_textworld_games(**make)
    files = sorted(tmp_path.glob("*/*.json"))
    before = {file: (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files}
    make_textworld_games(**make)
    assert {file: file.stat().st_mtime_ns for file in files} == {file: t for file, (t, _) in before.items()}
    files[1].unlink()
    make_textworld_games(**make)
    assert {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files} == {
        file: digest for file, (_, digest) in before.items()
    }
    assert not list(tmp_path.rglob("*.part"))


def test_an_interrupted_run_is_completed_with_the_same_options_only(tmp_path, monkeypatch):
    written = []

    def interrupted(game):
        written.append(game)
        if len(written) == 3:
            raise KeyboardInterrupt
        return serialize(game)

    serialize = make_games._serialized
    monkeypatch.setattr(make_games, "_serialized", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_textworld_games(tmp_path, {"train": 4}, progress=False)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="other options"):
        make_textworld_games(tmp_path, {"train": 1}, progress=False)
    make_textworld_games(tmp_path, {"train": 4}, progress=False)
    assert len(TextworldEnvironment.tasks("train", root=str(tmp_path))) == 4


def test_games_of_other_options_are_never_mixed(tmp_path):
    make_textworld_games(tmp_path, {"train": 2}, progress=False)
    with pytest.raises(ValueError, match="other options"):
        make_textworld_games(tmp_path, {"train": 2}, level=2, progress=False)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no manifest"):
        make_textworld_games(tmp_path, {"train": 2}, progress=False)
    with pytest.raises(ValueError, match="level=9"):
        make_textworld_games(tmp_path / "x", level=9)
    with pytest.raises(ValueError, match="at least one"):
        make_textworld_games(tmp_path / "x", {"train": 0})
