"""Commands on Podman or Docker, for tasks that come as images.

A saved state is a container that waits, or an image. Making an image takes 0.1 s and more where a layer of
:mod:`verl_bpo.shells.local` costs a millisecond, so it waits until it is needed: until a state is gone on from that
somebody else still holds. Branches that only take turns need none.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shlex
import shutil
import subprocess
import tarfile
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from pydantic import model_validator

from verl_bpo.options import ConfigError, Options
from verl_bpo.sandbox.base import SandboxError, TaskError
from verl_bpo.shells.base import PINNED, CommandResult, Limits, Shell, Workspace, unfit

SHELL = "ContainerShell"
INSTALL = "apt-get install podman runc, or Docker's engine"

ENGINES = ("podman", "docker")
_OWNER = "verl-bpo-owner"
_ENGINE_SECONDS = 300.0
"""That an engine may take for one thing."""
_PULL_SECONDS = 3600.0
_END_SECONDS = 10.0
"""That a container's client may take to end when the container has."""
_MOST_WAITING = 8
"""Containers of one shell that wait; the state that has waited longest becomes an image then."""
# Docker carries output and errors apart, so that their order is lost unless they are one from the start. Kills what the
# command left: kill -1 spares the caller and the container's first process.
_WRAPPER = 'timeout -s KILL "$1" "$2" -c "$3" 2>&1; code=$?; kill -9 -1 2>/dev/null; exit $code'
# It reads from this process, so that it ends with it; bash also buries what commands left.
_FIRST_PROCESS = 'mkdir -p "$0" || exit; echo ready; while read -r line; do :; done'
_ADVICE = {
    "rlimit": "limits can't be raised here? bpo.env.container.run_options='--ulimit nofile=1024:1024 --ulimit "
    "nproc=4096:4096' leaves them low",
    "storage opt": "the storage can't limit the disk? +bpo.env.kwargs.allow_unsafe=true does without",
}
"""What to do about a container that doesn't start, by words of the engine's complaint (hyphens apart)."""
_DISK_TRIAL = 16 << 20
_FILL = 'mkdir -p "$0"; for d in "$0" /tmp; do cd "$d" && : > trial && break; done; '
_FILL += f"head -c {2 * _DISK_TRIAL} /dev/zero > trial"
_disk_limit_kept: dict[tuple[str, ...], bool] = {}
_reclaimed: set[str] = set()


class ContainerConfig(Options):
    """Where ``bpo.env.execution=container`` runs shells."""

    engine: str | None = None
    """Container engine: a program with options of its own, such as ``podman --runtime runc``. None: the first of podman and
    docker that answers."""
    run_options: str = ""
    """Further options of the engine's ``run``, such as ``--ulimit nofile=1024:1024`` or ``--user 1000``."""
    image: str | None = None
    """Image of tasks that name none (``repair``: one with bash and Python). ``swebench`` has its own for each instance."""

    @model_validator(mode="after")
    def _check(self) -> ContainerConfig:
        for key in ("engine", "run_options"):
            try:
                shlex.split(getattr(self, key) or "")
            except ValueError as error:
                raise ConfigError(f"bpo.env.container.{key}={getattr(self, key)!r}: {error}") from error
        return self


@cache
def find_engine(engine: str | None = None) -> tuple[str, ...]:
    """The command line of a container engine that answers.

    Raises:
        SandboxError: none does; says why.
    """
    problems = []
    for candidate in [engine] if engine else ENGINES:
        line = shlex.split(candidate)
        if shutil.which(line[0]) is None:
            problems.append(f"{line[0]}: not installed")
            continue
        try:
            done = subprocess.run([*line, "ps", "-q"], capture_output=True, text=True, timeout=_ENGINE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"{line[0]}: {error}")
            continue
        if done.returncode == 0:
            return tuple(line)
        problems.append(f"{line[0]}: {_said(done.stderr)}")
    raise SandboxError(
        f"no container engine can be used ({'; '.join(problems)}): install podman or start docker, name another "
        "(bpo.env.container.engine), or do without (bpo.env.execution=local)"
    )


