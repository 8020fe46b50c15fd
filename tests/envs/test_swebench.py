import importlib.util
import json
import os
from pathlib import Path

import pytest
from shells import need_isolation

from verl_bpo.envs.swebench.environment import SwebenchEnvironment, load_instance
from verl_bpo.envs.swebench.patches import patched_files
from verl_bpo.envs.swebench.prepare import prepare
from verl_bpo.envs.swebench.rows import load_rows
from verl_bpo.sandbox import MemorySandbox, TaskError
from verl_bpo.shells.environment import SUBMIT

INSTANCES = ("pallets__flask-5014", "pytest-dev__pytest-10081", "sympy__sympy-24443")


def test_a_missing_instance_is_told(tmp_path):
    with pytest.raises(TaskError, match="verl-bpo prepare swebench"):
        load_instance(tmp_path / "instance.json")


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
