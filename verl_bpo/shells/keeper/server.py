"""What the other side asks for.

Layers are numbered by the other side. A request names the frozen layers that a branch stands on and its own top layer;
whatever isn't there yet is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal

from verl_bpo.shells.keeper.bubblewrap import Bubblewrap
from verl_bpo.shells.keeper.cgroups import ControlGroup
from verl_bpo.shells.keeper.commands import Commands
from verl_bpo.shells.keeper.git import GitFiles
from verl_bpo.shells.keeper.line import receive, send
from verl_bpo.shells.keeper.overlay import OverlayFiles
from verl_bpo.shells.keeper.system import (
    MS_NODEV,
    MS_NOSUID,
    MS_REMOUNT,
    Refused,
    adopt_orphans,
    enter_namespaces,
    mount,
    unmount,
)


class Keeper:
    """Files, limits and commands of one shell. ``specification`` is what :class:`verl_bpo.shells.local.LocalShell` sends."""

    def __init__(self, specification: dict) -> None:
        self.spec, self.limits = specification, specification["limits"]
        self.isolated = specification["bwrap"] is not None
        adopt_orphans()
        os.umask(0o022)
        root = os.geteuid() == 0
        self.user_namespace = enter_namespaces(root) if self.isolated else False
        os.chdir(specification["store"])
        if self.isolated:
            mount("tmpfs", ".", "tmpfs", MS_NOSUID | MS_NODEV, "mode=700")
            os.chdir(specification["store"])
        self.files = self._open_files()
        self.group = ControlGroup(f"verl-bpo-{os.getpid()}", self.limits)
        self.group.join()  # moving a process into a group may take 10 ms, so commands inherit it from here
        self.facts = {
            "files": self.files.name,
            "isolation": "bwrap" if self.isolated else "none",
            "processes": self.group.enforced.get("pids") or ("none" if root else "rlimit"),
            "memory": self.group.enforced.get("memory") or "rlimit, each process by itself",
            "disk": "tmpfs" if self.isolated else "file size only",
        }
        self.commands = Commands(
            specification,
            Bubblewrap(specification) if self.isolated else None,
            processes_by_rlimit=self.facts["processes"] == "rlimit",
            memory_by_rlimit="memory" not in self.group.enforced,
        )

    def _open_files(self):
        wanted, reason = self.spec["files"], ""
        if wanted in ("auto", "overlay") and self.isolated:
            try:
                return OverlayFiles(self.spec["trees"], self.limits, self.user_namespace)
            except OSError as error:
                reason = str(error)
                for name in os.listdir("."):  # what the attempt left
                    with contextlib.suppress(OSError):
                        unmount(name)
                    shutil.rmtree(name, ignore_errors=True)
        if wanted == "overlay":
            raise Refused(f"overlay file systems aren't permitted here ({reason or 'not isolated'}): use files=git")
        if shutil.which("git") is None:
            raise Refused(f"neither overlay file systems ({reason or 'not isolated'}) nor git are here: install git")
        if self.isolated:  # copies and objects together
            size = sum(_size(base) for _, base in self.spec["trees"] if base) * 2 + self.limits["disk"]
            options = f"mode=700,size={size},nr_inodes={self.limits['files'] + 10 * size // 4096}"
            mount("none", ".", "tmpfs", MS_REMOUNT | MS_NOSUID | MS_NODEV, options)
        return GitFiles(self.spec["trees"])

    def run(
        self, stdin: bytes, chain: list[int], top: int, command: str, cwd: str, timeout: float, most: int
    ) -> tuple[tuple[int, bool, int], bytes]:
        """See :meth:`verl_bpo.shells.keeper.commands.Commands.run`; the output comes last."""
        roots = self.files.show(tuple(chain), top)
        output, *facts = self.commands.run(roots, command, cwd, stdin, timeout, most)
        return tuple(facts), output

    def freeze(self, _: bytes, top: int) -> tuple[int | None, bytes]:
        return self.files.freeze(top), b""

    def drop(self, _: bytes, layers: list[int]) -> tuple[None, bytes]:
        for layer in layers:
            self.files.drop(layer)
        return None, b""

    def serve(self) -> None:
        """Answer until the other side goes away."""
        line = self.spec["line"]
        while (request := receive(line)) is not None:
            (operation, *arguments), body = request
            try:
                value, output = getattr(self, operation)(body, *arguments)
                answer = ("ok", value)
            except (Refused, OSError, KeyError, RecursionError) as error:
                answer = ("error", f"{error}" if isinstance(error, Refused) else f"{type(error).__name__}: {error}")
                output = b""
            send(line, answer, output)


def _size(folder: str) -> int:
    """Bytes of a tree in whole pages."""
    return sum(
        -(-os.lstat(f"{where}/{name}").st_size // 4096) * 4096
        for where, names, files in os.walk(folder)
        for name in (*names, *files)
    )


def main(line: int, specification: str) -> None:
    """The process's whole life. ``line``: descriptor of a socket."""
    os.set_inheritable(line, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the other side, which then ends this one
    spec = json.loads(specification)
    keeper = None
    try:
        keeper = Keeper({**spec, "line": line})
    except (Refused, OSError) as error:
        send(line, ("error", str(error)))
        return
    try:
        send(line, ("ok", keeper.facts))
        keeper.serve()
    except OSError:
        pass  # the other side is gone
    finally:
        keeper.group.remove()
