"""The interface of :class:`verl_bpo.sandbox.overlay.Shell` on Podman or Docker, for tasks that come as images.

A state is an image: saving commits the container (which pauses it), loading starts another one from it. That costs 0.1 s
and more where a layer of :mod:`verl_bpo.sandbox.overlay` costs a millisecond, so both wait until they are needed: a
state is committed only if something changed, and a container started only when a command is run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_bpo.sandbox.base import SandboxError
from verl_bpo.sandbox.overlay import PINNED, CommandResult, Limits

_OWNER = "verl-bpo-owner"
_ENGINE_SECONDS = 300.0
# Kills what the command left: kill -1 spares the caller and the container's first process.
_WRAPPER = 'timeout -s KILL "$1" "$2" -c "$3"; code=$?; kill -9 -1 2>/dev/null; exit $code'
_reclaimed: set[str] = set()


class ContainerFiles:
    """A saved state: an image, removed when nothing refers to it any more."""

    def __init__(self, engine: Sequence[str], image: str, nbytes: int | None, below: ContainerFiles | None) -> None:
        self.image, self.nbytes, self._below = image, nbytes, below
        if below is not None:  # the image that the task came with stays
            weakref.finalize(self, _quietly, [*engine, "rmi", "--force", image])


class ContainerShell:
    """Commands in containers of one image. Used by one thread at a time (calls from several take turns).

    No network, no capabilities, and limits on processes, memory and file size; the engine's own isolation otherwise.
    When a command returns, what it started is dead. When this process dies, its container ends; images that it left are
    removed by the next process that makes a shell.

    Args:
        image: what the engine calls it; it must have ``timeout`` and the shell.
        cwd: where commands run.
        engine: the program with its own options, such as ``podman --runtime runc --cgroup-manager=cgroupfs``; None
            takes podman or docker, whichever is there.
        run_options: further options of ``run``.
        shell: ``bash``, or ``sh`` for images without it.
        allow_unsafe: accept that the disk isn't limited, where the engine's storage can't.

    Raises:
        SandboxError: there is no engine, or no such image.
    """

    def __init__(
        self,
        image: str,
        cwd: str = "/testbed",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        engine: str | None = None,
        run_options: Sequence[str] = (),
        shell: str = "bash",
        allow_unsafe: bool = False,
    ) -> None:
        found = shlex.split(engine) if engine else [shutil.which("podman") or shutil.which("docker") or ""]
        if not found[0] or shutil.which(found[0]) is None:
            raise SandboxError(f"no container engine ({engine or 'podman or docker'}): install one, or use local mode")
        self._engine, self.cwd, self.limits, self._program = found, cwd, limits or Limits(), shell
        self._lock = threading.RLock()
        if found[0] not in _reclaimed:
            _reclaimed.add(found[0])
            reclaim(found)
        self._ask("image", "inspect", image, "--format", "{{.Id}}")
        limit = self.limits
        self._options = ["--network", "none", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
        self._options += ["--pids-limit", str(limit.processes), "--memory", str(limit.memory)]
        self._options += ["--memory-swap", str(limit.memory), "--ulimit", f"fsize={limit.file_size}:{limit.file_size}"]
        self._options += ["--ulimit", "core=0:0", "--hostname", "sandbox", "--label", f"{_OWNER}={_myself()}"]
        self._options += [] if allow_unsafe else ["--storage-opt", f"size={limit.disk}"]
        for name, value in {**PINNED, **(env or {})}.items():
            if name != "PATH" or name in (env or {}):  # an image knows its own
                self._options += ["--env", f"{name}={value}"]
        self._options += list(run_options)
        self.facts = {
            "files": "container", "isolation": Path(found[0]).name, "processes": "container", "memory": "container",
            "disk": "file size only" if allow_unsafe else "container",
        }  # fmt: skip
        self._first = self._state = ContainerFiles(found, image, None, None)
        self._engines_own: set[str] | None = None
        """Changes that a container of no command has: files that the engine puts there."""
        self._name: str | None = None
        self._process: subprocess.Popen | None = None

    def execute(
        self, command: str, cwd: str | None = None, timeout: float | None = None, stdin: str | bytes = b""
    ) -> CommandResult:
        """Run a command with the shell. When it returns, nothing that it started lives.

        Raises:
            SandboxError: the engine failed.
        """
        seconds = self.limits.seconds if timeout is None else timeout
        with self._lock:
            self._start()
            line = [*self._engine, "exec", "-i", "-w", cwd or self.cwd, self._name, "sh", "-c", _WRAPPER, "sh"]
            line += [f"{seconds:g}", self._program, command]
            data = stdin.encode() if isinstance(stdin, str) else stdin
            started = time.monotonic()
            try:
                done = subprocess.run(
                    line, input=data, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds + 30
                )
            except subprocess.TimeoutExpired as error:
                self._stop()
                raise SandboxError("the container didn't answer and was killed: its unsaved files are lost") from error
            late = done.returncode == 137 and time.monotonic() - started >= seconds
            if done.returncode in (125, 126) and self._process.poll() is not None:
                raise SandboxError(f"the container ended: {done.stdout.decode(errors='replace').strip()[-200:]}")
        output, most = done.stdout, self.limits.output
        if len(output) > most:
            left_out = f"\n[... {len(output) - most} bytes left out ...]\n".encode()
            output = output[: most // 2] + left_out + output[-(most - most // 2) :]
        return CommandResult(output.decode("utf-8", "replace"), done.returncode, late)

    def save(self) -> ContainerFiles:
        """The files as they are now. Where nothing changed since the last one, it is the same again."""
        with self._lock:
            if self._name is not None and self._changes() - self._engines_own:
                image = f"localhost/verl-bpo-{uuid.uuid4().hex[:12]}"
                self._ask("commit", "--change", f"LABEL {_OWNER}={_myself()}", self._name, image)
                self._state = ContainerFiles(self._engine, image, None, self._state)
                self._stop()  # a container that went on would be compared with the older image
            return self._state

    def load(self, files: ContainerFiles) -> None:
        """Go to a saved state, which stays valid. What wasn't saved is lost."""
        with self._lock:
            self._stop()
            self._state = files

    def reset(self) -> None:
        """Go back to the image as it was first."""
        self.load(self._first)

    def close(self) -> None:
        """End the container. Safe to call twice."""
        with self._lock:
            self._stop()

    def __enter__(self) -> ContainerShell:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._name is not None and self._process.poll() is None:
            return
        self._name = f"verl-bpo-{uuid.uuid4().hex[:12]}"
        line = [*self._engine, "run", "--rm", "-i", "--name", self._name, *self._options, "--entrypoint", self._program]
        # It reads from this process, so that it ends with it; bash also buries what commands left.
        line += [self._state.image, "-c", "echo ready; while read -r line; do :; done"]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if self._process.stdout.readline() != b"ready\n":
            problem = self._process.communicate()[1].decode(errors="replace").strip()
            self._name = None
            advice = " (the storage can't limit the disk? allow_unsafe=true does without)" if "size" in problem else ""
            raise SandboxError(f"no container of {self._state.image}: {problem[-300:]}{advice}")
        if self._engines_own is None:
            self._engines_own = self._changes()

    def _changes(self) -> set[str]:
        return set(self._ask("diff", self._name).splitlines())

    def _stop(self) -> None:
        if self._name is not None:
            _quietly([*self._engine, "rm", "--force", "--time", "0", self._name])
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
                with contextlib.suppress(OSError):
                    stream.close()
            self._process.wait()
            self._name = None

    def _ask(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [*self._engine, *arguments], capture_output=True, text=True, errors="replace", timeout=_ENGINE_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{Path(self._engine[0]).name} {arguments[0]}: {error}") from error
        if done.returncode != 0:
            raise SandboxError(f"{Path(self._engine[0]).name} {arguments[0]} failed: {done.stderr.strip()[-300:]}")
        return done.stdout


def reclaim(engine: Sequence[str]) -> list[str]:
    """Remove containers and images whose owner is gone; which they were."""
    gone = []
    for listing, remove in ((["ps", "-aq"], ["rm", "--force"]), (["images", "-q"], ["rmi", "--force"])):
        listed = subprocess.run([*engine, *listing, "--filter", f"label={_OWNER}"], capture_output=True, text=True)
        for name in dict.fromkeys(listed.stdout.split()):
            shown = f'{{{{index .Config.Labels "{_OWNER}"}}}}'
            owner = subprocess.run([*engine, "inspect", "--format", shown, name], capture_output=True, text=True)
            pid, _, started = owner.stdout.strip().partition("-")
            if started and _started(pid) != started:
                _quietly([*engine, *remove, name])
                gone.append(name)
    return gone


def _myself() -> str:
    """This process, told from a later one with the same number by its start."""
    return f"{os.getpid()}-{_started(str(os.getpid()))}"


def _started(pid: str) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _quietly(line: Sequence[str]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(line, capture_output=True, timeout=_ENGINE_SECONDS)
