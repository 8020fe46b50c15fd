"""What all runs through the trainer start from."""

from pathlib import Path

import pytest
from test_training import warm_start

from verl_bpo.commands.make_data import write_prompts
from verl_bpo.envs.textworld.generate import make_textworld_games

LETTERS_GAME = f"{Path(__file__).with_name('letters_game.py')}:LettersGame"


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Games, prompt files and a policy that has seen a few demonstrations. Runs are told apart by their names."""
    folder = tmp_path_factory.mktemp("run")
    make_textworld_games(folder / "games", {"train": 12, "valid": 4}, level=1, progress=False)
    for split in ("train", "valid"):
        write_prompts("textworld", split, folder / f"{split}.parquet", kwargs={"root": str(folder / "games")})
        write_prompts(LETTERS_GAME, split, folder / f"letters-{split}.parquet", limit=8)
    write_prompts(LETTERS_GAME, "train", folder / "letters.parquet", limit=4)
    warm_start(folder / "games", folder / "warmstart", steps=2)
    return folder
