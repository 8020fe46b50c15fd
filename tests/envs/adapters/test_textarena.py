"""TextArena's own games, those that need no download."""

import random

import pytest

textarena = pytest.importorskip("textarena", reason="no textarena: pip install textarena")

import numpy

from verl_bpo.commands.check_env import check_environment
from verl_bpo.sandbox import MemorySandbox, TaskError
from verl_bpo.sandbox.fork import ForkBackend
from verl_bpo.sandbox.loading import EnvironmentMaker, EnvironmentUnavailable, load_environment
from verl_bpo.sandbox.memory import MemoryBackend
from verl_bpo.sandbox.replay import ReplayBackend

BACKENDS = {"memory": MemoryBackend, "fork": ForkBackend, "replay": ReplayBackend}


def make(game, **kwargs):
    return load_environment(f"textarena:{game}")(**kwargs)


def test_a_game_passes_and_every_backend_is_exact():
    report = check_environment("textarena:GuessTheNumber-v0", ["0"], max_turns=3)
    assert report.ok and report.backends == {"fork": "", "memory": "", "replay": ""}, report.render()


def test_a_game_is_played_to_its_end():
    env = make("GuessTheNumber-v0")
    first = env.reset("0")
    assert "guess the number between 1 and 20" in first.text and first.actions is None
    answers = [env.step(str(guess)) for guess in (1, 20)]
    assert [answer.text for answer in answers] == ["The target number is higher.", "The target number is lower."]
    last = env.step(f"[{env._game.game_number}]")
    assert last.terminated and last.reward == 1.0 and last.info == {"won": True, "score": 1.0}
    assert "guessed the correct number" in last.text


def test_a_lost_game_has_its_partial_reward_and_is_not_won():
    env = make("GuessTheNumber-v0")
    env.reset("0")
    env.step("2"), env.step("2")
    last = env.step("2")
    assert last.terminated and not last.truncated and 0 < last.reward < 1 and last.info["won"] is False


@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_a_reason_in_the_rewards_place_is_a_reward_of_nothing(game):
    env = make(game)
    env.reset("0")
    env.step("xyzzy")
    last = env.step("xyzzy")
    assert last.terminated and last.reward == 0.0 and "format" in last.text


def test_seeds_are_other_games_and_a_task_is_one():
    env = make("GuessTheNumber-v0")
    numbers = [(env.reset(str(task), seed), env._game.game_number)[1] for task in range(5) for seed in (0, 1)]
    assert len(set(numbers)) > 3
    assert numbers == [(env.reset(str(task), seed), env._game.game_number)[1] for task in range(5) for seed in (0, 1)]
    with pytest.raises(TaskError, match="use a seed such as 7"):
        env.reset("first")


@pytest.mark.parametrize("backend", BACKENDS)
def test_forks_draw_the_same_tiles_as_their_origin(backend):
    """2048 draws a tile at every move from Python's global random numbers, which are part of a snapshot."""
    started = BACKENDS[backend]("textarena:2048-v0", {})
    try:
        sandbox = started.sandbox()
        sandbox.reset("0")
        for move in ("up", "left", "up"):
            sandbox.step(move)
        forks = sandbox.snapshot().fork(2)
        moves = ["down", "left", "down", "left"]
        played = [[branch.step(move).text for move in moves] for branch in (sandbox, *forks)]
        assert played[0] == played[1] == played[2] and len(set(played[0])) == len(moves)
    finally:
        started.close()


def test_branches_that_take_turns_feel_nothing_of_each_others_chance():
    sandbox = MemorySandbox(make("2048-v0"))
    sandbox.reset("0")
    (alone,) = sandbox.snapshot().fork()
    expected = [alone.step(move).text for move in ("up", "left", "down", "left")]
    one, other = sandbox.snapshot().fork(2)
    taken = []
    for move in ("up", "left", "down", "left"):
        taken.append(one.step(move).text)
        other.step("right" if move == "up" else move)
        random.random(), numpy.random.rand()
    assert taken == expected


def test_the_process_keeps_its_own_random_numbers():
    random.seed(1), numpy.random.seed(1)
    expected = random.random(), numpy.random.rand()
    random.seed(1), numpy.random.seed(1)
    env = make("2048-v0")
    env.reset("0"), env.step("up")
    assert (random.random(), numpy.random.rand()) == expected


@pytest.mark.parametrize(
    "game, words",
    [
        ("TicTacToe-v0", "can't be played by one player: The number of players has to be 2"),
        ("GuessTheNumber-v9", "no such game: use one of GuessTheNumber-v0"),
    ],
)
def test_what_cannot_be_played_says_why_in_one_line(game, words):
    with pytest.raises(EnvironmentUnavailable, match=words) as error:
        EnvironmentMaker(f"textarena:{game}", {})
    assert "\n" not in str(error.value)


def test_a_game_without_its_words_names_the_download(monkeypatch):
    """As NLTK says it where its data is missing; whether it is here doesn't matter."""

    def missing(self, num_players, seed=None):
        raise LookupError(
            "\n**\n  Resource 'words' not found.\n\n  >>> import nltk\n  >>> nltk.download('words')\n\n  Searched in:\n"
        )

    from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv

    monkeypatch.setattr(GuessTheNumberEnv, "reset", missing)
    with pytest.raises(EnvironmentUnavailable, match=r"words of NLTK's, which aren't here: nltk.download\('words'\)"):
        EnvironmentMaker("textarena:GuessTheNumber-v0", {})
