"""What environments have in common whose actions are shell commands: :class:`ShellEnvironment`.

The conventions are those that users of mini-swe-agent know: one command a turn, run by ``bash -c`` in a fresh shell (no
variable or directory lives on), long output loses its middle, and a command whose output begins with the line
``COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`` hands the work in.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from verl_bpo.sandbox.base import Environment, Observation, SandboxError
from verl_bpo.sandbox.volatile import VOLATILE, hide
from verl_bpo.shells.base import SHELLS, CommandResult, Limits, Saved, Shell, Workspace

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_BLOCK = re.compile(r"```(?:bash|sh|shell|mswea_bash_command)?[ \t]*\n(.*?)\n?```", re.DOTALL)
_LIST = r"""
skipped='-name .git -o -name __pycache__'
listing=$(find . /tmp \( $skipped \) -prune -o -printf '%p\t%y %m %l\n'
find . /tmp \( $skipped \) -prune -o -type f -print0 | sort -z | xargs -0 -r sha256sum | sed -E 's/^(\S+)  (.*)/\2\t\1/')
if [ ${#listing} -gt 500000 ]; then listing="all files	$(sort <<<"$listing" | sha256sum)"; fi
printf '%s\n' "$listing"
"""
"""Path, and kind, mode, target or hash of everything in the trees; one hash where that would be too long to send."""


@dataclass(frozen=True)
class _State:
    files: Saved
    done: bool

    @property
    def nbytes(self) -> int | None:
        return self.files.nbytes


class ShellEnvironment(Environment):
    """A task that is done by shell commands in a sandbox. A subclass opens the shell, words the task and scores it.

    A snapshot holds the files; a command's processes end with it, so there is nothing else.

    Args:
        timeout: seconds a command may take. Keep ``bpo.env.step_timeout`` well above it.
        output_chars: of a longer output, the middle is left out.
        observation: ``plain``: the output, and the exit code where it isn't 0. ``tagged``: both in tags, as
            mini-swe-agent shows them.
        limits: values of :class:`verl_bpo.shells.base.Limits` by name.
        allow_unsafe: run even where the isolation or a limit isn't in force.
        execution: the kind of shell by name, see :data:`verl_bpo.shells.base.SHELLS`; ``bpo.env.execution`` fills it.
        shell: options of that kind, see the ``open`` of its class. ``bpo.env.container`` fills those of ``container``.

    Raises:
        EnvironmentUnavailable: there is no such kind of shell.
        SandboxError: no shell of this kind can be opened here.
    """

    runs_commands = True
    volatile = VOLATILE
    """Of what commands say, clock, durations, process numbers, temporary names and addresses differ from play to play."""

    def __init__(
        self,
        timeout: float = 30.0,
        output_chars: int = 10_000,
        observation: str = "tagged",
        limits: dict[str, Any] | None = None,
        allow_unsafe: bool = False,
        execution: str = "local",
        shell: dict[str, Any] | None = None,
    ) -> None:
        if observation not in ("plain", "tagged"):
            raise ValueError(f"observation={observation!r}: use 'plain' or 'tagged'")
        if output_chars < 100:
            raise ValueError(f"output_chars={output_chars} must be at least 100")
        self._timeout, self._output_chars, self._observation = timeout, output_chars, observation
        self._limits = Limits(**{"seconds": timeout, **(limits or {})})
        self._shells, self._shell_options, self._allow_unsafe = SHELLS.load(execution), dict(shell or {}), allow_unsafe
        self._shells.check(**self._shell_options)
        self._shell: Shell | None = None
        self._done = True

    @abstractmethod
    def _open(self, task: str, seed: int) -> tuple[Shell, str]:
        """The shell with the task's files, fresh (see :meth:`_open_shell`), and the task in words.

        Raises:
            TaskError: there is no such task.
        """

    @abstractmethod
    def _score(self, shell: Shell) -> tuple[float, dict[str, Any]]:
        """Reward of the files as they are, and ``info``. Called once, at the end; it may change the files."""

    def _open_shell(self, workspace: Workspace) -> Shell:
        """A fresh shell of the kind that the config names. Raises what :meth:`verl_bpo.shells.base.Shell.open` does."""
        return self._shells.open(workspace, self._limits, self._allow_unsafe, **self._shell_options)

    def _actions(self) -> tuple[str, ...] | None:
        """Commands to offer, where the environment knows some."""
        return None

    def reset(self, task: str, seed: int = 0) -> Observation:
        self._shell, text = self._open(task, seed)
        self._done = False
        return Observation(text, actions=self._actions())

    def step(self, action: str) -> Observation:
        if self._done:
            raise SandboxError("the task is over: reset first")
        command, problem = read_command(action)
        if command is None:
            return Observation(problem, actions=self._actions())
        result = self._shell.execute(command, timeout=self._timeout)
        if result.returncode == 0 and result.output.lstrip().split("\n", 1)[0].strip() == SUBMIT:
            return self._submit()
        return Observation(self._show(result), actions=self._actions(), info={"exit_code": result.returncode})

    def _submit(self) -> Observation:
        self._done = True
        reward, info = self._score(self._shell)
        return Observation("Submitted.", reward=reward, terminated=True, info={"won": reward >= 1.0, **info})

    def save_state(self) -> _State:
        return _State(self._shell.save(), self._done)

    def load_state(self, state: _State) -> None:
        self._shell.load(state.files)
        self._done = state.done

    def digest(self) -> dict[str, str]:
        """Every file's kind, mode and content, but for version control's and compiled Python. Temporary names are hidden."""
        parts: dict[str, list[str]] = {}
        for line in self._shell.execute(_LIST, timeout=Limits.seconds).output.splitlines():
            path, _, what = line.partition("\t")
            parts.setdefault(hide(path, self.volatile), []).append(what)
        return {path: " ".join(sorted(parts[path])) for path in sorted(parts)}

    def close(self) -> None:
        if self._shell is not None:
            self._shell.close()

    def _show(self, result: CommandResult) -> str:
        output = shorten(result.output, self._output_chars)
        if self._observation == "plain":
            notes = [f"(stopped after {self._timeout:g} s)"] if result.timed_out else []
            notes += [f"(exit code {result.returncode})"] if result.returncode and not result.timed_out else []
            return "\n".join([*([output.rstrip("\n")] if output.strip() else []), *notes]) or "(no output)"
        if result.timed_out:
            return (
                f"The command took longer than {self._timeout:g} s and was stopped.\n<output>\n{output}</output>\n"
                "Use a command that ends by itself and needs no input."
            )
        return f"<returncode>{result.returncode}</returncode>\n<output>\n{output}</output>"


def read_command(action: str) -> tuple[str | None, str]:
    """The command of an action: its one fenced block, or all of it when there is none. With several: None and why."""
    blocks = _BLOCK.findall(action)
    if len(blocks) > 1:
        return None, f"Give exactly one command: {len(blocks)} were found. Nothing was run."
    if not blocks and action.lstrip().startswith("```"):
        return None, "Give exactly one command: the block of yours has no end. Nothing was run."
    command = (blocks[0] if blocks else action).strip()
    return (command, "") if command else (None, "Give exactly one command: none was found.")


def shorten(text: str, most: int) -> str:
    """``text`` without its middle, about ``most`` characters long; what is left out is counted."""
    if len(text) <= most:
        return text
    left_out = len(text) - most
    return f"{text[: most // 2]}\n[... {left_out} characters left out ...]\n{text[-(most - most // 2) :]}"
