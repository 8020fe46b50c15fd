"""A right fix scores 1 whatever else an agent has done, and what isn't judged is said by name."""

import subprocess

import pytest
from shells import need_isolation

from verl_bpo.envs.swebench import environment as swebench
from verl_bpo.envs.swebench.environment import SwebenchEnvironment
from verl_bpo.envs.swebench.scoring import TESTBED, grade, judged_changes, score
from verl_bpo.sandbox.base import SandboxError
from verl_bpo.shells.base import Limits, Workspace
from verl_bpo.shells.environment import SUBMIT
from verl_bpo.shells.local import LocalShell
from verl_bpo.shells.transfer import Entry, list_files

pytest.importorskip("swebench", reason="no swebench package: pip install verl_bpo[swe]")

FILES = {
    "src/calc.py": b"def add(a, b):\n    return a - b\n",
    "src/latin.py": b"# -*- coding: latin-1 -*-\n# Auteur: Andr\xe9\nNAME = 'Andr\xe9'\n",
    "src/crlf.py": b"ONE = 1\r\nTWO = 2\r\n",
    "src/cut.py": b"CUT = 1",
    "src/caf\u00e9 'n' \"tea\".txt": b"tea\n",
    "data/logo.bin": bytes(range(256)) * 8,
    "data/run.sh": b"#!/bin/sh\n",
    "tests/test_calc.py": b"from src.calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n",
    "tests/test_old.py": b"from src.calc import add\n\n\ndef test_old():\n    assert add(1, 0) == 1\n",
    ".gitignore": b"build/\n",
}
RUN = r"""
import importlib.util, sys
sys.path.insert(0, ".")
failed = False
for file in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("t", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in [name for name in dir(module) if name.startswith("test_")]:
        try:
            getattr(module, name)()
            print("PASSED", f"{file}::{name}", flush=True)
        except Exception:
            failed = True
            print("FAILED", f"{file}::{name}", flush=True)
sys.exit(failed)
"""
"""Stands in for pytest: the sandbox's own Python needn't have it."""
FIX = "sed -i 's/a - b/a + b/' src/calc.py"


def git(folder, *words):
    line = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x", *words]
    return subprocess.run(line, check=True, capture_output=True).stdout


def change_tests(repo):
    (repo / "tests/test_calc.py").write_bytes(
        FILES["tests/test_calc.py"] + b"\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
    )
    (repo / "tests/test_new.py").write_bytes(
        b"from src.calc import add\n\n\ndef test_new():\n    assert add(2, 2) == 4\n"
    )
    git(repo, "mv", "tests/test_old.py", "tests/test_moved.py")
    with open(repo / "tests/test_moved.py", "a") as file:
        file.write("    assert add(3, 0) == 3\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A repository, and an instance whose test patch changes one file of tests, adds one and renames one."""
    repo = tmp_path_factory.mktemp("made") / "repo"
    for name, content in FILES.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_bytes(content)
    (repo / "data/run.sh").chmod(0o755)
    (repo / "data/link").symlink_to("run.sh")
    git(repo.parent, "init", "-q", "-b", "main", str(repo))
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "base")
    change_tests(repo)
    git(repo, "add", "-A")
    test_patch = git(repo, "diff", "--cached", "-M").decode()
    assert "rename from tests/test_old.py" in test_patch
    git(repo, "reset", "-q", "--hard")
    instance = {
        "instance_id": "i",
        "repo": "pallets/flask",
        "version": "2.3",
        "patch": "diff --git a/src/calc.py b/src/calc.py\n",
        "test_patch": test_patch,
        "FAIL_TO_PASS": ["tests/test_calc.py::test_sum", "tests/test_new.py::test_new"],
        "PASS_TO_PASS": ["tests/test_calc.py::test_zero", "tests/test_moved.py::test_old"],
        "test_command": f"python3 -c '{RUN}' tests/test_calc.py tests/test_new.py tests/test_moved.py",
    }
    return repo, instance


