"""The sandbox that a command sees: everything between it and this machine."""

from __future__ import annotations

import os
import shutil

from verl_bpo.shells.keeper.system import MS_BIND, MS_REC, mount

_HIDDEN = ("acpi", "asound", "dynamic_debug", "kcore", "key-users", "keys", "kmsg", "latency_stats", "sched_debug", "scsi",
           "sysrq-trigger", "timer_list", "vmcore")  # fmt: skip
"""Of /proc: what shows or changes the machine."""


class Bubblewrap:
    """``specification``: see :class:`verl_bpo.shells.keeper.server.Keeper`. What it makes lies in the present folder."""

    def __init__(self, specification: dict) -> None:
        self.spec = specification
        self._write_etc()
        self.covers = _proc_covers(os.path.abspath("nothing"), os.path.abspath("empty"))

    @staticmethod
    def _write_etc() -> None:
        """The whole /etc of the sandbox, in one folder since each mount costs every command a fraction of a ms."""
        os.mkdir("etc")
        os.mkdir("nothing")
        os.close(os.open("empty", os.O_CREAT, 0o444))
        for name in ("ld.so.cache", "ld.so.conf", "localtime"):
            if os.path.isfile(f"/etc/{name}"):
                shutil.copyfile(f"/etc/{name}", f"etc/{name}")
        for name in ("alternatives", "ld.so.conf.d"):
            if os.path.isdir(f"/etc/{name}"):
                os.mkdir(f"etc/{name}")
                mount(f"/etc/{name}", f"etc/{name}", "", MS_BIND | MS_REC)
        for name, text in {
            "passwd": "agent:x:1000:1000:agent:/tmp:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
            "group": "agent:x:1000:\nnogroup:x:65534:\n",
            "bash_env": "RANDOM=1\n",  # what $RANDOM draws; bash would seed it with the clock
            "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
            "gitconfig": "[safe]\n\tdirectory = *\n[user]\n\tname = agent\n\temail = agent@sandbox\n",
        }.items():
            with open(f"etc/{name}", "w") as file:
                file.write(text)

    def arguments(self, roots: list[str], cwd: str, status: int, seccomp: int | None) -> list[str]:
        """What a command is put behind. ``status``, ``seccomp``: descriptors that the child inherits."""
        size = str(self.spec["limits"]["disk"])
        line = [self.spec["bwrap"], "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000"]
        line += ["--gid", "1000", "--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        line += ["--clearenv", "--json-status-fd", str(status)]
        if seccomp is not None:
            line += ["--seccomp", str(seccomp)]
        for name, value in {"BASH_ENV": "/etc/bash_env", **self.spec["env"]}.items():
            line += ["--setenv", name, value]
        line += ["--ro-bind", "/usr", "/usr"]
        for folder in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            if os.path.islink(f"/{folder}"):
                line += ["--symlink", os.readlink(f"/{folder}"), f"/{folder}"]
            elif os.path.isdir(f"/{folder}"):
                line += ["--ro-bind", f"/{folder}", f"/{folder}"]
        line += ["--ro-bind", os.path.abspath("etc"), "/etc"]
        line += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        for path, cover in self.covers:
            line += ["--ro-bind", cover, path]
        for path in self.spec["read_only"]:
            line += ["--ro-bind", path, path]
        for (place, _), root in zip(self.spec["trees"], roots):
            line += ["--bind", root, place]
        return [*line, "--remount-ro", "/", "--chdir", cwd, "--"]


def _proc_covers(no_folder: str, no_file: str) -> list[tuple[str, str]]:
    """What to put over the parts of /proc that aren't about processes: themselves read-only, or nothing at all.

    The commands of a shell that root started are root's to the kernel, though without any capability, and many of these
    files ask for no more than that: ``/proc/sys/kernel/core_pattern`` alone would be a way out. Bubblewrap 0.8 leaves
    /proc/sys open then (it looks whether the folder, not what is in it, can be written).
    """
    covers = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() or entry.is_symlink():
            continue
        if entry.name in _HIDDEN:
            covers.append((entry.path, no_folder if entry.is_dir() else no_file))
        elif _writable(entry.path):
            covers.append((entry.path, entry.path))
    return covers


def _writable(path: str) -> bool:
    """Whether a file, or any below a folder, has a bit for writing. What can't be looked at counts as writable."""
    try:
        if not os.path.isdir(path):
            return bool(os.stat(path).st_mode & 0o222)
        return any(_writable(entry.path) for entry in os.scandir(path) if not entry.is_symlink())
    except OSError:
        return True
