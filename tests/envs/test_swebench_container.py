"""SWE-bench in containers: images by the benchmark's names, and one real instance from its image to its verdict."""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from test_swebench import play

from verl_bpo.config.schema import build
from verl_bpo.envs.repair.generate import make_repairs
from verl_bpo.envs.swebench.environment import SwebenchEnvironment, load_instance
from verl_bpo.envs.swebench.images import Images
from verl_bpo.envs.swebench.prepare import prepare
from verl_bpo.envs.swebench.prepare import test_command as command_of
from verl_bpo.envs.swebench.rows import load_rows
from verl_bpo.generation.pools import Pools, environment_kwargs
from verl_bpo.sandbox import MemorySandbox, SandboxError, TaskError
from verl_bpo.shells.container import ContainerConfig, _myself, has_image, reclaim, remove_image

ENGINE = os.environ.get("VERL_BPO_CONTAINER_ENGINE", "podman --runtime runc --cgroup-manager=cgroupfs")
FLASK = "pallets__flask-5014"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("swebench") is None, reason="no swebench package: pip install verl_bpo[swe]"
)


def row_of(name="a__b-1", repo="pallets/flask", version="2.3"):
    return {"instance_id": name, "repo": repo, "version": version, "test_patch": "", "base_commit": "0"}


