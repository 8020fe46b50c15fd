import json

import pytest
from shells import need_isolation

from verl_bpo.envs.repair.generate import FUNCTIONS, make_repairs
from verl_bpo.sandbox import MemorySandbox, SandboxPool, TaskError
from verl_bpo.sandbox.loading import load_environment
from verl_bpo.shells.environment import SUBMIT, read_command, shorten


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repairs")
    for level in (1, 2, 3):
        make_repairs(folder / str(level), {"train": 6, "valid": 3}, level=level, progress=False)
    return folder


@pytest.fixture
def environment():
    need_isolation()
    environment = load_environment("repair")()
    yield environment
    environment.close()


def tasks(root, level, split="train"):
    return load_environment("repair").tasks(split, root=root / str(level))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_every_bug_shows_in_a_call(function):
    def run(source):
        names = {}
        exec(source, names)
        return [_value(names[function.name], call) for call in function.calls]

    def _value(f, call):
        try:
            return f(*json.loads(json.dumps(call)))
        except Exception as error:
            return type(error)

    right = run(function.source)
    for good, bad in function.bugs:
        assert function.source.count(good) == 1 and run(function.source.replace(good, bad)) != right, (good, bad)


def test_the_same_seed_makes_the_same_tasks_and_no_task_is_in_two_splits(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_repairs(tmp_path / name, {"train": 40, "valid": 20}, seed=seed, progress=False)
    a, b, c = (
        {str(p.relative_to(tmp_path / name)): p.read_text() for p in sorted((tmp_path / name).glob("*/*.json"))}
        for name in "abc"
    )
    assert a == b != c and len(a) == 60
    assert len({json.dumps(json.loads(text)["files"], sort_keys=True) for text in a.values()}) == 60
    with pytest.raises(ValueError, match="other options"):
        make_repairs(tmp_path / "a", {"train": 40, "valid": 20}, seed=3, progress=False)
    with pytest.raises(ValueError, match="ask for fewer"):
        make_repairs(tmp_path / "many", {"train": 100_000}, progress=False)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_expert_wins_and_doing_nothing_loses(environment, root, level):
    for task in tasks(root, level)[:3]:
        environment.reset(task)
        for action in environment.expert_actions():
            last = environment.step(action)
        assert last.terminated and last.reward == 1.0 and last.info["won"]
        environment.reset(task)
        last = environment.step("submit")
        assert last.terminated and last.reward == 0.0 and not last.info["won"] and last.info["score"] < 1


def test_exactly_the_right_offers_win(environment, root):
    (task,) = tasks(root, 1)[:1]
    offers = [offer for offer in environment.reset(task).actions if offer.startswith("sed")]
    won = []
    for offer in offers:
        environment.reset(task)
        environment.step(offer)
        won += [offer] if environment.step("submit").reward else []
    assert won == [action for action in environment.expert_actions() if action.startswith("sed")] and len(offers) > 2


def test_what_is_done_to_the_tests_or_to_the_comparison_does_not_pass(environment, root):
    (task,) = tasks(root, 1)[:1]
    for attack in (
        "echo 'print(0, \"failed\")' > tests.py",
        "rm tests.py",
        "for f in *.py; do echo 'import sys, os; print([[1]] * 99); os._exit(0)' > $f; done",
        "printf 'import builtins\\nclass A(dict):\\n    __eq__ = lambda *a: True\\n' > sitecustomize.py",
        "for f in *.py; do echo 'import json; json.dumps = lambda x: \"[]\"' >> $f; done",
        "mkdir json; echo 'raise SystemExit' > json/__init__.py; ln -sf /etc/passwd tests.py",
    ):
        environment.reset(task)
        environment.step(attack)
        assert environment.step(f"echo {SUBMIT}").reward == 0.0, attack


@pytest.mark.parametrize(
    "words",
    [
        "import atexit; atexit.register(print, 'bye')",
        "import sys; sys.stdout.buffer.write(b'\\xe9' * 3000000)",
        "import sys; sys.stderr.write('a warning\\n'); import os; os.write(1, b'x')",
    ],
)
def test_what_a_repaired_package_says_does_not_spoil_its_score(environment, root, words):
    (task,) = tasks(root, 1)[:1]
    environment.reset(task)
    *work, submit = environment.expert_actions()
    for action in (*work, f"for f in *.py; do printf '%s\\n' \"{words}\" >> $f; done"):
        environment.step(action)
    assert environment.step(submit).reward == 1.0


@pytest.mark.parametrize("line, reason", [("while True: pass", "timeout"), ("import os; os._exit(3)", "no_end")])
def test_why_a_repair_was_not_judged_is_said(environment, root, line, reason):
    environment.reset(tasks(root, 1)[0])
    environment._timeout = 3
    environment.step(f"for f in *.py; do echo '{line}' > $f; done")
    info = environment.step("submit").info
    assert info["unjudged"] == reason and info["problem"] and not info["won"]


def test_branches_of_a_repair_are_independent(environment, root):
    (task,) = tasks(root, 1)[:1]
    trunk = MemorySandbox(environment)
    trunk.reset(task)
    *work, submit = environment.expert_actions()
    snapshot = trunk.snapshot()
    for action in work:
        trunk.step(action)
    fixed = trunk.snapshot()
    assert fixed.nbytes > 0
    (wrong,) = snapshot.fork()
    (right,) = fixed.fork()
    assert wrong.step("rm -rf *").text == "(no output)"
    assert wrong.step(submit).reward == 0.0
    assert right.step(submit).reward == 1.0
    assert trunk.step(submit).reward == 1.0
    trunk.close()


def test_a_world_lost_with_its_process_is_rebuilt(root):
    need_isolation()
    with SandboxPool("repair") as pool, pool.open() as world:
        (task,) = tasks(root, 1)[:1]
        trunk, _ = world.reset(task)
        trunk.step("echo 1 > x")
        snapshot = trunk.snapshot()
        world._worker.stop()
        (fork,) = snapshot.fork()
        assert fork.step("cat x").text == "1" and world.recoveries == 1


def test_a_command_is_one_block_or_the_whole_action():
    assert read_command(" ls -la ")[0] == "ls -la"
    assert read_command("I look.\n```bash\nls\npwd\n```\nThen more.")[0] == "ls\npwd"
    assert read_command("```\nls\n```")[0] == "ls"
    assert read_command("```bash\nls\n```\n```bash\npwd\n```") == (
        None,
        "Give exactly one command: 2 were found. Nothing was run.",
    )
    assert read_command("  ")[0] is None
    cut = "Give exactly one command: the block of yours has no end. Nothing was run."
    assert read_command("```bash\nrm -rf src/calc") == read_command(" ```\nls") == (None, cut)


def test_observations_say_what_happened(environment, root):
    environment.reset(tasks(root, 1)[0])
    assert environment.step("false").text == "(exit code 1)"
    assert environment.step("true").text == "(no output)"
    assert "exit code 127" in environment.step("nonsense").text
    assert "2000 characters left out" in environment.step("head -c 4000 /dev/zero | tr '\\0' x").text
    assert not environment.step(f"echo {SUBMIT}; exit 3").terminated
    assert shorten("a" * 10, 10) == "a" * 10
    environment._timeout = 0.3
    assert "stopped after 0.3 s" in environment.step("sleep 9").text
    environment._observation = "tagged"
    assert environment.step("echo a; exit 2").text == "<returncode>2</returncode>\n<output>\na\n</output>"


def test_a_missing_task_is_told(environment, tmp_path):
    with pytest.raises(TaskError, match="make-games --kind repair"):
        environment.reset(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(TaskError, match="no repair task"):
        environment.reset(str(tmp_path / "bad.json"))
