"""The benchmark's verdict on a repository: its test command, log parser and criteria, in files that nobody has touched.

What is judged is the files that differ from the untouched repository, taken out byte by byte and put into a fresh copy of
it beside the hidden tests, without what could change how tests are found and run. Git isn't asked what has changed: no
setting, attribute, commit or nested repository of the agent's can hide its work or spoil it. Nothing that the agent left
running, or outside the repository, is there.

As in version control a file counts with its content and its executable bit, a link with its target, and a folder not at
all.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import IO, Any

from verl_bpo.envs.swebench.patches import SETTINGS, patched_files, to_bytes
from verl_bpo.sandbox.base import SandboxError
from verl_bpo.shells.base import Shell
from verl_bpo.shells.transfer import Entry, list_files, pack, read_files, remove_files, unpack

TESTBED = "/testbed"
_CONFIGURATION = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml",
    "sitecustomize.py", "usercustomize.py", "*.pth", "pytest.py", "unittest.py", "_pytest.py", ".coveragerc",
    "entry_points.txt",
)  # fmt: skip
"""Names of files that change how tests run, wherever they are."""
_LARGEST = 100 << 20
"""Bytes of the largest file that is judged: version control's hosts take none that is larger."""
_LOG = 256 << 20
"""Bytes of a test log that are read."""
_APPLY = f"GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null git {shlex.join(SETTINGS)} apply -"


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
    """Changed files that weren't judged: tests, configuration, and what can't be."""
    unjudged: str = ""
    """Why nothing could be judged, in a word for counting: ``unreadable``, ``unwritable``, ``timeout``, ``log_too_long`` or
    ``no_end`` (the test command failed without a failed test)."""
    problem: str = ""
    """The same in a sentence."""
    log: str = ""


@dataclass(frozen=True)
class Changes:
    """How a repository differs from the untouched one."""

    written: dict[str, Entry]
    """Files and links to judge, new or changed."""
    removed: tuple[str, ...]
    left_out: tuple[str, ...]


def score(shell: Shell, instance: dict[str, Any], base: Mapping[str, Entry], timeout: float) -> Verdict:
    """Judge the shell's repository. Its files are those of the untouched one afterwards.

    Args:
        instance: a prepared instance.
        base: what :func:`verl_bpo.shells.transfer.list_files` says of the untouched repository.
        timeout: seconds for the tests.

    Raises:
        SandboxError: the untouched repository doesn't take the hidden tests: nobody's work could be judged.
    """
    archives: list[IO[bytes]] = []
    try:
        try:
            changes = judged_changes(base, list_files(shell, TESTBED, timeout), instance)
            changes, archives = _taken(shell, changes, timeout)
        except SandboxError as error:
            return _unjudged("unreadable", f"the changes can't be read: {error}")
        shell.reset()
        problem = apply_patch(shell, instance["test_patch"])
        if problem:
            raise SandboxError(f"{instance['instance_id']}: the test patch can't be applied: {problem}")
        try:
            remove_files(shell, TESTBED, changes.removed, timeout)
            for archive in archives:
                unpack(shell, TESTBED, archive.read(), timeout)
        except SandboxError as error:
            return _unjudged("unwritable", f"the changes can't be put into a fresh copy: {error}", changes.left_out)
        result = shell.execute(instance["test_command"], timeout=timeout, most=_LOG)
    finally:
        shell.reset()
        for archive in archives:
            archive.close()
    if result.timed_out:
        problem = f"the tests took longer than {timeout:g} s"
        return _unjudged("timeout", problem, changes.left_out, result.output)
    verdict = grade(result.output, result.returncode, instance, changes.left_out)
    if result.left_out and not verdict.resolved:
        return _unjudged("log_too_long", f"the tests said more than {_LOG >> 20} MB", changes.left_out, result.output)
    return verdict


def _unjudged(reason: str, problem: str, left_out: tuple[str, ...] = (), log: str = "") -> Verdict:
    return Verdict(False, 0.0, (), left_out, reason, problem, log)


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
        return _unjudged("no_end", problem, left_out, log)
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


def judged_changes(base: Mapping[str, Entry], found: Mapping[str, Entry], instance: dict[str, Any]) -> Changes:
    """What is judged of the difference between two lists of files. Left out are the files of the test patch under their
    old and new names, configuration of the test run unless the dataset's own solution changes it too, what stands where
    one of these has to be, and what is neither file nor link or larger than 100 MB."""
    tests = set(patched_files(instance["test_patch"]))
    allowed = set(patched_files(instance["patch"]))
    written = {name: entry for name, entry in found.items() if base.get(name) != entry}
    removed = [name for name in base if name not in found]
    left_out = {
        name
        for name in (*written, *removed)
        if name in tests or (name not in allowed and any(map(_configures, PurePosixPath(name).parts)))
    }
    left_out |= {name for name, entry in written.items() if entry.kind not in "fl" or entry.size > _LARGEST}
    # The rest of the work has to do without what was left out, and what has to stay is in nobody's way.
    stays = tests | (set(base) - set(removed)) | (set(removed) & left_out)
    folders = {str(folder) for name in stays for folder in PurePosixPath(name).parents}
    left_out |= {
        name
        for name in written
        if name in folders or any(str(folder) in stays for folder in PurePosixPath(name).parents)
    }
    return Changes(
        {name: entry for name, entry in written.items() if name not in left_out},
        tuple(name for name in removed if name not in left_out),
        tuple(sorted(left_out)),
    )


def apply_patch(shell: Shell, patch: str, only_check: bool = False) -> str:
    """Apply a patch to the repository; what went wrong, or nothing."""
    done = shell.execute(f"{_APPLY}{' --check' if only_check else ''}", cwd=TESTBED, stdin=to_bytes(patch))
    return done.output.strip()[-300:] or "git failed" if done.returncode != 0 else ""


def _configures(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _CONFIGURATION)


def _taken(shell: Shell, changes: Changes, timeout: float) -> tuple[Changes, list[IO[bytes]]]:
    """The written files as archives, and the changes without those that can't be read."""
    files = {name: entry for name, entry in changes.written.items() if entry.kind == "f"}
    links = {name: entry for name, entry in changes.written.items() if entry.kind == "l"}
    archives, unread = [_archive(links, {})], set()
    for contents in read_files(shell, TESTBED, files, timeout):
        readable = {name: data for name, data in contents.items() if data is not None}
        unread |= contents.keys() - readable.keys()
        archives.append(_archive({name: files[name] for name in readable}, readable))
    written = {name: entry for name, entry in changes.written.items() if name not in unread}
    return Changes(written, changes.removed, tuple(sorted({*changes.left_out, *unread}))), archives


def _archive(entries: Mapping[str, Entry], contents: Mapping[str, bytes]) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by score; not in memory: a repository may be full of junk
    pack(entries, contents, file)
    file.seek(0)
    return file
