"""Files go out of one shell and into another as they are."""

import io

import pytest
from shells import make_tree, need_isolation

from verl_bpo.sandbox.base import SandboxError
from verl_bpo.shells.base import CommandResult, Limits, Workspace
from verl_bpo.shells.local import LocalShell
from verl_bpo.shells.transfer import list_files, pack, read_files, remove_files, unpack

ODD = (
    "printf 'caf\\351\\r\\n\\0' > $'\\xff\\n'; touch -- -x 'a b' '\"q\"' ./~; printf no-end > cut; mkdir -p deep/er; "
    "echo 1 > deep/er/f; ln -s $'\\xff\\n' ln; head -c 3000000 /dev/zero > big; seq 500000 > numbers; chmod 600 cut; "
    "chmod 755 numbers"
)


@pytest.fixture(params=["overlay", "git"])
def shell(request, tmp_path):
    need_isolation()
    work = Workspace({"/testbed": make_tree(tmp_path / "base")})
    with LocalShell.open(work, Limits(output=1000), files=request.param) as shell:
        yield shell


def moved(shell, names):
    """These files of a shell as archives, some at a time."""
    entries = list_files(shell, "/testbed", 60)
    archives = []
    links = {name: entries[name] for name in names if entries[name].kind == "l"}
    files = {name: entries[name] for name in names if entries[name].kind == "f"}
    for contents in ({}, *read_files(shell, "/testbed", files, 60)):
        archive = io.BytesIO()
        pack({name: files[name] for name in contents} or links, contents, archive)
        archives.append(archive.getvalue())
    return archives


@pytest.mark.parametrize("batch", [1 << 25, 1000])
def test_what_differs_makes_the_same_files_of_a_fresh_tree(shell, monkeypatch, batch):
    monkeypatch.setattr("verl_bpo.shells.transfer._BATCH", batch)
    before = list_files(shell, "/testbed", 60)
    assert {"a.txt", "run.sh", "link", "sub/deep/c", ".gitignore"} == set(before) - {"sub/b.py"}
    shell.execute(ODD + "; rm -r sub; rm link; echo two > a.txt")
    after = list_files(shell, "/testbed", 60)
    assert "\udcff\n" in after and after["ln"].content == "\udcff\n" and after["numbers"].executable
    archives = moved(shell, [name for name in after if before.get(name) != after[name]])
    shell.reset()
    remove_files(shell, "/testbed", before.keys() - after.keys(), 60)
    for archive in archives:
        unpack(shell, "/testbed", archive, 60)
    assert list_files(shell, "/testbed", 60) == after
    assert shell.execute("ls -d sub").returncode != 0, "folders go with their last file"


def test_a_file_that_changes_meanwhile_is_named_and_the_others_are_right(shell):
    entries = list_files(shell, "/testbed", 60)
    shell.execute("echo changed >> a.txt")
    files = {name: entry for name, entry in entries.items() if entry.kind == "f"}
    (contents,) = read_files(shell, "/testbed", files, 60)
    assert contents["a.txt"] is None and contents["sub/deep/c"] == bytes(range(256))
    assert [name for name, data in contents.items() if data is None] == ["a.txt"]


def test_version_controls_own_and_compiled_files_are_not_there(shell):
    before = list_files(shell, "/testbed", 60)
    shell.execute("mkdir __pycache__ sub/.git; echo 1 | tee __pycache__/a.pyc sub/.git/HEAD > .git/x")
    assert list_files(shell, "/testbed", 60) == before


def test_what_fails_is_told(shell):
    with pytest.raises(SandboxError, match="files can't be moved"):
        list_files(shell, "/nowhere", 60)
    with pytest.raises(SandboxError, match="files can't be moved: .*tar"):
        unpack(shell, "/testbed", b"nonsense" * 999, 60)


@pytest.mark.parametrize(
    "listed",
    [
        b"nonsense",
        b"f\0644\0end of files\0",
        b"f\0644\0one\0a\0\0end of files\0",
        b"f\0644\x001\0tests//t.py\0\0end of files\0",
        b"f\0644\x001\0a/../tests/t.py\0\0end of files\0",
        b"f\0644\x001\0/etc/passwd\0\0end of files\0",
        b"l\0777\x001\0x\0tests\0f\0644\x001\0x/t.py\0\0end of files\0",
    ],
)
def test_a_list_that_no_honest_find_would_make_is_refused(listed):
    class Forger:
        def execute(self, command, **options):
            return CommandResult("", 0, data=listed)

    with pytest.raises(SandboxError, match="can't be listed"):
        list_files(Forger(), "/testbed", 60)


def test_an_empty_tree_has_no_files():
    need_isolation()
    with LocalShell.open(Workspace({"/testbed": None}), Limits()) as shell:
        assert list_files(shell, "/testbed", 60) == {}
