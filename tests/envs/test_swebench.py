import importlib.util
import json
import os
from pathlib import Path

import pytest
from shells import need_isolation

from verl_bpo.envs.swebench.environment import SwebenchEnvironment, load_instance
from verl_bpo.envs.swebench.prepare import PrepareError, load_rows, prepare
from verl_bpo.envs.swebench.scoring import grade, judged_changes, patched_files
from verl_bpo.sandbox import MemorySandbox, TaskError
from verl_bpo.shells.environment import SUBMIT

INSTANCES = ("pallets__flask-5014", "pytest-dev__pytest-10081", "sympy__sympy-24443")
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("swebench") is None, reason="no swebench package: pip install verl_bpo[swe]"
)


def change(path, text="+x"):
    return f"diff --git a/{path} b/{path}\nindex 1..2 100644\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-y\n{text}\n"


def instance(patch="", test_patch="", **more):
    return {
        "patch": patch,
        "test_patch": test_patch,
        "repo": "pallets/flask",
        "version": "2.3",
        "instance_id": "i",
        **more,
    }


def test_tests_and_their_configuration_arent_judged():
    files = (
        "src/a.py",
        "tests/test_a.py",
        "conftest.py",
        "src/conftest.py",
        "setup.cfg",
        "sub/sitecustomize.py",
        "x.pth",
    )
    kept, left_out = judged_changes(
        "".join(map(change, files)), instance(patch=change("setup.cfg"), test_patch=change("tests/test_a.py"))
    )
    assert patched_files(kept) == ["src/a.py", "setup.cfg"]
    assert left_out == ("tests/test_a.py", "conftest.py", "src/conftest.py", "sub/sitecustomize.py", "x.pth")


def test_a_patch_that_speaks_of_diffs_is_not_torn_apart():
    text = change("a.py", "+diff --git a/conftest.py b/conftest.py")
    assert judged_changes(text, instance()) == (text, ())
    spaced = change("a b/c d.py")
    assert judged_changes(spaced, instance(test_patch=change("a b/c d.py")))[1] == ("a b/c d.py",)
    assert judged_changes('diff --git "a/t\\303\\244.py" "b/t\\303\\244.py"\n+x\n', instance())[1] == ()


@needs_package
def test_the_verdict_is_the_benchmarks():
    wanted = instance(FAIL_TO_PASS=["t.py::new"], PASS_TO_PASS=["t.py::old", "t.py::odd"])
    log = "PASSED t.py::new\nPASSED t.py::old\nFAILED t.py::odd - boom\n"
    verdict = grade(log, 1, wanted)
    assert (verdict.resolved, verdict.share_fixed, verdict.failed) == (False, 1.0, ("t.py::odd",))
    assert grade(log, 1, {**wanted, "excluded_pass_to_pass": ["t.py::odd"]}).resolved
    assert not grade("PASSED t.py::old\n", 0, wanted).resolved, "a test that isn't there didn't pass"
    assert grade("", 0, wanted).share_fixed == 0
    forged = grade("PASSED t.py::new\nPASSED t.py::old\nPASSED t.py::odd\n", 1, wanted)
    assert not forged.resolved and "no failed test" in forged.problem


def test_bad_inputs_are_told(tmp_path):
    with pytest.raises(TaskError, match="verl-bpo prepare swebench"):
        load_instance(tmp_path / "instance.json")
    (tmp_path / "rows.jsonl").write_text('{"instance_id": "a"}\n')
    with pytest.raises(PrepareError, match="isn't of SWE-bench's form: it has no base_commit"):
        load_rows(str(tmp_path / "rows.jsonl"))


# --- the real thing: three instances from PyPI's source packages ------------------------------------------------------


@pytest.fixture(scope="session")
def prepared(benchmark_data):
    need_isolation()
    if importlib.util.find_spec("swebench") is None:
        pytest.skip("no swebench package: pip install verl_bpo[swe]")
    default = Path.home() / ".cache" / "verl_bpo" / "swebench"
    folder = Path(os.environ.get("VERL_BPO_SWEBENCH", default))
    rows = load_rows(str(benchmark_data / "swebench" / "swe_bench_verified_test.parquet"))
    assert len(rows) == 500
    ready, failed = prepare([row for row in rows if row["instance_id"] in INSTANCES], folder, "pypi")
    unreachable = ("pip download", "Could not find a version", "No matching distribution")
    if failed and all(any(word in why for word in unreachable) for why in failed.values()):
        pytest.skip(f"source packages can't be had: {failed}")
    assert failed == {}
    return folder


@pytest.fixture(params=INSTANCES)
def opened(request, prepared):
    environment = SwebenchEnvironment()
    task = str(prepared / request.param / "instance.json")
    yield environment, task
    environment.close()


def play(environment, task, *actions):
    environment.reset(task)
    for action in (*actions, f"echo {SUBMIT}"):
        last = environment.step(action)
    assert last.terminated
    return last.reward


@pytest.mark.data
@pytest.mark.timeout(3000)
def test_an_instance_end_to_end(opened):
    environment, task = opened
    row = load_instance(task)
    assert len(row["excluded_pass_to_pass"]) <= 0.05 * len(row["PASS_TO_PASS"])
    observation = environment.reset(task)
    assert row["problem_statement"].strip() in observation.text
    assert play(environment, task) == 0.0, "the base commit"
    gold, _ = environment.expert_actions()
    assert play(environment, task, gold) == 1.0, "the dataset's own patch"
    source = patched_files(row["patch"])[0]
    assert play(environment, task, f"echo '# looked at' >> {source}") == 0.0, "a wrong patch"
    tests = " ".join(patched_files(row["test_patch"]))
    names = [test.split("::")[-1].split("[")[0] for test in row["FAIL_TO_PASS"]]
    edits = [f"printf '\\ndef {name}(*a, **k): pass\\n' >> {tests}" for name in names]
    skip = "printf 'def pytest_runtest_call(item):\\n    item.obj = lambda *a, **k: None\\n    return True\\n'"
    assert play(environment, task, *edits, f"{skip} | tee conftest.py > $(dirname {tests})/conftest.py") == 0.0
    passing = "printf '[tool.pytest.ini_options]\\naddopts = \"--collect-only\"\\n' > pyproject.toml; rm -rf .git"
    assert play(environment, task, passing) == 0.0, "nor with the repository gone"
    assert play(environment, task, edits[0], gold) == 1.0, "edited tests do no harm either"


@pytest.mark.data
@pytest.mark.timeout(3000)
def test_branches_in_a_real_repository(prepared):
    environment = SwebenchEnvironment()
    trunk = MemorySandbox(environment)
    trunk.reset(str(prepared / "pallets__flask-5014" / "instance.json"))
    snapshot = trunk.snapshot()
    gold, submit = environment.expert_actions()
    assert "setup.py" in trunk.step("ls").text or "pyproject" in trunk.step("ls").text
    (fork,) = snapshot.fork()
    fork.step(gold)
    assert "blueprints" in fork.step("git status --short").text
    assert "blueprints" not in trunk.step("git status --short").text
    assert trunk.step(submit).reward == 0.0
    assert fork.step(submit).reward == 1.0
    assert "OK" in snapshot.fork()[0].step("python -c 'import flask; print(\"OK\")'").text
    trunk.close()


def test_prepared_instances_are_the_tasks(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "instance.json").write_text(json.dumps({"instance_id": name}))
    (tmp_path / "half").mkdir()
    tasks = SwebenchEnvironment.tasks("test", root=str(tmp_path))
    assert [Path(task).parent.name for task in tasks] == ["a", "b"]