def has_image(engine: Sequence[str], image: str) -> bool:
    """Whether the image is on this machine."""
    return _run([*engine, "image", "inspect", image]).returncode == 0


def pull_image(engine: Sequence[str], image: str) -> None:
    """Get an image from its registry.

    Raises:
        SandboxError: it can't be had; says why.
    """
    done = _run([*engine, "pull", "--quiet", image], _PULL_SECONDS)
    if done.returncode != 0:
        raise SandboxError(f"{Path(engine[0]).name} can't pull {image}: {_said(done.stderr)}")


def remove_image(engine: Sequence[str], image: str) -> None:
    """Remove an image, if it is there."""
    _quietly([*engine, "rmi", "--force", image])


class _Container:
    """A running container. ``began_in`` is the state that it was started from, whose image it needs."""

    def __init__(self, engine: Sequence[str], name: str, process: subprocess.Popen, began_in: ContainerFiles) -> None:
        self.name, self.process, self.began_in = name, process, began_in
        self.remove = weakref.finalize(self, _remove, engine, name, process)


class _Kept:
    """What a saved state consists of: an image, or a container that nothing has been done in since."""

    def __init__(self, image: str | None, container: _Container | None, below: ContainerFiles | None) -> None:
        self.image, self.container, self.below = image, container, below

    def discard(self, engine: Sequence[str]) -> None:
        if self.container is not None:
            self.container.remove()
        if self.image is not None and self.below is not None:  # the image that the task came with stays
            _quietly([*engine, "rmi", "--force", self.image])
        self.container = self.below = None


class ContainerFiles:
    """A saved state of a container's files. What it holds goes when nothing refers to it any more."""

    nbytes: int | None = None
    """Not known: engines don't say it without walking the files."""

    def __init__(self, engine: Sequence[str], kept: _Kept) -> None:
        self._kept = kept
        weakref.finalize(self, kept.discard, engine)

    @property
    def image(self) -> str | None:
        """What the engine calls it, if it is an image."""
        return self._kept.image


