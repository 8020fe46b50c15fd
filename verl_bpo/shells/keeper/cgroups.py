"""Control groups: limits that hold for all processes of a shell together."""

from __future__ import annotations

import contextlib
import os

_SPARE_PROCESSES = 4  # this one and bubblewrap's


class ControlGroup:
    """Limits for all processes of one keeper's commands together, with cgroup v1 or v2; what isn't writable is left."""

    def __init__(self, name: str, limits: dict, root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> None:
        self.folders: list[str] = []
        self.enforced: dict[str, str] = {}
        with contextlib.suppress(OSError), open(own) as file:
            for line in file.read().splitlines():
                _, controllers, path = line.split(":", 2)
                if controllers in ("pids", "memory"):
                    self._try(f"{root}/{controllers}", path, name, {controllers: limits}, "v1")
                elif not controllers and os.path.exists(f"{root}/cgroup.controllers"):
                    self._try(root, path, name, {"pids": limits, "memory": limits}, "v2")

    def _try(self, root: str, path: str, name: str, wanted: dict[str, dict], version: str) -> None:
        """Make a group below the nearest of our own ancestors that takes one with these controllers."""
        path = path.rstrip("/")
        while True:
            folder = f"{root}{path}/{name}"
            self._reclaim(f"{root}{path}")
            try:
                os.mkdir(folder)
                for controller, limits in wanted.items():
                    self._limit(folder, controller, version, limits)
            except OSError:
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            else:
                self.folders.append(folder)
                self.enforced.update({controller: f"cgroup {version}" for controller in wanted})
                return
            if not path:
                return
            path = path.rpartition("/")[0]

    @staticmethod
    def _reclaim(parent: str) -> None:
        """Remove what keepers left that were killed."""
        with contextlib.suppress(OSError):
            for entry in os.listdir(parent):
                pid = entry.removeprefix("verl-bpo-")
                if pid != entry and not os.path.exists(f"/proc/{pid}"):
                    with contextlib.suppress(OSError):
                        os.rmdir(f"{parent}/{entry}")

    @staticmethod
    def _limit(folder: str, controller: str, version: str, limits: dict) -> None:
        if controller == "pids":
            values = {"pids.max": limits["processes"] + _SPARE_PROCESSES}
        elif version == "v2":
            values = {"memory.max": limits["memory"]}
        else:
            values = {"memory.limit_in_bytes": limits["memory"]}
        for file, value in values.items():
            descriptor = os.open(f"{folder}/{file}", os.O_WRONLY)  # not O_CREAT: it is there if the controller is
            try:
                os.write(descriptor, str(value).encode())
            finally:
                os.close(descriptor)
        for file, value in {"memory.memsw.limit_in_bytes": limits["memory"], "memory.swap.max": 0}.items():
            if controller == "memory" and os.path.exists(f"{folder}/{file}"):
                with contextlib.suppress(OSError), open(f"{folder}/{file}", "w") as handle:
                    handle.write(str(value))

    def join(self) -> None:
        for folder in self.folders:
            with open(f"{folder}/cgroup.procs", "w") as file:
                file.write("0")

    def remove(self) -> None:
        for folder in self.folders:
            with contextlib.suppress(OSError), open(f"{os.path.dirname(folder)}/cgroup.procs", "w") as file:
                file.write("0")
            with contextlib.suppress(OSError):
                os.rmdir(folder)
