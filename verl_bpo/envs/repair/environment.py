"""Repair a small Python package by shell commands: tasks of :mod:`verl_bpo.envs.repair.generate` in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_bpo.sandbox.base import Observation, TaskError
from verl_bpo.shells.base import CommandResult, Limits, Shell, Workspace
from verl_bpo.shells.environment import SUBMIT, ShellEnvironment

# Calls the functions in the sandbox; what comes out is compared outside, where no edit can reach. What the package itself
# says, at its end too, goes nowhere.
_CALL = """
import importlib, json, os, sys
answer = os.fdopen(os.dup(1), "w")
calls = json.load(sys.stdin)
for stream in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
sys.path.insert(0, ".")
out = []
for module, name, call in calls:
    try:
        out.append([getattr(importlib.import_module(module), name)(*call)])
    except BaseException:
        out.append([])
answer.write("\\n" + json.dumps(out))
answer.close()
"""
_ANSWER = 64 << 20
"""Bytes of all calls' results."""
_UNPACK = "import json, sys\nfor name, text in json.load(sys.stdin).items():\n    open(name, 'wb').write(text.encode())"


class RepairEnvironment(ShellEnvironment):
    """One broken package. A task is the path of a ``.json`` file made by ``verl-bpo make-games --kind repair``.

    The reward is 1.0 when the work is handed in (``submit``, or the marker of :mod:`verl_bpo.shells.environment`) and every
    call comes out right; what was done to the tests changes nothing. Admissible actions offered are the looks, the test run
    and edits of which one is right; any other command is run as well.
    """

    def __init__(
        self,
        timeout: float = 10.0,
        output_chars: int = 2000,
        observation: str = "plain",
        limits: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        limits = {"memory": 256 << 20, "disk": 16 << 20, "files": 2000, "processes": 64, **(limits or {})}
        super().__init__(timeout, output_chars, observation, limits, **options)

    @classmethod
    def tasks(cls, split: str = "train", root: str = "repairs", **kwargs: Any) -> list[str]:
        return sorted(str(path.resolve()) for path in Path(root).expanduser().glob(f"{split}/*.json"))

    def _open(self, task: str, seed: int) -> tuple[Shell, str]:
        try:
            self._task = json.loads(Path(task).expanduser().read_text(encoding="utf-8"))
            files = self._task["files"]
        except OSError as error:
            raise TaskError(f"no task {task} ({error.strerror}): verl-bpo make-games --kind repair") from error
        except (ValueError, KeyError, TypeError) as error:
            raise TaskError(f"{task} is no repair task ({type(error).__name__}: {error})") from error
        shell = self._shell or self._open_shell(Workspace({"/testbed": None}))
        shell.reset()
        done = shell.execute(f'python3 -c "{_UNPACK}"', stdin=json.dumps(files), timeout=Limits.seconds)
        if done.returncode != 0:
            shell.close()
            raise TaskError(f"the files of {task} can't be written in the sandbox: {done.output.strip()[-300:]}")
        names = " ".join(name for name in sorted(files) if name != "tests.py")
        text = (
            f"Repair {names} so that python3 tests.py passes, then submit.\n"
            "Each answer is one shell command; files are kept, nothing else is."
        )
        return shell, text

    def step(self, action: str) -> Observation:
        return super().step(f"echo {SUBMIT}" if action.strip() == "submit" else action)

    def _actions(self) -> tuple[str, ...]:
        return tuple(self._task["offers"])

    def _score(self, shell: Shell) -> tuple[float, dict[str, Any]]:
        checks = self._task["checks"]
        calls = json.dumps([check[:3] for check in checks])
        result = shell.execute(f"python3 -I -c '{_CALL}'", stdin=calls, timeout=self._timeout, most=_ANSWER)
        info = {"task_type": self._task["type"]}
        try:
            answers = json.loads(result.output.rsplit("\n", 1)[-1])
            right = [answer == [check[3]] for answer, check in zip(answers, checks, strict=True)]
        except (ValueError, TypeError):
            right = [False]
            info |= _unjudged(result, self._timeout)
        return float(all(right)), {"score": sum(right) / len(checks), **info}

    def expert_actions(self) -> list[str]:
        return list(self._task["expert"])


def _unjudged(result: CommandResult, timeout: float) -> dict[str, str]:
    if result.timed_out:
        return {"unjudged": "timeout", "problem": f"the calls took longer than {timeout:g} s"}
    if result.left_out:
        return {"unjudged": "log_too_long", "problem": f"the calls gave more than {_ANSWER >> 20} MB"}
    return {"unjudged": "no_end", "problem": f"the calls ended with exit code {result.returncode} and without results"}
