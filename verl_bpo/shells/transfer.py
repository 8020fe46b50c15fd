"""Files of a shell as they are: which there are, their bytes out of it, and into another one.

Names and contents travel as bytes and uncut; a name is a ``str`` in which ``surrogateescape`` stands for bytes that are no
UTF-8. Version control's own folders (``.git``) and compiled Python (``__pycache__``) are nobody's work and left alone. Only
``find``, ``xargs``, ``sha256sum``, ``cat`` and ``tar`` are needed, of GNU's kind.
"""

from __future__ import annotations

import hashlib
import io
import shlex
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO

from verl_bpo.sandbox.base import SandboxError
from verl_bpo.shells.base import Shell

_MOST = 1 << 30
"""Bytes that a command here may say."""
_BATCH = 32 << 20
"""Bytes of files that travel together; a larger file travels alone."""
_END = "end of files"
_SKIPPED = r"\( -name .git -o -name __pycache__ \) -prune -o"
# What its owner can't read is made readable first: the mode that is listed is asked for its executable bit alone.
_LIST = rf"""
exec 2>/dev/null
find . {_SKIPPED} -type d ! -perm -700 -exec chmod u+rwx {{}} \;
find . {_SKIPPED} -type f ! -perm -400 -exec chmod u+r {{}} +
find . {_SKIPPED} ! -type d -printf '%y\0%m\0%s\0%P\0%l\0' && printf '{_END}\0' &&
find . {_SKIPPED} -type f -print0 | xargs -0 -r sha256sum -z --
"""


@dataclass(frozen=True)
class Entry:
    """Something in a tree that is no folder. Two that are equal are the same to version control."""

    kind: str
    """As ``find`` calls it: ``f`` a file, ``l`` a link; the others (sockets, pipes) have no content."""
    executable: bool
    size: int
    content: str
    """SHA-256 of a file, target of a link."""


def list_files(shell: Shell, folder: str, timeout: float) -> dict[str, Entry]:
    """All files and links below a folder, by their path in it.

    Raises:
        SandboxError: they can't be listed.
    """
    listed = _run(shell, folder, _LIST, timeout)
    try:
        entries = _entries(listed)
    except ValueError as error:  # in a container the programs may be anybody's
        raise SandboxError(f"the files in {folder} can't be listed: {error}") from error
    return entries


def _entries(listed: bytes) -> dict[str, Entry]:
    head, end, tail = listed.partition(f"\0{_END}\0".encode())
    if not end and not listed.startswith(f"{_END}\0".encode()):
        raise ValueError("the list has no end")
    fields = head.split(b"\0") if end else []
    hashes = {}
    for line in tail.split(b"\0"):
        digest, _, name = line.partition(b"  ")
        hashes[name.removeprefix(b"./")] = digest.decode()
    entries = {}
    for kind, mode, size, name, target in zip(*[iter(fields)] * 5, strict=True):
        kind, link = kind.decode(), kind == b"l"
        content = _text(target) if link else hashes.get(name, "")
        entries[_text(name)] = Entry(kind, not link and bool(int(mode, 8) & 0o100), 0 if link else int(size), content)
    for name in entries:
        path = PurePosixPath(name)
        if (
            str(path) != name
            or path.is_absolute()
            or ".." in path.parts
            or any(str(p) in entries for p in path.parents)
        ):
            raise ValueError(f"{name!r} can't be a file in a folder")
    return entries


def read_files(
    shell: Shell, folder: str, entries: Mapping[str, Entry], timeout: float
) -> Iterator[dict[str, bytes | None]]:
    """The contents of files that :func:`list_files` found, some of them at a time. None: the file isn't what was listed.

    Raises:
        SandboxError: the shell failed.
    """
    for names in _batches(entries):
        data = _cat(shell, folder, names, timeout)
        found: dict[str, bytes | None] = {}
        for name in names:
            size = entries[name].size
            found[name], data = data[:size], data[size:]
        if data or any(not _is(found[name], entries[name]) for name in names):  # one shifts those behind it
            for name in names:
                alone = _cat(shell, folder, [name], timeout)
                found[name] = alone if _is(alone, entries[name]) else None
        yield found


def pack(entries: Mapping[str, Entry], contents: Mapping[str, bytes], file: IO[bytes]) -> None:
    """Write files and links as an archive, with modes as in version control."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as archive:
        for name, entry in entries.items():
            member = tarfile.TarInfo(name)
            if entry.kind == "l":
                member.type, member.linkname = tarfile.SYMTYPE, entry.content
            else:
                member.size = len(contents[name])
                member.mode = 0o755 if entry.executable else 0o644
            archive.addfile(member, io.BytesIO(contents[name]) if entry.kind == "f" else None)


def unpack(shell: Shell, folder: str, archive: bytes, timeout: float) -> None:
    """Write an archive's files below a folder.

    Raises:
        SandboxError: they can't be written.
    """
    _run(shell, folder, "tar -xmf - --no-same-owner", timeout, archive)


def remove_files(shell: Shell, folder: str, names: Iterable[str], timeout: float) -> None:
    """Remove files and links, and the folders that nothing is left in.

    Raises:
        SandboxError: they can't be removed.
    """
    names = list(names)
    if not names:
        return
    parents = {str(PurePosixPath(name).parent) for name in names} - {"."}
    _run(shell, folder, "xargs -0 -r rm -f --", timeout, _joined(names))
    empty = "xargs -0 -r rmdir -p --ignore-fail-on-non-empty -- 2>/dev/null; true"  # some went with others
    _run(shell, folder, empty, timeout, _joined(sorted(parents)))


def _batches(entries: Mapping[str, Entry]) -> Iterator[list[str]]:
    batch, size = [], 0
    for name, entry in entries.items():
        if batch and size + entry.size > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += entry.size
    if batch:
        yield batch


def _cat(shell: Shell, folder: str, names: list[str], timeout: float) -> bytes:
    return _run(shell, folder, "xargs -0 -r cat -- 2>/dev/null; true", timeout, _joined(names))


def _is(data: bytes | None, entry: Entry) -> bool:
    return data is not None and hashlib.sha256(data).hexdigest() == entry.content


def _run(shell: Shell, folder: str, command: str, timeout: float, stdin: bytes = b"") -> bytes:
    # From outside the folder, which may be shut to its owner.
    place = shlex.quote(folder)
    line = f"export LC_ALL=C; chmod u+rwx {place} 2>/dev/null; cd {place} || exit\n{command}"
    done = shell.execute(line, cwd="/", timeout=timeout, stdin=stdin, most=_MOST)
    if done.timed_out:
        raise SandboxError(f"moving files took longer than {timeout:g} s")
    if done.returncode != 0 or done.left_out:
        raise SandboxError(f"files can't be moved: {done.output.strip()[-300:] or f'exit code {done.returncode}'}")
    return done.data


def _joined(names: Iterable[str]) -> bytes:
    return b"".join(f"./{name}".encode("utf-8", "surrogateescape") + b"\0" for name in names)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
