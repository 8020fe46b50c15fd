"""`verl-bpo check-env` on our own environments, and on one that breaks each rule."""

import json
from pathlib import Path

import pytest
from shells import need_isolation

from verl_bpo.commands import main as cli
from verl_bpo.commands.check_env import check_environment, tried
from verl_bpo.envs.textworld.generate import make_textworld_games
from verl_bpo.sandbox.loading import load_environment

REPOSITORY = Path(__file__).resolve().parents[2]
BAD = f"{REPOSITORY}/tests/envs/bad_worlds.py"


@pytest.mark.parametrize(
    "world, check, words",
    [
        ("SaysNumbers", "contract", "text is int, not str"),
        ("ListsActions", "contract", "neither None nor a tuple of str"),
        ("NotANumber", "contract", "reward=nan is no finite number"),
        ("OverAtOnce", "contract", "over as soon as it is reset"),
        ("UselessExpert", "contract", "expert_actions() earns 0.0"),
        ("UsesGlobalChance", "determinism", "draw chance from reset's seed"),
        ("RemembersEpisodes", "determinism", "keep no state between resets"),
        ("ListsASet", "other process", "sort what comes out of sets"),
        ("RaisesAtNonsense", "nonsense", "step('') raised ValueError"),
        ("SharesItsLog", "restore", "save_state must hold all"),
        ("ForgetsItsLog", "restore", "restored to turn"),
        ("CantBeCopied", "restore", "bpo.env.backend=fork or replay"),
        ("SharedBoard", "independence", "instances share something"),
        ("LeavesFiles", "close", "3 open files behind"),
        ("LeavesThreads", "close", "threads behind"),
    ],
)
def test_a_broken_rule_is_found_and_explained(world, check, words):
    report = check_environment(f"{BAD}:{world}", ["a", "b"])
    found = {name: detail for name, held, detail in report.findings if not held}
    assert check in found and words in found[check], report.render()
    first = next(name for name, held, _ in report.findings if not held)
    assert first == check, report.render()  # nothing else is blamed before it
    assert report.costs == {}


def test_a_difference_names_its_place():
    report = check_environment(f"{BAD}:ForgetsItsLog", ["a"])
    assert "task a, random episode, turn 2 (" in report.render() and "at character" in report.render()


@pytest.mark.parametrize("name", [f"{BAD}:Counter", f"{REPOSITORY}/recipes/own_env/number_game.py:NumberGame"])
def test_an_environment_that_keeps_the_rules_passes(name):
    report = check_environment(name, ["train-1", "train-2"])
    assert report.ok, report.render()
    assert report.costs["snapshot bytes"] > 0 and report.costs["step"] >= 0


def test_each_backend_is_said_to_be_exact_or_why_not():
    report = check_environment(f"{BAD}:Counter", ["a"], max_turns=4)
    assert report.backends == {"fork": "", "memory": "", "replay": ""}, report.render()
    assert "fork           exact" in report.render()


def test_what_only_a_process_or_its_actions_hold_passes_by_those():
    report = check_environment(f"{BAD}:CantBeCopied", ["a"], max_turns=4)
    assert not report.ok and not report.backends["replay"] and "bpo.env.backend=fork" in report.backends["memory"]
    report = check_environment(f"{BAD}:CantBeCopied", ["a"], max_turns=4, backend="replay")
    assert report.ok and "save" not in report.costs, report.render()


def test_a_backend_that_forgets_is_named():
    report = check_environment(f"{BAD}:ForgetsItsLog", ["a"], max_turns=6)
    assert "turn" in report.backends["memory"] and report.backends["fork"] == report.backends["replay"] == ""


def test_textworld_passes(tmp_path):
    pytest.importorskip("textworld")
    make_textworld_games(tmp_path, {"train": 2, "valid": 1}, level=4, progress=False)
    tasks = load_environment("textworld").tasks(root=str(tmp_path))
    report = check_environment("textworld", tasks)
    assert report.ok, report.render()


def test_alfworld_passes(tmp_path):
    pytest.importorskip("alfworld")
    from verl_bpo.envs.alfworld.generate import make_alfworld_games

    make_alfworld_games(tmp_path, {"train": 2}, progress=False)
    tasks = load_environment("alfworld").tasks(root=str(tmp_path))
    report = check_environment("alfworld", tasks, max_turns=6)
    assert report.ok, report.render()
    assert report.costs["save"] < 1.0 and report.costs["load"] < 1.0


def test_webshop_passes(small_shop):
    report = check_environment("webshop", ["0", "3"], {"data_dir": str(small_shop)})
    assert report.ok, report.render()
    assert report.costs["save"] < 1.0 and report.costs["snapshot bytes"] < 4096


