"""The site's example of an own environment."""

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


def test_the_site_shows_the_example_as_it_is():
    page = (REPOSITORY / "docs/environments.md").read_text()
    assert '--8<-- "recipes/own_env/number_game.py"' in page  # pymdownx.snippets puts the file there