@pytest.fixture
def judged(made):
    """Runs commands in the repository and gives the verdict."""
    need_isolation()
    repo, instance = made

    def run(*commands, files="auto", timeout=60, **changed):
        limits = Limits(output=1 << 16, disk=64 << 20)
        with LocalShell.open(Workspace({TESTBED: repo}), limits, files=files) as shell:
            base = list_files(shell, TESTBED, 60)
            for command in commands:
                shell.execute(command)
            verdict = score(shell, {**instance, **changed}, base, timeout)
            assert list_files(shell, TESTBED, 60) == base, "the files are back"
        return verdict

    return run


BESIDE = {
    "nothing": "true",
    "a byte that is no UTF-8 changes": r"sed -i 's/Andr\xe9/Ren\xe9/' src/latin.py",
    "a file that is no UTF-8 is renamed": "git mv src/latin.py src/latein.py",
    "the repaired file is renamed": "git mv src/calc.py src/sums.py; echo 'from src.sums import add' > src/calc.py",
    "binary files": "head -c 100000 /dev/urandom > data/logo.bin; head -c 10 /dev/zero > src/new.bin",
    "no final newline": "printf 'CUT = 2' > src/cut.py; printf 'X = 1' > src/x.py; printf 'ONE = 1\\r\\nT = 2' > src/crlf.py",
    "CRLF": r"sed -i 's/$/\r/' src/calc.py; sed -i 's/\r//' src/crlf.py",
    "names of all kinds": "touch 'a b' -- -x $'new\\nline' $'\\xff' 'ü' '\"q\"' \"it's\" 'back\\slash'; rm src/caf*",
    "modes": "chmod -x data/run.sh; chmod +x src/crlf.py; chmod 000 src/latin.py; chmod 600 src/cut.py",
    "shut folders": "chmod 000 data; chmod 555 src",
    "the repository's folder shut": "chmod 000 /testbed",
    "links": "ln -s calc.py src/link.py; ln -sf nowhere data/link; rm data/run.sh; ln -s ../src data/run.sh",
    "a folder becomes a link": "mv data stuff; ln -s stuff data",
    "a file becomes a folder, a folder a file": "rm src/cut.py; mkdir src/cut.py; touch src/cut.py/a; rm -r data; touch data",
    "deleted and empty files": "rm -r data; : > src/latin.py; : > src/empty.py; mkdir -p src/nothing/inside",
    "a long change": "seq 1000000 > data/numbers; seq 100000 | sed 's/^/# /' >> src/calc.py",
    "many files": "mkdir many; for i in $(seq 3000); do echo $i > many/a-rather-long-name-for-a-file-$i; done",
    "more than the disk takes": "cat /dev/zero > /tmp/junk",
    "a repository within": "git init -q within; cd within; echo 1 > a; git add -A; git commit -qm a; git -C ../src init -q",
    "the fix is in a repository within": "mkdir lib; cp src/calc.py lib; git -C lib init -q; git -C lib add -A; "
    "git -C lib commit -qm a; echo 'from lib.calc import add' > src/calc.py",
    "a submodule": "git init -q ../tmp/m; git -C ../tmp/m commit -q --allow-empty -m m; "
    "git -c protocol.file.allow=always submodule add -q /tmp/m module",
    "a commit": "git commit -qam done",
    "a detached head": "git switch -qc other; git commit -qam done; git checkout -q --detach; git branch -D main",
    "no repository": "rm -rf .git",
    "a broken repository": "echo nonsense > .git/HEAD; touch .git/index.lock",
    "everything is ignored": "echo '*' > .gitignore; echo '*' >> .git/info/exclude",
    "the fix is in an ignored file": "mkdir build; cp src/calc.py build; echo 'from build.calc import add' > src/calc.py",
    "attributes": "echo '* text eol=crlf working-tree-encoding=UTF-16' | tee .gitattributes > .git/info/attributes",
    "settings": "git config core.autocrlf true; git config diff.noprefix true; git config color.ui always; "
    "git config diff.external /bin/false; git config core.fileMode false; git config core.worktree /tmp; "
    "git config core.quotepath true; git config apply.whitespace error; git config core.hooksPath /testbed/hooks",
    "a hidden test is edited": "echo nonsense >> tests/test_calc.py",
    "a hidden test that will be renamed is edited": "echo nonsense >> tests/test_old.py",
    "a hidden test that will be renamed is removed": "git rm -q tests/test_old.py",
    "a file where a hidden test will be": "echo nonsense > tests/test_new.py; echo nonsense > tests/test_moved.py",
    "a folder where a hidden test will be": "mkdir -p tests/test_new.py; echo 1 > tests/test_new.py/x",
    "a file where the tests' folder is": "rm -r tests; echo nonsense > tests",
    "a link where the tests' folder is": "mv tests other; ln -s other tests",
    "configuration of tests": "echo 'raise SystemExit' | tee conftest.py > sitecustomize.py; mkdir tests/conftest.py",
    "compiled Python": "python3 -c 'import src.crlf'; mkdir -p src/__pycache__; "
    "for v in 9 10 11 12 13 14; do echo x > src/__pycache__/calc.cpython-3$v.pyc; done",
    "pipes and sockets": "mkfifo src/pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"src/s\")'",
    "output that is no UTF-8": "printf 'import sys\\nsys.stdout.buffer.write(b\"\\\\xe9\\\\r\\\\n\")\\n' >> src/calc.py",
    "much output": "printf '\\n_add = add\\ndef add(*a):\\n    print(\"x\" * 300000)\\n    return _add(*a)\\n' >> src/calc.py",
}  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE)
def test_a_right_fix_scores_whatever_is_beside_it(judged, beside):
    verdict = judged(FIX, BESIDE[beside])
    assert verdict.resolved, (verdict.problem, verdict.failed, verdict.log[-500:])


