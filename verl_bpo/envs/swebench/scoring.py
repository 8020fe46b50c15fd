"""The benchmark's verdict on a repository: its test command, log parser and criteria, in files that nobody has touched.

What is judged is the difference to the base commit, applied to a fresh copy of it, without what could change how tests
are found and run. Nothing that the agent left running, or outside the repository, is there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

from verl_bpo.sandbox.base import SandboxError
from verl_bpo.shells.base import Shell

_CONFIGURATION = (
    "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py",
    "usercustomize.py", "*.pth", "pytest.py", "unittest.py", "_pytest.py", ".coveragerc",
)  # fmt: skip
"""Names of files that change how tests run, wherever they are."""
_DIFF = "git -c core.fileMode=true diff --binary --no-color --no-ext-diff --no-textconv --no-renames"


@dataclass(frozen=True)
class Verdict:
    """What the hidden tests say."""

    resolved: bool
    """All fail-to-pass and all pass-to-pass tests pass."""
    share_fixed: float
    """Share of the fail-to-pass tests that pass."""
    failed: tuple[str, ...]
    """Tests that should pass and don't."""
    left_out: tuple[str, ...]
    """Changed files that weren't judged: tests and configuration."""
    problem: str = ""
    """Why nothing could be judged, if so."""
    log: str = ""


def score(shell: Shell, instance: dict[str, Any], timeout: float) -> Verdict:
    """Judge the shell's repository. Its files are back at the base commit afterwards.

    Args:
        instance: a prepared instance (``base``: the commit of its untouched repository).
    """
    base = instance["base"]
    # A private index, and the repository's own settings out of reach: the work tree is all that counts.
    index = "export GIT_INDEX_FILE=/tmp/.verl-bpo-index GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null"
    taken = shell.execute(
        f"{index}; git read-tree {base} && git add -A -f . && {_DIFF} --cached {base}", timeout=timeout
    )
    shell.reset()
    if taken.returncode != 0 or taken.timed_out:
        return Verdict(False, 0.0, (), (), f"the changes can't be read: {taken.output.strip()[-300:]}")
    changes, left_out = judged_changes(taken.output, instance)
    try:
        applied = _apply(shell, changes) if changes else ""
        if applied:
            return Verdict(False, 0.0, (), left_out, f"the changes can't be applied again: {applied}")
        tests = " ".join(f"'{file}'" for file in patched_files(instance["test_patch"], old=True))
        if tests:
            shell.execute(f"git checkout --force {base} -- {tests}")
        applied = _apply(shell, instance["test_patch"])
        if applied:
            raise SandboxError(f"{instance['instance_id']}: the test patch can't be applied: {applied}")
        result = shell.execute(instance["test_command"], timeout=timeout)
    finally:
        shell.reset()
    if result.timed_out:
        return Verdict(False, 0.0, (), left_out, f"the tests took longer than {timeout:g} s", result.output)
    return grade(result.output, result.returncode, instance, left_out)


def grade(log: str, returncode: int, instance: dict[str, Any], left_out: tuple[str, ...] = ()) -> Verdict:
    """Read a test log with the swebench package's parser and criteria.

    Raises:
        SandboxError: the package isn't installed.
    """
    try:
        from swebench.harness.grading import get_eval_tests_report, get_resolution_status
        from swebench.harness.log_parsers import MAP_REPO_TO_PARSER
    except ImportError as error:
        raise SandboxError(
            f"SWE-bench's own package is needed to score: pip install swebench==4.1.0 ({error})"
        ) from error
    spec = SimpleNamespace(repo=instance["repo"], version=instance["version"], instance_id=instance["instance_id"])
    status = MAP_REPO_TO_PARSER[instance["repo"]](log, spec)
    # A command that fails without a failed test didn't get to the end, or its output was forged.
    if returncode != 0 and not any(value in ("FAILED", "ERROR") for value in status.values()):
        problem = f"the test command ended with exit code {returncode} and no failed test"
        return Verdict(False, 0.0, (), left_out, problem, log)
    excluded = set(instance.get("excluded_pass_to_pass", ()))
    expected = {
        "FAIL_TO_PASS": instance["FAIL_TO_PASS"],
        "PASS_TO_PASS": [test for test in instance["PASS_TO_PASS"] if test not in excluded],
    }
    report = get_eval_tests_report(status, expected)
    fixed, broken = report["FAIL_TO_PASS"], report["PASS_TO_PASS"]
    return Verdict(
        resolved=get_resolution_status(report) == "RESOLVED_FULL",
        share_fixed=len(fixed["success"]) / max(1, len(expected["FAIL_TO_PASS"])),
        failed=(*fixed["failure"], *broken["failure"]),
        left_out=left_out,
        log=log,
    )


def judged_changes(diff: str, instance: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The part of a diff that is judged, and the files that aren't: those of the test patch, and configuration of the
    test run unless the dataset's own solution changes it too."""
    allowed = set(patched_files(instance["patch"]))
    tests = set(patched_files(instance["test_patch"]))
    kept, left_out = [], []
    for part in re.split(r"(?m)^(?=diff --git )", diff):
        if not part.startswith("diff --git "):
            continue
        file = _file_of(part)
        configures = any(fnmatch(file.rsplit("/", 1)[-1], pattern) for pattern in _CONFIGURATION)
        if file in tests or (configures and file not in allowed):
            left_out.append(file)
        else:
            kept.append(part)
    return "".join(kept), tuple(left_out)


def patched_files(patch: str, old: bool = False) -> list[str]:
    """Files that a patch names; with ``old`` those that are there before it."""
    parts = [part for part in re.split(r"(?m)^(?=diff --git )", patch) if part.startswith("diff --git ")]
    if old:
        parts = [part for part in parts if re.search(r"(?m)^--- (a/|\"a/)", part)]
    return list(dict.fromkeys(map(_file_of, parts)))


def _file_of(part: str) -> str:
    """Of a diff without renames both names are the same, so half of the line is the file."""
    names = part.split("\n", 1)[0].removeprefix("diff --git ")
    if names.startswith('"'):  # with characters that git escapes: never one of the dataset's own files
        return names.split('"')[1].removeprefix("a/")
    return names[len(names) // 2 + 1 :].removeprefix("b/")


def _apply(shell: Shell, patch: str) -> str:
    """Apply a patch to the work tree; what went wrong, or nothing."""
    done = shell.execute("git apply --whitespace=nowarn -", stdin=patch)
    return done.output.strip()[-300:] or "git failed" if done.returncode != 0 else ""
