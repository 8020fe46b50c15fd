"""The process that holds a shell's files and runs its commands; started as a script by :mod:`verl_bpo.shells.local`.

It lives in a mount namespace of its own and keeps every layer on a tmpfs there, so that the kernel takes back mounts,
files and processes when it ends, however it ends. It has one thread and imports the standard library alone: it starts
in milliseconds, and forks cheaply.

Layers are numbered by the other side. A request names the frozen layers that a branch stands on and its own top layer;
whatever isn't there yet is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import platform
import resource
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time

_libc = ctypes.CDLL(None, use_errno=True)
_NEWUSER, _NEWNS = 0x10000000, 0x00020000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PR_SET_CHILD_SUBREAPER = 36
_MOST_LAYERS = 400  # the kernel takes 500 (OVL_MAX_STACK), and a page of mount options
_SPARE_PROCESSES = 4  # this one and bubblewrap's

# Kernel interfaces that reach past namespaces or have often been a way out. Numbers: the kernel's unistd_64.h files.
_DENIED = {
    "x86_64": (0xC000003E, (248, 249, 250, 298, 321, 323, 425, 426, 427)),
    "aarch64": (0xC00000B7, (217, 218, 219, 241, 280, 282, 425, 426, 427)),
}  # add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd, io_uring_{setup,enter,register}

_HIDDEN = ("acpi", "asound", "dynamic_debug", "kcore", "key-users", "keys", "kmsg", "latency_stats", "sched_debug", "scsi",
           "sysrq-trigger", "timer_list", "vmcore")  # fmt: skip
"""Of /proc: what shows or changes the machine."""


class Refused(Exception):
    """A request that can't be carried out; the text says why."""


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    arguments = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_libc.mount(*arguments), f"mount {kind or source} {options[:120]}")


def _unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), 2), f"unmount {target}")  # MNT_DETACH: never waits


def seccomp_filter(machine: str) -> bytes | None:
    """A classic BPF program that answers the denied system calls with EPERM; None for an unknown machine."""
    if machine not in _DENIED:
        return None
    arch, denied = _DENIED[machine]
    load, equal, at_least, back = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    body = [(load, 0, 0, 4), (equal, 0, len(denied) + 3, arch), (load, 0, 0, 0)]
    body.append((at_least, len(denied) + 1, 0, 0x40000000))  # the x32 numbers
    body += [(equal, len(denied) - i, 0, number) for i, number in enumerate(denied)]
    body += [(back, 0, 0, 0x7FFF0000), (back, 0, 0, 0x00050000 | 1)]  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM
    return b"".join(struct.pack("=HBBI", *line) for line in body)


# --- control groups -------------------------------------------------------------------------------------------------


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


# --- file trees -----------------------------------------------------------------------------------------------------