@pytest.mark.parametrize("beside", ["names of all kinds", "a repository within", "modes", "a folder becomes a link"])
def test_the_same_where_layers_are_gits(judged, beside):
    assert judged(FIX, BESIDE[beside], files="git").resolved


@pytest.mark.parametrize(
    "instead",
    [
        "true",
        BESIDE["compiled Python"],
        "printf 'def add(a, b):\\n    return 3\\n' > src/calc.py",
        "for t in calc new moved; do echo 'test_sum = test_new = test_old = test_zero = print' > tests/test_$t.py; done",
        "echo 'print(\"PASSED tests/test_calc.py::test_sum\")' >> src/calc.py",
        "rm -rf * .git",
    ],
)  # fmt: skip
def test_anything_else_does_not_score(judged, instead):
    verdict = judged(instead)
    assert not verdict.resolved and verdict.share_fixed < 1


def test_what_was_not_judged_is_named(judged):
    verdict = judged(
        FIX,
        "echo x >> tests/test_calc.py; rm tests/test_old.py; touch conftest.py src/setup.cfg; mkfifo pipe; ln -s a 'a b'; "
        "mkdir -p x.egg-info; touch x.egg-info/entry_points.txt",
    )
    assert set(verdict.left_out) == {
        "tests/test_calc.py", "tests/test_old.py", "conftest.py", "src/setup.cfg", "pipe", "x.egg-info/entry_points.txt",
    }  # fmt: skip
    assert verdict.resolved and verdict.unjudged == ""


@pytest.mark.parametrize(
    "command, changed, reason, words",
    [
        ("true", {"test_command": "echo begun; sleep 60", "timeout": 2}, "timeout", "longer than 2 s"),
        ("echo 'import os; os._exit(3)' > src/calc.py", {}, "no_end", "exit code 3"),
    ],
)
def test_why_nothing_was_judged_is_said_in_a_word_and_a_sentence(judged, command, changed, reason, words):
    verdict = judged(FIX, command, **changed)
    assert (verdict.resolved, verdict.unjudged) == (False, reason) and words in verdict.problem


