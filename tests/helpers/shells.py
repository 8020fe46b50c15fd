"""What the tests of shells share."""

import functools
import os

import pytest

from verl_bpo.shells.local import LocalShell, find_bwrap

usable = functools.cache(LocalShell.probe)


@functools.cache
def _reason():
    if find_bwrap() is None:
        return "no bubblewrap: apt-get install bubblewrap"
    works, why = usable()
    return "" if works else f"isolated shells don't work here: {why}"


def need_isolation():
    if _reason():
        pytest.skip(_reason())


def make_tree(folder):
    """A small tree with one of everything that a snapshot must keep."""
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one\n")
    (folder / "sub" / "b.py").write_text("b = 1\n")
    (folder / "sub" / "deep" / "c").write_bytes(bytes(range(256)))
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o750)
    (folder / "link").symlink_to("a.txt")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / ".gitignore").write_text("*.log\n")
    os.chmod(folder, 0o755)
    return folder


LIST = (
    "find . -printf '%P %y %m %l\\n' | sort; find . -type f -print0 | sort -z | xargs -0 sha256sum; "
    "find /tmp -mindepth 1 -printf '%P %y %m %l\\n' | sort"
)
"""Everything in the trees: paths, kinds, modes, targets, contents."""

COUNT_FORKS = """python3 -c '
import os, time
made = 0
try:
    while made < 500:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
except OSError:
    pass
print(made)
'"""
"""How many processes a command may start, at most 500."""
