"""Patches name the files that git would, and what transport did to them is undone."""

import subprocess

import pytest

from verl_bpo.envs.swebench.patches import PatchedFile, check, files_of, git, mended, patched_files, readings, to_bytes


def change(path, text="+x"):
    return f"diff --git a/{path} b/{path}\nindex 1..2 100644\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-y\n{text}\n"


def test_a_patch_that_speaks_of_diffs_is_not_torn_apart():
    assert patched_files(change("a.py", "+diff --git a/conftest.py b/conftest.py")) == ["a.py"]
    assert patched_files(change("a b/c d.py")) == ["a b/c d.py"]
    assert patched_files('diff --git "a/t\\303\\244.py" "b/t\\303\\244.py"\n+x\n') == ["tä.py"]
    assert patched_files(change("a.py", "+++ b/other.py\n+--- a/third.py")) == ["a.py"]


@pytest.fixture
def repo(tmp_path):
    def run(*words):
        line = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x", *words]
        return subprocess.run(line, check=True, capture_output=True).stdout.decode("utf-8", "surrogateescape")

    run("init", "-q")
    names = (
        "same",
        "gone",
        "moved",
        "mode.sh",
        "empty",
        "bin",
        "with space",
        "x b/x",
        "q\"u'o\\te",
        "tab\there",
        "é",
        "l\nf",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty" else f"{name}\n1\n2\n3\n4\n5\n")
    (tmp_path / "bin").write_bytes(bytes(range(256)))
    run("add", "-A")
    run("commit", "-qm", "base")
    return tmp_path, names, run


@pytest.mark.parametrize("setting", ["core.quotePath=true", "core.quotePath=false", "diff.mnemonicPrefix=true"])
def test_names_are_those_that_git_means(repo, setting):
    folder, names, run = repo
    for name in names:
        if name not in ("gone", "moved", "mode.sh", "empty"):
            with open(folder / name, "ab") as file:
                file.write(b"\xe9 more\n")
    (folder / "gone").unlink()
    (folder / "empty").unlink()
    (folder / "moved").rename(folder / "away to")
    (folder / "mode.sh").chmod(0o755)
    (folder / "new empty").touch()
    (folder / "new").write_text("1")
    (folder / "link").symlink_to("nowhere")
    run("add", "-A")
    patch = run("-c", setting, "diff", "--cached", "--binary", "-M", "--no-rename-empty")
    expected = {PatchedFile(name, name) for name in names if name not in ("gone", "moved", "empty")}
    expected |= {PatchedFile("gone", None), PatchedFile("moved", "away to"), PatchedFile("empty", None)}
    expected |= {PatchedFile(None, name) for name in ("new", "new empty", "link")}
    assert set(files_of(patch)) == expected
    assert check(patch) == ""
    run("reset", "-q", "--hard")
    assert git(["-C", str(folder), "apply", "-"], to_bytes(patch)).returncode == 0, "byte for byte"
    assert (folder / "é").read_bytes().endswith(b"\xe9 more\n")


def test_what_transport_does_to_a_whole_patch_is_undone():
    patch = "diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1,4 +1,4 @@\n-y\n+x\n one\n \n \n"
    assert mended(patch) == patch
    for damaged in (
        patch.rstrip("\n"),
        patch.strip(),
        patch.replace("\n", "\r\n"),
        "\ufeff" + patch,
        patch.encode().decode(),
    ):
        assert mended(damaged) == patch and check(mended(damaged)) == ""
    crlf = change("a").replace("-y\n+x\n", "-y\r\n+x\r\n")
    assert mended(crlf) == crlf, "of a file with CRLF"
    assert mended(crlf.replace("\n", "\r\n")) == crlf, "and of that in a text with CRLF"
    unfinished = change("a").replace("+x\n", "+x\n\\ No newline at end of file\n")
    assert mended(unfinished.rstrip("\n")) == unfinished


@pytest.mark.parametrize(
    "patch, problem",
    [
        ("", "no file in git's form"),
        ("--- x.py\n+++ x.py\n", "no file in git's form"),
        ("diff --git x.py x.py\n--- x.py\n+++ x.py\n@@ -1 +1 @@\n-a\n+b\n", "has no a/ or b/ before it"),
        ("diff --git a/x.png b/x.png\nindex 1..2 100644\nBinary files a/x.png and b/x.png differ\n", "holds no content of it"),
        (change("a").replace("@@ -1 +1 @@", "@@ -1,9 +1,8 @@"), "corrupt patch at line"),
        (change("a") + "\ud800", "surrogates not allowed"),
    ],
)  # fmt: skip
def test_a_patch_that_is_wrong_by_itself_is_found_out(patch, problem):
    assert problem in check(mended(patch))


def test_a_patch_read_as_latin_1_is_tried_as_the_bytes_it_was():
    patch = change("a", "+Andr\xe9")
    assert [to_bytes(reading) for reading in readings(patch)] == [patch.encode(), patch.encode("latin-1")]
    assert readings(change("a")) == [change("a")] and readings(change("a", "+€")) == [change("a", "+€")]


def test_git_is_asked_outside_of_whatever_repository_and_settings_surround_it(repo, tmp_path, monkeypatch):
    folder, _, run = repo
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    settings = tmp_path / "settings"
    settings.write_text(
        "[core]\n\tautocrlf = true\n[apply]\n\twhitespace = error\n[color]\n\tui = always\n[diff]\n\tnoprefix = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    assert check(change("a", "+x  ")) == ""
    patch = to_bytes("diff --git a/same b/same\n--- a/same\n+++ b/same\n@@ -1,2 +1,2 @@\n-same\n+same  \n 1\n")
    assert git(["-C", str(folder), "apply", "-"], patch).returncode == 0
    assert (folder / "same").read_bytes().startswith(b"same  \n1\n")