def test_the_command_prints_its_findings_and_fails_with_them(capsys, monkeypatch):
    def run(world):
        monkeypatch.setattr("sys.argv", ["verl-bpo", "check-env", f"{BAD}:{world}", "--tasks", "2"])
        return cli.main(), capsys.readouterr().out

    code, said = run("Counter")
    assert code == 0 and said.count("ok  ") == 9 and "snapshot bytes" in said
    code, said = run("SharesItsLog")
    assert code == 1 and "NO  restore" in said


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nosuch"], "no environment named 'nosuch': use one of "),
        ([f"{BAD}:Nothing"], "has no class Nothing"),
        ([f"{BAD}:ListsNoTasks"], "ListsNoTasks lists no tasks: write its tasks(split)"),
        ([f"{REPOSITORY}/recipes/own_env/number_game.py:NumberGame", "--root", "x"], "which it doesn't take"),
        (["textworld", "--kwargs", "{"], "--kwargs { is no JSON"),
        (["textworld", "--kwargs", "[1]"], "--kwargs [1] is no JSON object"),
        (
            ["alfworld", "--kwargs", '{"product": 1}'],
            "environment alfworld got an unexpected keyword argument 'product'",
        ),
    ],
)
@pytest.mark.parametrize("command", [["check-env"], ["make-data", "prompts.parquet"]])
def test_wrong_arguments_of_an_environment_end_in_one_line(capsys, monkeypatch, command, arguments, said):
    monkeypatch.setattr("sys.argv", ["verl-bpo", command[0], arguments[0], *command[1:], *arguments[1:]])
    assert cli.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"verl-bpo {command[0]}: ") and said in line


def test_arguments_of_the_constructor_are_passed_on(small_shop):
    report = check_environment(
        "webshop", ["0"], json.loads(json.dumps({"data_dir": str(small_shop), "goals": "human"}))
    )
    assert report.ok, report.render()


@pytest.mark.parametrize("files", ["overlay", "git"])
def test_a_shell_environment_is_played_twice_and_its_files_are_compared(files):
    """With commands that show the clock, temporary names and process numbers, which it declares as volatile."""
    need_isolation()
    report = check_environment(f"{BAD}:Clerk", ["desk"], {"files": files}, max_turns=10)
    assert report.ok, report.render()
    (detail,) = (detail for name, _, detail in report.findings if name == "same twice")
    assert "and so is what they leave behind after every turn" in detail and "times" in detail


@pytest.mark.parametrize(
    "extra, check, words",
    [
        ("head -c 4 /dev/urandom > secret", "same twice", "/secret is another afterwards"),
        ("touch x$(head -c 4 /dev/urandom | sha256sum | head -c 9)", "same twice", "/x"),
        ("head -c 4 /dev/urandom | sha256sum", "determinism", "expert episode, turn 1 ('echo one > letter'): text '"),
        ("echo 7$(date +%N)", "determinism", "declare what may differ as volatile"),
        ("date +%T.%N; mktemp; echo took $(date +%N | tail -c 3)ms", "", ""),
    ],
)
def test_chance_in_a_shell_is_found_where_it_first_shows(extra, check, words):
    need_isolation()
    report = check_environment(f"{BAD}:Clerk", ["desk"], {"extra": extra}, max_turns=1)
    found = [(name, detail) for name, held, detail in report.findings if not held]
    assert (found[0][0] if found else "") == check and words in (found[0][1] if found else ""), report.render()


@pytest.mark.parametrize(
    "world, extra, ok",
    [
        ("StrictClerk", "date +%T.%N", False),
        ("ClerkWithPort", "echo port $(head -c 2 /dev/urandom | od -An -tu2 | tr -d ' ')", True),
        ("ClerkWithPort", "echo sport$(head -c 2 /dev/urandom | od -An -tu2 | tr -d ' ')", False),
    ],
)
def test_only_what_is_declared_is_left_out(world, extra, ok):
    need_isolation()
    report = check_environment(f"{BAD}:{world}", ["desk"], {"extra": extra}, max_turns=1)
    found = [detail for name, held, detail in report.findings if not held and name == "determinism"]
    assert bool(found) is not ok, report.render()


def test_tools_and_async_environments_are_played_by_calls(tmp_path):
    cups = f"trl:{Path(__file__).parents[2] / 'recipes' / 'extend' / 'cups.py'}:Cups"
    report = check_environment(cups, ["train-0", "train-1"])
    assert report.ok, report.render()
    assert report.backends == {"fork": "", "memory": "", "replay": ""}


def test_calls_that_are_tried_are_right_and_wrong_ones():
    kind = {"cup": {"type": "string", "enum": ["red", "blue"]}, "times": {"type": "integer"}}
    parameters = {"type": "object", "properties": kind, "required": ["cup"]}
    tool = {"type": "function", "function": {"name": "lift", "description": "Lift.", "parameters": parameters}}
    assert [str(action) for action in tried([tool])] == [
        'lift({"cup": "red", "times": 0})',
        'lift({"cup": "blue", "times": 1})',
        'lift({"cup": "red", "times": 5})',
        'lift({"no such argument": 1})',
        "no_such_tool({})",
        'lift({"cup": "red", "times": 0})\nlift({"cup": "blue", "times": 1})',
        "That is all.",
    ]
    assert tried(()) == ()
