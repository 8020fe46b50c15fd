"""File trees as states of git repositories, for machines where overlays aren't permitted."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess

from verl_bpo.shells.keeper.system import Refused


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
