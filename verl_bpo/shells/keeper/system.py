"""What Python's library lacks of the kernel's interface: mounts, namespaces, orphans."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_NEWUSER, _NEWNS = 0x10000000, 0x00020000
MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, _MS_PRIVATE = 2, 4, 32, 4096, 16384, 1 << 18
_PR_SET_CHILD_SUBREAPER = 36


class Refused(Exception):
    """A request that can't be carried out; the text says why."""


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    arguments = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_libc.mount(*arguments), f"mount {kind or source} {options[:120]}")


def unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), 2), f"unmount {target}")  # MNT_DETACH: never waits


def adopt_orphans() -> None:
    """Become the parent of what one's children leave behind."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def enter_namespaces(root: bool) -> bool:
    """Mounts from here on are this process's own. Whether it took a user namespace to be allowed to."""
    uid, gid = os.geteuid(), os.getegid()
    user_namespace = False
    if not (root and _libc.unshare(_NEWNS) == 0):
        _check(_libc.unshare(_NEWUSER | _NEWNS), "a user namespace")
        user_namespace = True
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount("none", "/", "", MS_REC | _MS_PRIVATE)
    return user_namespace
