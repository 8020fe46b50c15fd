"""Patches in git's form: the files that they name, their bytes, and what transport has done to them.

A patch is a ``str`` in which ``surrogateescape`` stands for bytes that are no UTF-8, as in names of files.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_HUNK = re.compile(r"(?m)^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@.*\n")
_PREFIXES = ("a", "b", "c", "i", "o", "w", "1", "2")
"""What git puts before names, by its settings."""

NEUTRAL = {
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "color.ui": "false",
    "commit.gpgSign": "false",
    "core.attributesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.excludesFile": "/dev/null",
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.quotePath": "false",
    "core.safecrlf": "false",
    "core.symlinks": "true",
    "safe.directory": "*",
    "submodule.recurse": "false",
}
"""Settings of git under which bytes stay what they are, whatever a user, a machine or a repository has set."""
SETTINGS = [word for name, value in NEUTRAL.items() for word in ("-c", f"{name}={value}")]
_OF_A_REPOSITORY = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_CEILING_DIRECTORIES", "GIT_TEMPLATE_DIR",
)  # fmt: skip


@dataclass(frozen=True)
class PatchedFile:
    """One file of a patch."""

    old: str | None
    """Its name before; None: it is new."""
    new: str | None
    """Its name afterwards; None: it is removed."""
    has_content: bool = True
    """Not so where a binary file is only said to differ."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name in (self.old, self.new) if name is not None))


def files_of(patch: str) -> list[PatchedFile]:
    """The files of a patch.

    Raises:
        ValueError: a file's names can't be read, or have no ``a/`` and ``b/`` before them.
    """
    parts = re.split(r"(?m)^(?=diff --git )", patch)
    return [_file_of(part) for part in parts if part.startswith("diff --git ")]


def patched_files(patch: str) -> list[str]:
    """All names that a patch gives its files, old and new."""
    return list(dict.fromkeys(name for file in files_of(patch) for name in file.names))


def to_bytes(patch: str) -> bytes:
    return patch.encode("utf-8", "surrogateescape")


def readings(patch: str) -> list[str]:
    """What a patch may have been before it became text: itself, and where every character is one of Latin-1's, those bytes."""
    try:
        other = patch.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return [patch]
    return list(dict.fromkeys((patch, other)))


def mended(patch: str) -> str:
    """Without what transport does to a whole patch: a byte order mark, CRLF at the end of every line (git's own lines too),
    blank lines of context and the final newline stripped off its end."""
    patch = patch.removeprefix("\ufeff")
    first = re.search(r"(?m)^diff --git .*$", patch)
    if first and first[0].endswith("\r"):
        patch = patch.replace("\r\n", "\n")
    if patch and not patch.endswith("\n"):
        patch += "\n"
    return patch + " \n" * _missing_context(patch)


def check(patch: str) -> str:
    """What is wrong with a patch by itself, whatever it is for; or nothing."""
    try:
        data = to_bytes(patch)
        files = files_of(patch)
    except ValueError as error:  # UnicodeEncodeError is one
        return str(error)
    if not files:
        return "it changes no file in git's form (diff --git a/... b/...)"
    for file in files:
        if not file.has_content:
            return f"it says that {file.names[0]!r} differs, but holds no content of it (git diff --binary does)"
    done = git(["apply", "--numstat", "-z", "-"], stdin=data, repository="/nonexistent")
    return said_by(done) if done.returncode != 0 else ""


def git(arguments: list[str], stdin: bytes = b"", repository: str | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run git on this machine, with settings that change no bytes. ``repository``: its ``.git``, which needn't exist."""
    env = outside_repositories() | {"LC_ALL": "C"} | ({"GIT_DIR": repository} if repository else {})
    return subprocess.run(["git", *SETTINGS, *arguments], input=stdin, capture_output=True, env=env)


def outside_repositories() -> dict[str, str]:
    """This process's environment without what ties git to one repository, as in its hooks."""
    return {name: value for name, value in os.environ.items() if name not in _OF_A_REPOSITORY}


def said_by(done: subprocess.CompletedProcess[bytes]) -> str:
    """What git says is wrong, in a line."""
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"git ended with exit code {done.returncode}"]
    return lines[0].removeprefix("error: ")


def _file_of(part: str) -> PatchedFile:
    """Read the lines before a part's first hunk: those that name one file are clearer than the first, which names both."""
    head = re.split(r"(?m)^(?:@@ |GIT binary patch)", part, maxsplit=1)[0]
    first, *lines = head.split("\n")
    found = dict(re.findall(r"(?m)^(rename from|rename to|copy from|copy to|---|\+\+\+) (.+)$", "\n".join(lines)))
    renamed = found.get("rename from", found.get("copy from")), found.get("rename to", found.get("copy to"))
    if all(renamed):
        old, new = (_unquoted(name) for name in renamed)
        old = None if "copy from" in found else old  # the original stays as it is
    elif "---" in found and "+++" in found:
        old, new = (None if name == "/dev/null" else _without_prefix(name) for name in (found["---"], found["+++"]))
    else:  # an empty file, a mode or a binary file: both names are the same
        names = first.removeprefix("diff --git ")
        quoted = _QUOTED.findall(names) if names.startswith('"') else []
        old = new = _without_prefix(quoted[0] if quoted else names[: len(names) // 2])
        if not quoted and _without_prefix(names[len(names) // 2 + 1 :]) != new:
            raise ValueError(f"the names in {first!r} can't be told apart")
    kinds = {line.split(" mode ")[0] for line in lines if line.startswith(("new file mode ", "deleted file mode "))}
    binary = any(line.startswith("Binary files ") for line in lines)
    return PatchedFile(
        None if "new file" in kinds else old, None if "deleted file" in kinds else new, has_content=not binary
    )


def _without_prefix(name: str) -> str:
    name = _unquoted(name.split("\t")[0] if not name.startswith('"') else name)
    prefix, slash, rest = name.partition("/")
    if not slash or prefix not in _PREFIXES:
        raise ValueError(f"{name!r} has no a/ or b/ before it (made with diff.noprefix?)")
    return rest


def _unquoted(name: str) -> str:
    """A name as git's ``quote_c_style`` writes it, without quotes if it needs none."""
    if not name.startswith('"'):
        return name
    data = bytearray()
    for plain, escape in re.findall(r"([^\\]+)|\\([0-7]{3}|.)", name[1 : name.rindex('"')]):
        if plain:
            data += to_bytes(plain)
        else:
            data.append(int(escape, 8) if escape.isdigit() else _ESCAPES[escape])
    return data.decode("utf-8", "surrogateescape")


def _missing_context(patch: str) -> int:
    """Lines that a patch's last hunk lacks, if they can only be blank context."""
    hunks = list(_HUNK.finditer(patch))
    if not hunks:
        return 0
    counts = [int(count) if count is not None else 1 for count in hunks[-1].groups()]
    for line in patch[hunks[-1].end() :].removesuffix("\n").split("\n"):
        if line.startswith("diff --git "):
            return 0
        counts[0] -= line[:1] in ("", " ", "-")
        counts[1] -= line[:1] in ("", " ", "+")
    return counts[0] if counts[0] == counts[1] > 0 else 0
