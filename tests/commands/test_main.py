"""The command line: one module a command, found and imported by its name."""

import subprocess
import sys

import pytest

import verl_bpo.envs
from verl_bpo.commands import main as cli

HEAVY = ("numpy", "omegaconf", "pandas", "torch", "transformers", "verl", "ray")
OWN_GENERATOR = """
from pathlib import Path
LEVELS = {4: "hard"}
def make(out, train, valid, seed, level):
    Path(out).write_text(f"{train} {valid} {seed} {level}")
"""


def run(monkeypatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["verl-bpo", *map(str, words)])
    return cli.main()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_listed_command_explains_itself(name, capsys, monkeypatch):
    if name == "warmstart":
        pytest.skip("it only points elsewhere")
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, name, "--help")
    assert end.value.code == 0 and f"usage: verl-bpo {name}" in capsys.readouterr().out


def test_help_imports_no_library():
    code = (
        f"import sys; sys.argv = ['verl-bpo', '--help']\nfrom verl_bpo.commands.main import main\n"
        f"try: main()\nexcept SystemExit: print(sorted(set({HEAVY}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in cli.COMMANDS) and done.stdout.splitlines()[-1] == "[]"


def test_an_environments_generator_is_found_by_its_name(tmp_path, monkeypatch):
    package = tmp_path / "envs" / "newworld"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""A new world."""\nENVIRONMENT = "x:X"\nINSTALL = ""\n')
    (package / "generate.py").write_text(OWN_GENERATOR)
    monkeypatch.setattr(verl_bpo.envs, "__path__", [*verl_bpo.envs.__path__, str(package.parent)])
    words = ("--kind", "newworld", "--train", 3, "--valid", 2, "--seed", 7, "--level", 4)
    assert run(monkeypatch, "make-games", tmp_path / "out", *words) == 0
    assert (tmp_path / "out").read_text() == "3 2 7 4"


def test_kinds_of_games_are_the_environments_with_a_generator(capsys, monkeypatch, tmp_path):
    with pytest.raises(SystemExit):
        run(monkeypatch, "make-games", tmp_path, "--kind", "webshop")
    error = capsys.readouterr().err
    assert "invalid choice: 'webshop'" in error and all(kind in error for kind in ("alfworld", "repair", "textworld"))


@pytest.mark.parametrize(
    "kind, said",
    [
        ("textworld", "use one of 0, 1, 2, 3, 4"),
        ("repair", "use one of 1, 2, 3"),
        ("search", "use one of 0, 1, 2, 3, 4: the number of hops"),
        ("alfworld", "have 0 (few things a room) and 1 (whole rooms)"),
    ],
)
def test_a_level_that_a_kind_has_not_is_answered_with_those_it_has(kind, said, capsys, monkeypatch, tmp_path):
    if kind not in ("repair", "search"):
        pytest.importorskip(kind)
    assert run(monkeypatch, "make-games", tmp_path / "out", "--kind", kind, "--level", 9) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verl-bpo make-games: level=9: ") and said in line


def test_missing_dependencies_of_a_generator_are_named_with_their_installation(capsys, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "verl_bpo.envs.textworld.generate", raising=False)
    monkeypatch.setitem(sys.modules, "textworld", None)
    assert run(monkeypatch, "make-games", tmp_path / "out") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install textworld" in line


def test_compare_may_be_left_out():
    _, arguments = cli.parse(["report", "runs", "--out", "o"])
    assert (arguments.what, arguments.runs) == ("compare", ["runs"])
    _, arguments = cli.parse(["report", "trees", "d", "--out", "o"])
    assert arguments.what == "trees"


def test_the_old_name_of_imitation_says_the_new_one(capsys, monkeypatch):
    assert run(monkeypatch, "warmstart", "--out", "x", "--hidden-size", 64) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "python recipes/imitation/train.py" in line


def test_an_unknown_option_is_refused(capsys, monkeypatch):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "config", "--all")
    assert end.value.code == 2 and "unrecognized arguments: --all" in capsys.readouterr().err