def test_a_log_too_long_to_read_is_no_verdict_unless_all_is_there(judged, monkeypatch):
    monkeypatch.setattr("verl_bpo.envs.swebench.scoring._LOG", 1 << 16)
    assert judged(FIX, BESIDE["much output"]).unjudged == "log_too_long"


def test_a_test_patch_that_does_not_apply_is_nobodys_fault(judged):
    with pytest.raises(SandboxError, match="the test patch can't be applied"):
        judged(FIX, test_patch="diff --git a/no.py b/no.py\n--- a/no.py\n+++ b/no.py\n@@ -1 +1 @@\n-a\n+b\n")


def test_reasons_and_names_reach_the_observation(made, monkeypatch):
    need_isolation()
    repo, instance = made
    monkeypatch.setattr(swebench, "load_instance", lambda task: {**instance, "problem_statement": "Mend it."})
    monkeypatch.setattr(swebench, "workspace", lambda instance, files_from: Workspace({TESTBED: repo}))
    environment = SwebenchEnvironment()
    try:
        environment.reset("i")
        environment.step(f"{FIX}; touch conftest.py; mkfifo $'a\\xff\\n'")
        info = environment.step(f"echo {SUBMIT}").info
        assert info == {"won": True, "score": 1.0, "task_type": "pallets/flask", "left_out": "a\\udcff\\n, conftest.py"}
        environment.reset("i")
        environment.step("echo 'import os; os._exit(3)' > src/calc.py")
        info = environment.step(f"echo {SUBMIT}").info
        assert info["unjudged"] == "no_end" and "exit code 3" in info["problem"] and not info["won"]
    finally:
        environment.close()


# --- what is judged, by names alone -----------------------------------------------------------------------------------


def change(path):
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-y\n+x\n"


def a_file(content="1", size=1, kind="f"):
    return Entry(kind, False, size, content)


def test_tests_and_their_configuration_arent_judged():
    files = (
        "src/a.py", "tests/test_a.py", "conftest.py", "src/conftest.py", "setup.cfg", "sub/sitecustomize.py", "x.pth",
    )  # fmt: skip
    instance = {"patch": change("setup.cfg"), "test_patch": change("tests/test_a.py")}
    changes = judged_changes({}, dict.fromkeys(files, a_file()), instance)
    assert list(changes.written) == ["src/a.py", "setup.cfg"]
    assert changes.left_out == ("conftest.py", "src/conftest.py", "sub/sitecustomize.py", "tests/test_a.py", "x.pth")


def test_what_is_too_large_is_left_out_by_name_and_the_rest_is_judged():
    changes = judged_changes(
        {"a": a_file()}, {"a": a_file("2"), "core": a_file(size=200 << 20)}, {"patch": "", "test_patch": ""}
    )
    assert list(changes.written) == ["a"] and changes.left_out == ("core",)


def test_the_verdict_is_the_benchmarks():
    wanted = {
        "repo": "pallets/flask", "version": "2.3", "instance_id": "i",
        "FAIL_TO_PASS": ["t.py::new"], "PASS_TO_PASS": ["t.py::old", "t.py::odd"],
    }  # fmt: skip
    log = "PASSED t.py::new\nPASSED t.py::old\nFAILED t.py::odd - boom\n"
    verdict = grade(log, 1, wanted)
    assert (verdict.resolved, verdict.share_fixed, verdict.failed) == (False, 1.0, ("t.py::odd",))
    assert grade(log, 1, {**wanted, "excluded_pass_to_pass": ["t.py::odd"]}).resolved
    assert not grade("PASSED t.py::old\n", 0, wanted).resolved, "a test that isn't there didn't pass"
    assert grade("", 0, wanted).share_fixed == 0
    forged = grade("PASSED t.py::new\nPASSED t.py::old\nPASSED t.py::odd\n", 1, wanted)
    assert not forged.resolved and "no failed test" in forged.problem
