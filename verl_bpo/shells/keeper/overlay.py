"""File trees as layers of an overlay file system."""

from __future__ import annotations

import os
import shutil
import stat

from verl_bpo.shells.keeper.system import MS_BIND, MS_NODEV, MS_NOSUID, MS_REC, Refused, mount, unmount

_MOST_LAYERS = 400  # the kernel takes 500 (OVL_MAX_STACK), and a page of mount options


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
                mount(base, f"b{index}", "", MS_BIND | MS_REC)
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
                mount("overlay", f"m{index}", "overlay", MS_NOSUID | MS_NODEV, options)
            self.mounted = (chain, top)
        return [os.path.abspath(f"m{index}") for index in range(len(self.trees))]

    def _make(self, chain: tuple[int, ...], top: int) -> None:
        os.mkdir(f"l{top}")
        used = [sum(column) for column in zip(*(self.sizes[layer] for layer in chain))] or [0, 0]
        size = max(self.limits["disk"] - used[0], 1 << 16)
        inodes = max(self.limits["files"] - used[1], 16) + 4 * len(self.trees)
        mount("tmpfs", f"l{top}", "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes={inodes},mode=700")
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
            unmount(f"l{layer}")
            os.rmdir(f"l{layer}")

    def _hide(self) -> None:
        self.mounted = None
        for index in range(len(self.trees)):
            if os.path.ismount(f"m{index}"):
                unmount(f"m{index}")
