"""The README's example of an own environment."""

from pathlib import Path

from verl_bpo.sandbox import MemorySandbox
from verl_bpo.sandbox.loading import load_environment

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_examples_game_can_be_won_and_forked():
    game = load_environment(f"{REPOSITORY}/recipes/own_env/number_game.py:NumberGame")
    with MemorySandbox(game()) as sandbox:
        sandbox.reset(game.tasks()[0])
        first = sandbox.step("guess 5").text
        snapshot = sandbox.snapshot()
        forks = snapshot.fork(9)
        answers = [fork.step(f"guess {i}") for i, fork in enumerate(forks, start=1)]
    assert first in ("Higher.", "Lower.", "Right.")
    assert first == "Right." or sum(a.reward for a in answers) == 1.0


def test_the_readme_shows_the_example_as_it_is():
    example = (REPOSITORY / "recipes/own_env/number_game.py").read_text().strip()
    assert example in (REPOSITORY / "README.md").read_text()


def test_the_readme_lists_every_key():
    from verl_bpo.commands.main import config_table

    readme = (REPOSITORY / "README.md").read_text()
    assert [key for key, _, _ in config_table() if f"`{key}`" not in readme] == []