def test_images_have_the_benchmarks_names(monkeypatch):
    """As on its hub, where two underscores may not stand; and as its own package builds them."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    row = row_of(FLASK)
    assert Images().name(row) == "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest"
    mirror = Images(registry="registry.example:5000/mirror", namespace="me")
    assert mirror.name(row) == "registry.example:5000/mirror/me/sweb.eval.x86_64.pallets_1776_flask-5014:latest"
    assert Images(namespace="none").name(row) == "sweb.eval.x86_64.pallets__flask-5014:latest"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert Images(namespace="none").name(row) == "sweb.eval.arm64.pallets__flask-5014:latest"


def test_what_the_specification_sets_before_the_tests_are_lines_of_their_own():
    spec = {"eval_commands": ["export A=1", "false && true"], "test_cmd": "python -m pytest"}
    row = {**row_of(), "test_patch": "diff --git a/tests/test_a.py b/tests/test_a.py\n"}
    assert command_of(row, spec) == "export A=1\nfalse && true\npython -m pytest tests/test_a.py"


def test_tests_that_are_removed_arent_run_and_odd_names_are_quoted():
    removed = (
        "diff --git a/t/old.py b/t/old.py\ndeleted file mode 100644\n--- a/t/old.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"
    )
    odd = 'diff --git "a/t/caf\\303\\251 1.py" "b/t/caf\\303\\251 1.py"\nnew file mode 100644\n'
    moved = "diff --git a/t/b.py b/t/c.py\nrename from t/b.py\nrename to t/c.py\n"
    row = {**row_of(), "test_patch": removed + odd + moved}
    assert command_of(row, {"test_cmd": "pytest"}) == "pytest 't/café 1.py' t/c.py"


def test_no_engine_is_said_once_and_at_once(tmp_path):
    with pytest.raises(SandboxError, match="no container engine can be used .no-such-engine: not installed"):
        prepare([row_of()], tmp_path, images=Images(ContainerConfig(engine="no-such-engine")))
    with pytest.raises(SandboxError, match="bpo.env.execution=local"):
        SwebenchEnvironment(execution="container", shell={"engine": "no-such-engine"})


def test_only_environments_of_shell_commands_are_given_containers():
    config = {"execution": "container", "container": {"image": "python:3.11"}, "kwargs": {"timeout": 9}}
    spec = build({"env": config}, "plain").env
    given = {"engine": None, "run_options": "", "image": "python:3.11"}
    assert environment_kwargs("repair", spec) == {"timeout": 9, "execution": "container", "shell": given}
    assert environment_kwargs("textworld", spec) == {"timeout": 9}
    assert environment_kwargs("repair", build({}, "plain").env) == {}


def test_tasks_are_those_of_a_split_where_there_are_splits(tmp_path, monkeypatch):
    for name in ("train/a", "train/b", "verified/c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "instance.json").touch()
    monkeypatch.setenv("SWEBENCH_DATA", str(tmp_path))
    names = [[Path(task).parent.name for task in SwebenchEnvironment.tasks(split)] for split in ("train", "verified")]
    assert names == [["a", "b"], ["c"]]
    assert len(SwebenchEnvironment.tasks("any", root=str(tmp_path / "train"))) == 2


# --- the real thing ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local(benchmark_data):
    """The instance as local mode has prepared it; its repository and environment are what the image is made of."""
    if shutil.which(ENGINE.split()[0]) is None:
        pytest.skip("no podman: apt-get install podman runc")
    default = Path.home() / ".cache" / "verl_bpo" / "swebench"
    folder = Path(os.environ.get("VERL_BPO_SWEBENCH", default))
    rows = load_rows(str(benchmark_data / "swebench" / "swe_bench_verified_test.parquet"))
    (row,) = [row for row in rows if row["instance_id"] == FLASK]
    _, failed = prepare([row], folder, "pypi")
    if failed:
        pytest.skip(f"the instance can't be had: {failed}")
    return row, load_instance(folder / FLASK / "instance.json")


@pytest.fixture(scope="module")
def images(local):
    """An engine with the instance's image: the local one's repository and environment on this machine's programs."""
    row, instance = local
    venv, prefix = f"{instance['folder']}/venv", instance["python_prefix"]
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in (".", "usr", "tmp", "etc", "proc", "sys", "dev", prefix.strip("/")):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        tar.add(f"{instance['folder']}/repo", "testbed")
        tar.add(venv, venv.strip("/"), filter=lambda entry: None if "site-packages/pip/" in entry.name else entry)
        # A stand-in for conda, without which nothing finds the tests' Python; and a file that no commit has.
        conda = f'conda() {{ export CONDA_DEFAULT_ENV="$2" PATH="{venv}/bin:$PATH"; }}\n'.encode()
        for name, content in (("opt/miniconda3/bin/activate", conda), ("testbed/build/left.so", b"\0\1\2")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    binds = " ".join(f"--volume {path}:{path}:ro" for path in dict.fromkeys(("/usr", prefix)))
    container = ContainerConfig(
        engine=ENGINE, run_options=f"--ulimit nofile=1024:1024 --ulimit nproc=4096:4096 {binds}"
    )
    images = Images(container, namespace="none")
    name = images.name(row)
    line = [*ENGINE.split(), "import", "--change", "ENV PATH=/usr/bin:/bin", "-", name]
    done = subprocess.run(line, input=file.getvalue(), capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"{ENGINE} doesn't work here: {done.stderr.decode().strip()[-200:]}")
    yield images
    remove_image(images.engine, name)


@pytest.fixture(scope="module")
def task(images, local, tmp_path_factory):
    folder = tmp_path_factory.mktemp("instances")
    ready, failed = prepare([local[0]], folder, images=images)
    if failed and "runc" in failed[FLASK]:
        pytest.skip(f"containers don't run here: {failed[FLASK]}")
    assert failed == {} and ready == [FLASK]
    path = folder / FLASK / "instance.json"
    yield str(path)
    remove_image(images.engine, json.loads(path.read_text())["ready_image"])


@pytest.fixture
def environment(images):
    environment = SwebenchEnvironment(execution="container", shell=vars(images.container), allow_unsafe=True)
    yield environment
    environment.close()


def left():
    """Containers and images of this process."""
    label = f"label=verl-bpo-owner={_myself()}"
    lines = [[*ENGINE.split(), *what, "--filter", label] for what in (["ps", "-aq"], ["images", "-q"])]
    return [name for line in lines for name in subprocess.run(line, capture_output=True, text=True).stdout.split()]


OUTSIDE_THE_REPOSITORY = (
    "printf 'import atexit, os\\natexit.register(os._exit, 0)\\n' >> "
    "$(python -c 'import _pytest.outcomes as m; print(m.__file__)')",
    "cd $(dirname $(command -v pytest)); "
    "printf '#!/bin/sh\\necho PASSED tests/test_blueprints.py::test_empty_name_not_allowed\\n' > pytest",
    "cd $(dirname $(command -v pytest)); printf '#!/bin/sh\\nexit 0\\n' > git; chmod +x git",
)
"""An image can be written to all over, but only the repository's changes are taken out of it."""


@pytest.mark.data
@pytest.mark.timeout(1200)
def test_an_instance_in_containers_end_to_end(environment, task, local):
    instance = load_instance(task)
    assert instance["mode"] == "container" and instance["image"] == f"sweb.eval.x86_64.{FLASK}:latest"
    assert instance["excluded_pass_to_pass"] == local[1]["excluded_pass_to_pass"], "the same as in local mode"
    path = f"{local[1]['folder']}/venv/bin:/usr/bin:/bin"
    assert instance["env"] == {"CONDA_DEFAULT_ENV": "testbed", "PATH": path}, "what activation sets"
    environment.reset(task)
    gold, _ = environment.expert_actions()
    assert play(environment, task) == 0.0, "the base commit"
    assert play(environment, task, gold) == 1.0, "the dataset's own patch, whatever a build left untracked"
    assert play(environment, task, "echo '# looked at' >> src/flask/blueprints.py") == 0.0, "a wrong patch"
    edit = "printf '\\ndef test_empty_name_not_allowed(): pass\\n' >> tests/test_blueprints.py"
    hook = "printf 'def pytest_runtest_call(item):\\n    item.obj = lambda *a, **k: None\\n'"
    assert play(environment, task, edit, f"{hook} | tee conftest.py > tests/conftest.py") == 0.0, "edited tests"
    assert play(environment, task, *OUTSIDE_THE_REPOSITORY) == 0.0, "replaced programs and packages"
    assert play(environment, task, gold, "rm -rf .git") == 1.0, "files are judged, with the repository gone too"
    assert play(environment, task, edit, gold) == 1.0, "edited tests do no harm either"
    environment.close()
    assert left() == []


@pytest.mark.data
@pytest.mark.timeout(600)
def test_forks_of_forks_in_containers(environment, task):
    trunk = MemorySandbox(environment)
    trunk.reset(task)
    start = trunk.snapshot()
    gold, submit = environment.expert_actions()
    (fork,) = start.fork()
    fork.step("echo 1 > x")
    middle = fork.snapshot()
    inner, other = middle.fork(2)
    inner.step(gold)
    assert "blueprints" in inner.step("git status --short").text
    assert "blueprints" not in other.step("git status --short; cat x").text
    assert "No such file" in trunk.step("cat x").text
    assert inner.step(submit).reward == 1.0
    assert other.step(submit).reward == 0.0
    (late,) = middle.fork()
    assert "1" in late.step("cat x").text
    for held in (trunk, fork, inner, other, late):
        held.close()
    for snapshot in (start, middle):
        snapshot.release()
    assert left() == []


@pytest.mark.data
def test_preparing_again_finds_what_is_there_and_makes_what_is_gone(images, task, local):
    out, instance = Path(task).parents[1], load_instance(task)
    before = Path(task).stat().st_mtime_ns
    remove_image(images.engine, instance["ready_image"])
    environment = SwebenchEnvironment(execution="container", shell=vars(images.container), allow_unsafe=True)
    with pytest.raises(TaskError, match="prepare swebench --mode container"):
        environment.reset(task)
    assert prepare([local[0]], out, images=images) == ([FLASK], {})
    assert has_image(images.engine, instance["ready_image"]) and Path(task).stat().st_mtime_ns == before


@pytest.mark.data
def test_the_other_mode_and_unreachable_images_are_told(images, task, local, tmp_path):
    with pytest.raises(TaskError, match=f"{FLASK} is prepared for mode container: set bpo.env.execution=container"):
        SwebenchEnvironment().reset(task)
    with pytest.raises(TaskError, match="is prepared for mode local: set bpo.env.execution=local"):
        environment = SwebenchEnvironment(execution="container", shell=vars(images.container))
        environment.reset(f"{local[1]['folder']}/instance.json")
    _, failed = prepare([local[0]], Path(local[1]["folder"]).parent, images=images)
    assert "holds it for mode local" in failed[FLASK]
    nowhere = Images(images.container, registry="localhost:1", namespace="nobody")
    _, failed = prepare([local[0]], tmp_path, images=nowhere)
    assert "can't pull localhost:1/nobody/sweb.eval" in failed[FLASK] and "--registry localhost:1" in failed[FLASK]


@pytest.mark.data
@pytest.mark.timeout(600)
def test_repair_tasks_in_containers_by_config_survive_the_death_of_their_process(images, local, tmp_path):
    task = str(make_repairs(tmp_path, {"train": 1}, progress=False) / "train" / "0000.json")
    image = images.name(local[0])
    container = {**vars(images.container), "image": image}
    config = {"execution": "container", "container": container, "workers": 1, "kwargs": {"allow_unsafe": True}}
    pools = Pools(build({"env": config}, "plain").env)
    try:
        with pools["repair"].open() as host:
            trunk, _ = host.reset(task)
            trunk.step("echo 1 > x")
            snapshot = trunk.snapshot()
            assert trunk.step("cat x; ls setup.cfg").text == "1\nsetup.cfg", "it is in the image's repository"
            host._worker.stop()
            (fork,) = snapshot.fork()
            assert fork.step("cat x").text == "1" and host.recoveries == 1
            for action in json.loads(Path(task).read_text())["expert"]:
                last = fork.step(action)
            assert last.reward == 1.0
    finally:
        pools.close()
    reclaim(images.engine)
    assert reclaim(images.engine) == []
    line = [*ENGINE.split(), "ps", "-aq", "--filter", f"ancestor={image}"]
    assert subprocess.run(line, capture_output=True, text=True).stdout == ""
