"""SWE-bench as an environment: a shell in the repository at its base commit, and the benchmark's own verdict at the end.

Instances are prepared once (``verl-bpo prepare swebench``), for local virtual environments or for containers; a task is the
path of an ``instance.json``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from verl_bpo.envs.swebench.scoring import TESTBED, Verdict, score
from verl_bpo.sandbox.base import TaskError
from verl_bpo.shells.base import Shell, Workspace
from verl_bpo.shells.environment import SUBMIT, ShellEnvironment
from verl_bpo.shells.transfer import list_files

_TASK = """Solve this issue in the repository in {testbed}:

{problem}

Each answer is one shell command; it runs in a new shell in {testbed}, so directories and variables don't last, but files
do. Change source files only: tests and their configuration are put back before your work is judged. There is no network.
When you are done, hand your work in with exactly: echo {submit}"""


class SwebenchEnvironment(ShellEnvironment):
    """One instance. The reward is 1.0 when it is resolved: all fail-to-pass and pass-to-pass tests pass.

    Args:
        score_timeout: seconds that the hidden tests may take. Keep ``bpo.env.step_timeout`` above it.
        observation, timeout, output_chars, limits, allow_unsafe, execution, shell: see
            :class:`verl_bpo.shells.environment.ShellEnvironment`.
    """

    def __init__(
        self,
        timeout: float = 60.0,
        score_timeout: float = 1800.0,
        limits: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        limits = {"memory": 4 << 30, "disk": 1 << 30, "processes": 512, "output": 16 << 20, **(limits or {})}
        super().__init__(timeout, limits=limits, **options)
        self._score_timeout = score_timeout
        self._opened = ""

    @classmethod
    def tasks(cls, split: str = "test", root: str | None = None, **kwargs: Any) -> list[str]:
        """Prepared instances in ``<root>/<split>``, or in ``root`` where there is no such folder.

        Args:
            root: None: ``$SWEBENCH_DATA``.
        """
        folder = Path(root or os.environ.get("SWEBENCH_DATA", "swebench")).expanduser()
        folder = folder / split if (folder / split).is_dir() else folder
        return sorted(str(path.resolve()) for path in folder.glob("*/instance.json"))

    def _open(self, task: str, seed: int) -> tuple[Shell, str]:
        if task != self._opened:
            self._instance = load_instance(task)
            if self._shell is not None:
                self._shell.close()
                self._shell = None
            files = workspace(self._instance, self._shells.files_from)
            try:
                self._shell = self._open_shell(files)
            except TaskError as error:
                mode = self._instance["mode"]
                raise TaskError(f"{error} (verl-bpo prepare swebench --mode {mode})") from error
            self._base = list_files(self._shell, TESTBED, self._score_timeout)
            self._opened = task
        self._shell.reset()
        problem = self._instance["problem_statement"].strip()
        return self._shell, _TASK.format(testbed=TESTBED, problem=problem, submit=SUBMIT)

    def _score(self, shell: Shell) -> tuple[float, dict[str, Any]]:
        verdict = self.judge(shell)
        info = {"score": verdict.share_fixed, "task_type": self._instance["repo"]}
        info |= {"unjudged": verdict.unjudged, "problem": verdict.problem} if verdict.unjudged else {}
        info |= {"left_out": ", ".join(map(_shown, verdict.left_out))} if verdict.left_out else {}
        return float(verdict.resolved), info

    def judge(self, shell: Shell) -> Verdict:
        """The verdict on the shell's files. They are back at the base commit afterwards."""
        return score(shell, self._instance, self._base, self._score_timeout)

    def expert_actions(self) -> list[str]:
        """The dataset's own patch, then the marker."""
        patch = self._instance["patch"].removesuffix("\n")
        return [f"git apply - <<'VERL_BPO_GOLD'\n{patch}\nVERL_BPO_GOLD", f"echo {SUBMIT}"]


def _shown(name: str) -> str:
    """A file's name for people and logs: what is no UTF-8, or no character to see, as an escape."""
    return name.encode("unicode_escape", "backslashreplace").decode() if not name.isprintable() else name


def load_instance(task: str | Path) -> dict[str, Any]:
    """
    Raises:
        TaskError: the path holds no prepared instance.
    """
    try:
        instance = json.loads(Path(task).expanduser().read_text(encoding="utf-8"))
        return {**instance, "folder": str(Path(task).expanduser().resolve().parent)}
    except OSError as error:
        raise TaskError(f"no instance {task} ({error.strerror}): verl-bpo prepare swebench") from error
    except ValueError as error:
        raise TaskError(f"{task} is no prepared instance ({error})") from error


def workspace(instance: dict[str, Any], files_from: str) -> Workspace:
    """The instance's repository, with its Python first on the path.

    Args:
        files_from: what the shell takes files from, see :class:`verl_bpo.shells.base.Shell`.

    Raises:
        TaskError: the instance was prepared for shells that take them from the other.
    """
    mode = instance["mode"]
    if files_from != {"local": "folders", "container": "image"}[mode]:
        raise TaskError(
            f"{instance['instance_id']} is prepared for mode {mode}: set bpo.env.execution={mode}, or prepare it for the "
            "other in another folder (verl-bpo prepare swebench --mode)"
        )
    if mode == "container":
        return Workspace({TESTBED: None}, env=instance["env"], image=instance["ready_image"])
    folder = Path(instance["folder"])
    venv = folder / "venv"
    read_only = [venv]
    base = Path(instance["python_prefix"])
    if not base.is_relative_to("/usr"):
        read_only.append(base)
    env = {"PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(venv)}
    return Workspace({TESTBED: folder / "repo"}, read_only, env)