class OverlayFiles:
    """Layers of an overlay file system, each on a tmpfs of its own whose size is what the limit leaves."""

    name = "overlay"

    def __init__(self, trees: list[tuple[str, str | None]], limits: dict, user_namespace: bool) -> None:
        self.trees, self.limits = trees, limits
        self.options = "userxattr" if user_namespace else "index=off,metacopy=off"
        self.sizes: dict[int, tuple[int, int]] = {}
        """Bytes and files of every frozen layer."""
        self.modes: dict[int, list[int]] = {}
        """Mode of each tree's root, by layer: it is the top layer's, so it has to be handed on."""
        self.mounted: tuple[tuple[int, ...], int] | None = None
        self.first_modes = []
        for index, (_, base) in enumerate(trees):
            os.makedirs(f"b{index}")
            os.makedirs(f"m{index}")
            self.first_modes.append(0o777 | stat.S_ISVTX if base is None else stat.S_IMODE(os.stat(base).st_mode))
            if base is not None:
                _mount(base, f"b{index}", "", _MS_BIND | _MS_REC)
        self._try_out()

    def _try_out(self) -> None:
        """Replace a folder by a new one in an upper layer: what a file system without the attributes can't do."""
        trial, self.trees = self.trees, self.trees[:1]
        try:
            (root,) = self.show((), -1)
            os.makedirs(f"{root}/.trial/a")
            self.freeze(-1)
            self.show((-1,), -2)
            shutil.rmtree(f"{root}/.trial")
            os.mkdir(f"{root}/.trial")
            if os.listdir(f"{root}/.trial"):
                raise OSError("a replaced folder shows its old files")
        finally:
            self._hide()
            for layer in (-1, -2):
                self.drop(layer)
            self.trees = trial

    def show(self, chain: tuple[int, ...], top: int) -> list[str]:
        """Folders with the branch's trees, good until the next call."""
        if self.mounted != (chain, top):
            self._hide()
            if len(chain) >= _MOST_LAYERS:
                raise Refused(f"more than {_MOST_LAYERS} snapshots lie on top of each other in this branch")
            if not os.path.isdir(f"l{top}"):
                self._make(chain, top)
            for index in range(len(self.trees)):
                lower = ":".join([f"l{layer}/{index}" for layer in reversed(chain)] + [f"b{index}"])
                options = f"lowerdir={lower},upperdir=l{top}/{index},workdir=l{top}/w{index},xino=off,{self.options}"
                _mount("overlay", f"m{index}", "overlay", _MS_NOSUID | _MS_NODEV, options)
            self.mounted = (chain, top)
        return [os.path.abspath(f"m{index}") for index in range(len(self.trees))]

    def _make(self, chain: tuple[int, ...], top: int) -> None:
        os.mkdir(f"l{top}")
        used = [sum(column) for column in zip(*(self.sizes[layer] for layer in chain))] or [0, 0]
        size = max(self.limits["disk"] - used[0], 1 << 16)
        inodes = max(self.limits["files"] - used[1], 16) + 4 * len(self.trees)
        _mount("tmpfs", f"l{top}", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes={inodes},mode=700")
        modes = self.modes[chain[-1]] if chain else self.first_modes
        for index in range(len(self.trees)):
            os.mkdir(f"l{top}/{index}")
            os.chmod(f"l{top}/{index}", modes[index])
            os.mkdir(f"l{top}/w{index}")
        self.modes[top] = modes

    def freeze(self, top: int) -> int | None:
        """Nothing will change this layer any more. Its bytes; None when nothing is in it and it may go on as top."""
        if not os.path.isdir(f"l{top}"):
            return None
        folders = [f"l{top}/{index}" for index in range(len(self.trees))]
        modes = [stat.S_IMODE(os.stat(folder).st_mode) for folder in folders]
        if modes == self.modes[top] and not any(map(os.listdir, folders)):
            return None
        self._hide()
        self.modes[top] = modes
        used = os.statvfs(f"l{top}")
        nbytes = (used.f_blocks - used.f_bfree) * used.f_frsize
        self.sizes[top] = (nbytes, used.f_files - used.f_ffree)
        return nbytes

    def drop(self, layer: int) -> None:
        if self.mounted and (layer == self.mounted[1] or layer in self.mounted[0]):
            self._hide()
        self.sizes.pop(layer, None)
        self.modes.pop(layer, None)
        if os.path.isdir(f"l{layer}"):
            _unmount(f"l{layer}")
            os.rmdir(f"l{layer}")

    def _hide(self) -> None:
        self.mounted = None
        for index in range(len(self.trees)):
            if os.path.ismount(f"m{index}"):
                _unmount(f"m{index}")


class GitFiles:
    """One copy of the trees, brought into a branch's state by a private git index, where overlays aren't permitted.

    A tree object knows neither empty folders nor all modes, and git never looks into a folder named ``.git``: the first
    two are listed beside it, the last is renamed while git looks. Sockets, pipes and ownership aren't kept.
    """

    name = "git"

    def __init__(self, trees: list[tuple[str, str | None]]) -> None:
        self.trees = trees
        self.current: int | None = None
        """The layer that is top of what the folders hold."""
        self.saved: dict[int, list[tuple[str, list[str], dict[str, int]]]] = {}
        self.env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent"}
        for index, (_, base) in enumerate(trees):
            self._git(index, "init", "--quiet", "--bare", f"g{index}", bare=True)
            with open(f"g{index}/info/attributes", "w") as file:
                file.write("* -text -eol -ident -filter -working-tree-encoding\n")  # bytes as they are
            if base is None:
                os.mkdir(f"m{index}")
                os.chmod(f"m{index}", 0o777 | stat.S_ISVTX)
            else:
                shutil.copytree(base, f"m{index}", symlinks=True)
        self.first = [self._save(index) for index in range(len(trees))]
        self.saved[-1] = self.first

    def show(self, chain: tuple[int, ...], top: int) -> list[str]:
        if self.current is None:
            self.current = top  # the copies are fresh
        if self.current != top:
            self.current = -2  # nobody's, until all is loaded
            for index, state in enumerate(self.saved[chain[-1]] if chain else self.first):
                try:
                    self._load(index, state)
                except (OSError, Refused, RecursionError):  # folders too deep for a path, say: without what is there
                    subprocess.run(["rm", "-rf", f"m{index}"], check=True)
                    os.mkdir(f"m{index}")
                    self._load(index, state)
            self.current = top
        return [os.path.abspath(f"m{index}") for index in range(len(self.trees))]

    def freeze(self, top: int) -> int | None:
        if self.current != top:
            return None
        before = {path: os.path.getsize(path) for path in self._objects()}
        self.saved[top] = [self._save(index) for index in range(len(self.trees))]
        return sum(os.path.getsize(path) for path in self._objects() if path not in before)

    def drop(self, layer: int) -> None:
        self.saved.pop(layer, None)
        if self.current == layer:
            self.current = -2  # nobody's: the next branch loads its own

    def _objects(self) -> list[str]:
        return [
            f"{folder}/{name}"
            for index in range(len(self.trees))
            for folder, _, names in os.walk(f"g{index}/objects")
            for name in names
        ]

    def _save(self, index: int) -> tuple[str, list[str], dict[str, int]]:
        empty, modes, hidden = [], {}, []
        root = f"m{index}"
        for folder, names, files in os.walk(root, topdown=False):
            entries = [(name, 0o755) for name in names] + [(name, 0o644) for name in files]
            for name, usual in entries:
                mode = os.lstat(f"{folder}/{name}").st_mode
                if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) != usual:
                    modes[os.path.relpath(f"{folder}/{name}", root)] = stat.S_IMODE(mode)
            if not names and not files and folder != root:
                empty.append(os.path.relpath(folder, root))
            hidden += [f"{folder}/{name}" for name in (*names, *files) if name == ".git"]
        modes["."] = stat.S_IMODE(os.stat(root).st_mode)
        for path in hidden:  # the deeper ones come first
            os.rename(path, f"{path}-kept-by-verl-bpo")
        try:
            self._git(index, "add", "--all", "--force")
            tree = self._git(index, "write-tree").strip()
        finally:
            for path in reversed(hidden):
                os.rename(f"{path}-kept-by-verl-bpo", path)
        return tree, empty, modes

    def _load(self, index: int, state: tuple[str, list[str], dict[str, int]]) -> None:
        tree, empty, modes = state
        root = f"m{index}"
        for folder, names, files in os.walk(root):
            for name in (*names, *files):
                if name == ".git":
                    os.rename(f"{folder}/{name}", f"{folder}/{name}-kept-by-verl-bpo")
            names[:] = ["-".join([name, "kept-by-verl-bpo"]) if name == ".git" else name for name in names]
            for name in names:
                if not os.path.islink(f"{folder}/{name}"):
                    os.chmod(f"{folder}/{name}", 0o755)  # or git can't clean it
        self._git(index, "read-tree", "--reset", "-u", tree)
        self._git(index, "clean", "--quiet", "-ffdx")
        for folder, names, files in os.walk(root, topdown=False):
            for name in (*names, *files):
                if name == ".git-kept-by-verl-bpo":
                    os.rename(f"{folder}/{name}", f"{folder}/.git")
                elif name in files and not os.path.islink(f"{folder}/{name}"):
                    path = f"{folder}/{name}"
                    os.chmod(path, 0o755 if os.stat(path).st_mode & stat.S_IXUSR else 0o644)
        for path in empty:
            os.makedirs(f"{root}/{path}", exist_ok=True)
        for path, mode in modes.items():
            os.chmod(f"{root}/{path}", mode)

    def _git(self, index: int, *arguments: str, bare: bool = False) -> str:
        where = [] if bare else [f"--git-dir=g{index}", f"--work-tree=m{index}"]
        settings = ["-c", "core.autocrlf=false", "-c", "core.fileMode=true", "-c", "core.hooksPath=/dev/null"]
        settings += ["-c", "gc.auto=0", "-c", "core.excludesFile=/dev/null", "-c", "advice.addEmbeddedRepo=false"]
        done = subprocess.run(
            ["git", *settings, *where, *arguments], env=self.env, capture_output=True, text=True, errors="replace"
        )
        if done.returncode != 0:
            raise Refused(f"git {arguments[0]} failed: {done.stderr.strip()[-300:]}")
        return done.stdout