class ContainerShell(Shell):
    """Commands in containers of one image. Used by one thread at a time (calls from several take turns).

    No network, no capabilities, and limits on processes, memory and file size; the engine's own isolation otherwise.
    When a command returns, what it started is dead. When this process dies, its containers end; images that it left are
    removed by the next process that makes a shell.

    Args:
        image: what the engine calls it; it must have ``timeout`` and the shell.
        cwd: where commands run.
        engine: see :class:`ContainerConfig`, like ``run_options``.
        shell: ``bash``, or ``sh`` for images without it.
        allow_unsafe: accept that the disk isn't limited, where the engine's storage can't.

    Raises:
        SandboxError: there is no engine, or no such image.
    """

    files_from = "image"

    @classmethod
    def open(
        cls,
        workspace: Workspace,
        limits: Limits,
        allow_unsafe: bool = False,
        engine: str | None = None,
        run_options: str = "",
        image: str | None = None,
    ) -> ContainerShell:
        """One of the workspace's image; of ``image`` where it names none."""
        wanted = workspace.image or image
        if wanted is None:
            raise SandboxError("this task names no image: set bpo.env.container.image to one that has what it needs")
        if not has_image(find_engine(engine), wanted):
            raise TaskError(f"no image {wanted} on this machine: pull it, or get the task ready here")
        cwd = next(iter(workspace.trees))
        return cls(wanted, cwd, workspace.env, limits, engine, run_options, allow_unsafe=allow_unsafe)

    @classmethod
    def check(cls, **options: str | None) -> None:
        """``options``: those of :class:`ContainerConfig`."""
        find_engine(ContainerConfig(**options).engine)

    @classmethod
    def probe(cls, **options: str | None) -> tuple[bool, str]:
        """Tries an empty image with the host's own programs in it, read-only, so that nothing needs to be there or be had."""
        return _probe(ContainerConfig(**options))

    def __init__(
        self,
        image: str,
        cwd: str = "/testbed",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        engine: str | None = None,
        run_options: str = "",
        shell: str = "bash",
        allow_unsafe: bool = False,
    ) -> None:
        self._engine = list(find_engine(engine))
        self.cwd, self.limits, self._program = cwd, limits or Limits(), shell
        self._lock = threading.RLock()
        if self._engine[0] not in _reclaimed:
            _reclaimed.add(self._engine[0])
            reclaim(self._engine)
        self._ask("image", "inspect", image, "--format", "{{.Id}}")
        limit = self.limits
        self._options = ["--network", "none", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
        self._options += ["--pids-limit", str(limit.processes), "--memory", str(limit.memory)]
        self._options += ["--memory-swap", str(limit.memory), "--ulimit", f"fsize={limit.file_size}:{limit.file_size}"]
        self._options += ["--ulimit", "core=0:0", "--hostname", "sandbox", "--stop-timeout", "0"]
        self._options += ["--label", f"{_OWNER}={_myself()}"]
        self._options += [] if allow_unsafe else ["--storage-opt", f"size={limit.disk}"]
        for name, value in {**PINNED, **(env or {})}.items():
            if name != "PATH" or name in (env or {}):  # an image knows its own
                self._options += ["--env", f"{name}={value}"]
        self._options += shlex.split(run_options)
        self.facts = {
            "files": "container", "isolation": Path(self._engine[0]).name, "processes": "container",
            "memory": "container", "disk": "file size only" if allow_unsafe else "container",
        }  # fmt: skip
        if not allow_unsafe and not _keeps_disk_limit(tuple(self._engine), image, shell, cwd, run_options):
            raise SandboxError(
                f"{Path(self._engine[0]).name} takes a limit on the disk and doesn't keep it (a trial wrote "
                f"{2 * _DISK_TRIAL >> 20} MB where {_DISK_TRIAL >> 20} were allowed): "
                "+bpo.env.kwargs.allow_unsafe=true does without"
            )
        self._first = ContainerFiles(self._engine, _Kept(image, None, None))
        self._state: ContainerFiles | None = self._first
        """What the next command goes on from; None while a container runs."""
        self._container: _Container | None = None
        self._waiting: list[weakref.ref[ContainerFiles]] = []
        self._engines_own: set[str] | None = None
        """Changes that a container of no command has: files that the engine puts there."""

    def execute(
        self,
        command: str,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        most: int | None = None,
    ) -> CommandResult:
        """As the protocol says, with the program that the image has.

        Raises:
            SandboxError: the engine failed, or the container ended; what wasn't saved is lost.
        """
        seconds = self.limits.seconds if timeout is None else timeout
        if problem := unfit(command):
            return CommandResult(problem, 2)
        with self._lock:
            container = self._running()
            line = [*self._engine, "exec", "-i", "-w", cwd or self.cwd, container.name, "sh", "-c", _WRAPPER, "sh"]
            line += [f"{seconds:g}", self._program, command]
            data = stdin.encode() if isinstance(stdin, str) else stdin
            started = time.monotonic()
            try:
                done = subprocess.run(
                    line, input=data, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds + 30
                )
            except subprocess.TimeoutExpired as error:
                self._drop()
                raise SandboxError("the container didn't answer and was killed: its unsaved files are lost") from error
            late = done.returncode == 137 and time.monotonic() - started >= seconds
            if not self._lives(container, done, late):
                self._drop()
                said = _said(done.stdout.decode(errors="replace"))
                raise SandboxError(f"the container ended and its unsaved files are lost: {said}")
        output, most = done.stdout, most or self.limits.output
        left_out = max(0, len(output) - most)
        if left_out:
            middle = f"\n[... {left_out} bytes left out ...]\n".encode()
            output = output[: most // 2] + middle + output[-(most - most // 2) :]
        return CommandResult(output.decode("utf-8", "replace"), done.returncode, late, output, left_out)

    def save(self) -> ContainerFiles:
        with self._lock:
            container = self._container
            if container is None:
                return self._state
            if not self._changes(container) - self._engines_own:
                return container.began_in
            state = ContainerFiles(self._engine, _Kept(None, container, container.began_in))
            self._container, self._state = None, state
            self._waiting = [ref for ref in self._waiting if ref() is not None and ref()._kept.container is not None]
            self._waiting.append(weakref.ref(state))
            if len(self._waiting) > _MOST_WAITING:
                self._make_image(self._waiting.pop(0)())
            return state

    def load(self, files: ContainerFiles) -> None:
        with self._lock:
            self._drop()
            self._state = files

    def reset(self) -> None:
        """Go back to the image as it was first."""
        self.load(self._first)

    def keep(self, image: str) -> None:
        """Make an image of the files as they are now, which stays when this shell and its states are gone."""
        with self._lock:
            self._ask("commit", "--change", f"LABEL {_OWNER}=", self._running().name, image)

    def close(self) -> None:
        """End the container. Safe to call twice."""
        self.reset()

    def _running(self) -> _Container:
        """The container to go on in. A state that somebody else still holds becomes an image before."""
        if self._container is not None:
            return self._container
        kept = self._state._kept
        if kept.container is not None:
            container, kept.container = kept.container, None  # first: a state takes with it what it has
            held, self._state = weakref.ref(self._state), None
            if held() is None:  # nobody can load it again
                self._container = container
                return container
            self._state, kept.container = held(), container
            self._make_image(self._state)
        self._container = self._start(self._state)
        self._state = None
        return self._container

    def _make_image(self, state: ContainerFiles | None) -> None:
        """Turn a state that is a container into an image."""
        if state is None or state._kept.container is None:
            return
        image = f"localhost/verl-bpo-{uuid.uuid4().hex[:12]}"
        self._ask("commit", "--change", f"LABEL {_OWNER}={_myself()}", state._kept.container.name, image)
        state._kept.image = image
        # A container that went on would be compared with the older image.
        state._kept.container.remove()
        state._kept.container = None

    def _start(self, state: ContainerFiles) -> _Container:
        name = f"verl-bpo-{uuid.uuid4().hex[:12]}"
        line = [*self._engine, "run", "--rm", "-i", "--name", name, *self._options, "--entrypoint", self._program]
        line += ["--workdir", "/", state.image, "-c", _FIRST_PROCESS, self.cwd]
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        container = _Container(self._engine, name, process, state)
        try:
            ready = select.select([process.stdout], [], [], _ENGINE_SECONDS)[0] and os.read(process.stdout.fileno(), 64)
            problem = b"" if ready == b"ready\n" else process.communicate(timeout=_END_SECONDS)[1]
        except subprocess.TimeoutExpired:
            ready, problem = b"", f"nothing was heard in {_ENGINE_SECONDS:g} s".encode()
            container.remove()
        if ready != b"ready\n":
            problem = _said(problem.decode(errors="replace"))
            advice = next(
                (f" ({advice})" for words, advice in _ADVICE.items() if words in problem.replace("-", " ")), ""
            )
            raise SandboxError(f"no container of {state.image}: {problem}{advice}")
        if self._engines_own is None:
            self._engines_own = self._changes(container)
        return container

    def _lives(self, container: _Container, done: subprocess.CompletedProcess, late: bool) -> bool:
        """Whether the container outlived a command. Its own process may end a moment after the engine says that it is gone,
        so the engine is asked where what came back may be its own complaint."""
        if container.process.poll() is not None:
            return False
        killed = done.returncode == 137 and not late
        if not killed and not (done.returncode != 0 and done.stdout.startswith(b"Error")):
            return True
        asked = [*self._engine, "container", "inspect", "--format", "{{.State.Running}}", container.name]
        return _run(asked).stdout.strip() == "true"

    def _changes(self, container: _Container) -> set[str]:
        return set(self._ask("diff", container.name).splitlines())

    def _drop(self) -> None:
        """End the container that runs, and be in the state that it began in."""
        if self._container is not None:
            container, self._container = self._container, None
            self._state = container.began_in
            container.remove()

    def _ask(self, *arguments: str) -> str:
        done = _run([*self._engine, *arguments])
        if done.returncode != 0:
            raise SandboxError(f"{Path(self._engine[0]).name} {arguments[0]} failed: {_said(done.stderr)}")
        return done.stdout


def _run(line: Sequence[str], seconds: float | None = None) -> subprocess.CompletedProcess:
    """
    Raises:
        SandboxError: it can't be run, or took too long.
    """
    try:
        return subprocess.run(
            line,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds or _ENGINE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{Path(line[0]).name} {' '.join(line[1:2])}: {error}") from error


def _keeps_disk_limit(engine: tuple[str, ...], image: str, shell: str, cwd: str, run_options: str) -> bool:
    """Whether a limit on the disk that the engine takes is kept, tried once: btrfs may have lost count of its quotas."""
    key = (*engine, run_options)
    if key not in _disk_limit_kept:
        line = [
            *engine,
            *f"run --rm --network none --storage-opt size={_DISK_TRIAL}".split(),
            *shlex.split(run_options),
        ]
        line += ["--entrypoint", shell, image, "-c", _FILL, cwd]
        try:
            done = subprocess.run(line, capture_output=True, stdin=subprocess.DEVNULL, timeout=_ENGINE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{Path(engine[0]).name} run: {error}") from error
        _disk_limit_kept[key] = done.returncode != 0  # where none starts, the shell's own container will say why
    return _disk_limit_kept[key]


def _probe(config: ContainerConfig) -> tuple[bool, str]:
    image = f"localhost/verl-bpo-probe-{uuid.uuid4().hex[:12]}"
    try:
        engine = find_engine(config.engine)
        made = subprocess.run(
            [*engine, "import", "-", image], input=_empty_tar(), capture_output=True, timeout=_ENGINE_SECONDS
        )
        if made.returncode != 0:
            raise SandboxError(f"{engine[0]} import failed: {_said(made.stderr.decode(errors='replace'))}")
        host = " ".join(
            f"--volume {path}:{path}:ro" for path in ("/usr", "/bin", "/lib", "/lib64") if Path(path).is_dir()
        )
        options = {
            "engine": config.engine,
            "run_options": f"{config.run_options} {host}",
            "env": {"PATH": PINNED["PATH"]},
        }
        for unsafe in (False, True):
            try:
                with ContainerShell(image, cwd="/tmp", allow_unsafe=unsafe, **options) as shell:
                    if shell.execute("echo ready", timeout=60).output != "ready\n":
                        raise SandboxError("its commands give no answer")
                    facts = shell.facts
                break
            except SandboxError:
                if unsafe:
                    raise
    except SandboxError as error:
        return False, str(error)
    finally:
        with contextlib.suppress(SandboxError):
            _quietly([*find_engine(config.engine), "rmi", "--force", image])
    asked = [*engine, "version", "--format", "{{.Server.Version}}"]  # docker's client may be of another version
    version = f"{Path(engine[0]).name} {_run(asked).stdout.strip()}"
    limited = "limited" if facts["disk"] == "container" else "not limited by its storage: needs allow_unsafe=true"
    return True, f"{version}; processes, memory: limited; disk: {limited}"


def _empty_tar() -> bytes:
    """A root that others may read, which an image without any entry has not, and a folder for commands."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in (".", "tmp"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
    return file.getvalue()


def reclaim(engine: Sequence[str]) -> list[str]:
    """Remove containers and images whose owner is gone; which they were."""
    gone = []
    for listing, remove in ((["ps", "-aq"], ["rm", "--force"]), (["images", "-q"], ["rmi", "--force"])):
        listed = _run([*engine, *listing, "--filter", f"label={_OWNER}"])
        for name in dict.fromkeys(listed.stdout.split()):
            shown = f'{{{{index .Config.Labels "{_OWNER}"}}}}'
            owner = _run([*engine, "inspect", "--format", shown, name])
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


def _remove(engine: Sequence[str], name: str, process: subprocess.Popen) -> None:
    _quietly([*engine, "rm", "--force", name])
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            stream.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _said(text: str) -> str:
    """The end of what an engine said, as one line."""
    return " ".join(text.split())[-300:] or "it gave no reason"


def _quietly(line: Sequence[str]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(line, capture_output=True, timeout=_ENGINE_SECONDS)