# --- commands -------------------------------------------------------------------------------------------------------


class Keeper:
    """Files, limits and commands of one shell. ``specification`` is what ``local.Shell`` sends first."""

    def __init__(self, specification: dict) -> None:
        self.spec, self.limits = specification, specification["limits"]
        self.isolated = specification["bwrap"] is not None
        _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
        os.umask(0o022)
        root = os.geteuid() == 0
        self.user_namespace = False
        if self.isolated:
            self._enter_namespaces(root)
        os.chdir(specification["store"])
        if self.isolated:
            _mount("tmpfs", ".", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=700")
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
        self.by_rlimit = self.facts["processes"] == "rlimit" and self.isolated
        self.memory_by_rlimit = "memory" not in self.group.enforced
        self.seccomp = seccomp_filter(platform.machine()) if self.isolated else None
        if self.isolated:
            self._write_etc()
            self.covers = _proc_covers(os.path.abspath("nothing"), os.path.abspath("empty"))

    def _enter_namespaces(self, root: bool) -> None:
        uid, gid = os.geteuid(), os.getegid()
        if not (root and _libc.unshare(_NEWNS) == 0):
            _check(_libc.unshare(_NEWUSER | _NEWNS), "a user namespace")
            self.user_namespace = True
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        _mount("none", "/", "", _MS_REC | _MS_PRIVATE)

    def _open_files(self):
        wanted, reason = self.spec["files"], ""
        if wanted in ("auto", "overlay") and self.isolated:
            try:
                return OverlayFiles(self.spec["trees"], self.limits, self.user_namespace)
            except OSError as error:
                reason = str(error)
                for name in os.listdir("."):  # what the attempt left
                    with contextlib.suppress(OSError):
                        _unmount(name)
                    shutil.rmtree(name, ignore_errors=True)
        if wanted == "overlay":
            raise Refused(f"overlay file systems aren't permitted here ({reason or 'not isolated'}): use files=git")
        if shutil.which("git") is None:
            raise Refused(f"neither overlay file systems ({reason or 'not isolated'}) nor git are here: install git")
        if self.isolated:  # copies and objects together
            size = sum(_size(base) for _, base in self.spec["trees"] if base) * 2 + self.limits["disk"]
            options = f"mode=700,size={size},nr_inodes={self.limits['files'] + 10 * size // 4096}"
            _mount("none", ".", "tmpfs", _MS_REMOUNT | _MS_NOSUID | _MS_NODEV, options)
        return GitFiles(self.spec["trees"])

    def _write_etc(self) -> None:
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
                _mount(f"/etc/{name}", f"etc/{name}", "", _MS_BIND | _MS_REC)
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

    def _arguments(self, roots: list[str], cwd: str, status: int, seccomp: int | None) -> list[str]:
        size = str(self.limits["disk"])
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

    def run(
        self, chain: tuple[int, ...], top: int, command: str, cwd: str, stdin: bytes, timeout: float, most: int
    ) -> tuple[bytes, int, bool, int]:
        """Output (its middle left out above ``most`` bytes), exit code, whether time ran out, and the bytes left out."""
        roots = self.files.show(chain, top)
        status, status_in = os.pipe()
        output, output_in = os.pipe()
        given = os.memfd_create("stdin")
        _write_all(given, stdin)
        os.lseek(given, 0, 0)
        seccomp = None
        if self.seccomp is not None:
            seccomp = os.memfd_create("seccomp")
            os.write(seccomp, self.seccomp)
            os.lseek(seccomp, 0, 0)
        if self.isolated:
            line = [*self._arguments(roots, cwd, status_in, seccomp), "/bin/bash", "-c"]
            if self.by_rlimit:  # counted within the sandbox's user namespace, so it must be set there
                line += [f'ulimit -u {self.limits["processes"]} && exec /bin/bash -c "$0"']
            line.append(command)
            env: dict[str, str] = {}
        else:
            places = {place: root for (place, _), root in zip(self.spec["trees"], roots)}
            line = ["/bin/bash", "-c", command]
            env = {**self.spec["env"], "TMPDIR": places.get("/tmp", roots[0])}
            place = max((p for p in places if cwd == p or cwd.startswith(p + "/")), key=len, default=None)
            cwd = cwd if place is None else places[place] + cwd[len(place) :]
        inherited = [status_in, *([seccomp] if seccomp is not None else [])]
        child = os.fork()
        if child == 0:
            self._become(line, env, None if self.isolated else cwd, given, output_in, inherited)
        for descriptor in (status_in, output_in, given, *([seccomp] if seccomp is not None else [])):
            os.close(descriptor)
        try:
            text, code, late, left_out = self._attend(child, output, timeout, most)
            report = _read_all(status)
        finally:
            os.close(output)
            os.close(status)
        if self.isolated and b"exit-code" not in report and not late and code == 1 and text.startswith(b"bwrap:"):
            raise Refused(f"the sandbox didn't start: {text.decode(errors='replace').strip()[:300]}")
        return text, code, late, left_out

    def _become(self, line, env, cwd, given, output, inherited) -> None:
        """In the child: turn into the command."""
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # when memory runs out a command goes, not this process
            os.dup2(given, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for descriptor in inherited:
                os.set_inheritable(descriptor, True)
            limits = self.limits
            caps = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: limits["file_size"], resource.RLIMIT_NOFILE: 1024}
            if self.memory_by_rlimit:
                caps[resource.RLIMIT_AS] = limits["memory"]
            if not self.isolated:
                os.setsid()
                os.chdir(cwd)
            for name, value in caps.items():
                hard = resource.getrlimit(name)[1]
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(name, (value, value))
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execve(line[0], line, env)
        except BaseException as error:
            os.write(2, f"bwrap: {type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)

    def _attend(self, child: int, output: int, timeout: float, most: int) -> tuple[bytes, int, bool, int]:
        """Read what the command says until it ends or its time is up; afterwards nothing of it lives."""
        end = time.monotonic() + timeout
        watch = os.pidfd_open(child)
        poll = select.poll()
        for descriptor in (watch, output, self.spec["line"]):
            poll.register(descriptor, select.POLLIN)
        head, tail, total, late = bytearray(), bytearray(), 0, False
        os.set_blocking(output, False)

        def read() -> bool:
            nonlocal total, tail
            try:
                data = os.read(output, 1 << 16)
            except BlockingIOError:
                return False
            total += len(data)
            room = most // 2 - len(head)
            head.extend(data[:room])
            tail.extend(data[room:] if room > 0 else data)
            if len(tail) > most:
                tail = tail[-(most - most // 2) :]
            return bool(data)

        try:
            while True:
                left = end - time.monotonic()
                events = dict(poll.poll(max(0, left) * 1000)) if left > 0 else {}
                if self.spec["line"] in events:  # the other side is gone: it never sends before it has its answer
                    self._end(child)
                    raise SystemExit
                if watch in events:
                    break
                if output in events and not read():
                    poll.unregister(output)  # closed by the command, which goes on
                if not events:
                    late = True
                    break
        finally:
            os.close(watch)
        code = self._end(child)
        while read():
            pass
        tail = tail[-(most - most // 2) :] if total > most else tail
        left_out = total - len(head) - len(tail)
        middle = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out > 0 else b""
        return bytes(head) + middle + bytes(tail), code, late, left_out

    def _end(self, child: int) -> int:
        """Kill all that the command left and wait until it is gone; the child's exit code.

        Orphans become children of this process (it is their subreaper), and a PID namespace's first process can be
        waited for only when the namespace is empty: when no child is left, nothing can write any more.
        """
        code = None
        with contextlib.suppress(OSError):
            finished = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if finished is None:
                os.kill(child, signal.SIGKILL)
        while True:
            if not self.isolated:
                _kill_children()
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
        code = 0 if code is None else code
        return code if code >= 0 else 128 - code

    def freeze(self, top: int) -> int | None:
        return self.files.freeze(top)

    def drop(self, layers: list[int]) -> None:
        for layer in layers:
            self.files.drop(layer)

    def serve(self) -> None:
        """Answer until the other side goes away."""
        line = self.spec["line"]
        while (request := _receive(line)) is not None:
            operation, *arguments = request
            try:
                answer = ("ok", getattr(self, operation)(*arguments))
            except (Refused, OSError, KeyError, RecursionError) as error:
                answer = ("error", f"{error}" if isinstance(error, Refused) else f"{type(error).__name__}: {error}")
            _send(line, answer)


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


def _size(folder: str) -> int:
    """Bytes of a tree in whole pages."""
    return sum(
        -(-os.lstat(f"{where}/{name}").st_size // 4096) * 4096
        for where, names, files in os.walk(folder)
        for name in (*names, *files)
    )


def _kill_children() -> None:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        for pid in file.read().split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read_all(descriptor: int) -> bytes:
    return b"".join(iter(lambda: os.read(descriptor, 4096), b""))


def _read_exactly(descriptor: int, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            return None
        data += part
    return data


def _receive(descriptor: int):
    header = _read_exactly(descriptor, 4)
    body = header and _read_exactly(descriptor, struct.unpack("!I", header)[0])
    return pickle.loads(body) if body else None


def _send(descriptor: int, answer: object) -> None:
    body = pickle.dumps(answer)
    _write_all(descriptor, struct.pack("!I", len(body)) + body)


def main() -> None:
    line = int(sys.argv[1])
    os.set_inheritable(line, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the other side, which then ends this one
    specification = json.loads(sys.argv[2])
    keeper = None
    try:
        keeper = Keeper({**specification, "line": line})
    except (Refused, OSError) as error:
        _send(line, ("error", str(error)))
        return
    try:
        _send(line, ("ok", keeper.facts))
        keeper.serve()
    except OSError:
        pass  # the other side is gone
    finally:
        keeper.group.remove()


if __name__ == "__main__":
    main()
