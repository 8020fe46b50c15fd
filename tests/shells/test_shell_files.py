import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgpack
import pytest
from shells import COUNT_FORKS, LIST, make_tree, need_isolation

from verl_bpo.sandbox import SandboxCrashed, SandboxError
from verl_bpo.sandbox.scratch import Scratch, reclaim
from verl_bpo.shells import local
from verl_bpo.shells.base import Limits
from verl_bpo.shells.local import LocalShell

BIG_CHANGE = (
    "echo two > a.txt; rm -rf sub; mkdir sub; echo new > sub/b.py; mkdir empty; chmod 600 run.sh; rm link; "
    "ln -s nowhere link; ln -s /etc/passwd far; echo x > ignored.log; echo ref > .git/HEAD; mkdir -p nested/.git; "
    "echo cfg > nested/.git/config; echo t > /tmp/t; chmod 711 .; printf 'a\\r\\nb' > crlf; touch 'a b' $'new\\nline' --  -x; "
    "printf '* text=auto eol=crlf\\n*.py ident' > .gitattributes; chmod 000 a.txt; mkdir -m 555 shut"
)


@pytest.fixture(params=["overlay", "git"])
def shell(request, tmp_path):
    need_isolation()
    with LocalShell({"/testbed": make_tree(tmp_path / "base")}, files=request.param) as shell:
        yield shell


def test_a_saved_state_comes_back_exactly(shell):
    first = shell.execute(LIST).output
    start = shell.save()
    assert shell.execute(BIG_CHANGE).output == ""
    second = shell.execute(LIST).output
    changed = shell.save()
    assert shell.execute("rm -rf nested a.txt sub empty; chmod 755 .; echo 3 > c.txt; rm /tmp/t").returncode == 0
    third = shell.execute(LIST).output
    again = shell.save()
    assert len({first, second, third}) == 3
    for _ in range(2):
        for state, expected in ((changed, second), (start, first), (again, third), (changed, second)):
            shell.load(state)
            assert shell.execute(LIST).output == expected
    shell.reset()
    assert shell.execute(LIST).output == first


def test_what_was_not_saved_is_lost_with_a_load(shell):
    state = shell.save()
    shell.execute("echo lost > a.txt")
    shell.load(state)
    assert shell.execute("cat a.txt").output == "one\n"


def test_snapshots_of_snapshots_and_branches_beside_each_other(shell):
    states = {}
    for depth in range(8):
        states[depth] = shell.save()
        shell.execute(f"echo {depth} >> log")
    for depth in (5, 1, 7):
        shell.load(states[depth])
        assert shell.execute("cat log").output.split() == [str(i) for i in range(depth)]
        shell.execute("echo branch >> log")
        assert shell.execute("tail -n 1 log").output == "branch\n"


def test_a_turn_that_changes_nothing_adds_no_layer(tmp_path):
    need_isolation()
    with LocalShell({"/testbed": make_tree(tmp_path / "base")}, files="overlay") as shell:
        shell.execute("echo 1 > x")
        first = shell.save()
        shell.execute("cat x; ls -la")
        second = shell.save()
        assert second._chain == first._chain and first.nbytes > 0 and second.nbytes == 0


def test_the_base_is_never_written(shell, tmp_path):
    shell.execute(BIG_CHANGE)
    shell.save()
    assert (tmp_path / "base" / "a.txt").read_text() == "one\n"
    assert sorted(path.name for path in (tmp_path / "base").iterdir()) == sorted(
        [".git", ".gitignore", "a.txt", "link", "run.sh", "sub"]
    )


def test_layers_go_with_the_last_state_that_stands_on_them(tmp_path):
    need_isolation()

    def layers(shell):
        shell.execute("true")
        return len(list((Path(f"/proc/{shell._keeper._process.pid}/root") / str(shell._scratch.folder)[1:]).glob("l*")))

    with LocalShell({"/testbed": make_tree(tmp_path / "base")}, files="overlay") as shell:
        states = []
        for number in range(20):
            shell.execute(f"echo {number} > f{number}")
            states.append(shell.save())
        assert layers(shell) == 21
        del states[:10]
        assert layers(shell) == 21, "the later ones stand on them"
        keep = states[0]
        states.clear()
        shell.load(keep)
        assert layers(shell) == 12
        del keep
        shell.reset()
        assert layers(shell) == 1


def test_a_long_chain(tmp_path):
    need_isolation()
    with LocalShell({"/testbed": make_tree(tmp_path / "base")}, files="overlay") as shell:
        for number in range(120):
            shell.execute(f"echo {number} >> log; echo x > f{number}")
            state = shell.save()
        shell.load(state)
        assert shell.execute("wc -l < log; ls f* | wc -l").output.split() == ["120", "120"]


def test_exit_codes_output_and_stdin(shell):
    assert shell.execute("exit 7").returncode == 7
    assert shell.execute("kill -9 $$").returncode == 137
    assert shell.execute("echo out; echo err >&2; echo more").output == "out\nerr\nmore\n"
    assert shell.execute("cat", stdin="x" * 300_000).output == "x" * 300_000
    assert shell.execute("cd sub; pwd").output == "/testbed/sub\n"
    assert shell.execute("pwd", cwd="/testbed/sub").output == "/testbed/sub\n"
    assert "syntax error" in shell.execute("if then").output
    assert shell.execute("printf '\\xff\\n'").output == "�\n"
    assert shell.execute("a\0b").returncode == 2
    assert shell.execute("cat /proc/self/environ | tr '\\0' '\\n' | grep -c VERL").output == "0\n"


def test_the_middle_of_a_long_output_is_left_out(tmp_path):
    need_isolation()
    with LocalShell({"/testbed": None}, limits=Limits(output=1000)) as shell:
        text = shell.execute("seq 1000000").output
        assert text.startswith("1\n2\n") and text.endswith("\n999999\n1000000\n")
        assert "bytes left out" in text and len(text) < 1100
        assert len(shell.execute("yes | head -c 1000").output) == 1000
        cut = shell.execute("head -c 5000 /dev/zero")
        assert cut.left_out == 4000 and cut.data.startswith(b"\0" * 500 + b"\n[... 4000 bytes")


def test_a_command_may_keep_more_than_the_others_and_its_bytes_are_there(tmp_path):
    need_isolation()
    with LocalShell({"/testbed": None}, limits=Limits(output=1000)) as shell:
        whole = shell.execute("printf 'caf\\351\\r\\n'; head -c 5000 /dev/zero", most=1 << 20)
        assert whole.data == b"caf\xe9\r\n" + b"\0" * 5000 and whole.left_out == 0
        assert whole.output.startswith("caf�\r\n")


def test_a_missing_cwd_is_the_sandboxs_error_and_the_shell_goes_on(shell):
    with pytest.raises(SandboxError, match="nothere"):
        shell.execute("true", cwd="/testbed/nothere")
    assert shell.execute("echo on").output == "on\n"


FIXED = (
    "env | sort; locale; id; hostname; umask; date +%Z; echo $$ $RANDOM $RANDOM; bash -c 'echo $RANDOM'; ls -U /usr/lib .;"
    'python3 -c \'import locale, sys; print(hash("a"), set("abc"), locale.getlocale(), sys.getfilesystemencoding())\''
)
"""What the table in docs/sandboxes.md says that a sandbox fixes."""


def test_commands_see_the_same_machine_each_time(shell, monkeypatch):
    """In another shell too, whatever the process that starts it has in its environment."""
    shown = shell.execute(FIXED)
    assert shown.returncode == 0 and shell.execute(FIXED) == shown
    for name, value in (("PYTHONHASHSEED", "7"), ("TZ", "Asia/Tokyo"), ("LC_ALL", "C"), ("HOME", "/root"), ("X", "1")):
        monkeypatch.setenv(name, value)
    before = os.umask(0o077)
    try:
        with LocalShell(dict(shell._trees), files=shell.facts["files"]) as other:
            assert other.execute(FIXED) == shown
    finally:
        os.umask(before)


def test_read_only_paths_are_seen_where_they_are_but_not_below_a_tree(tmp_path):
    need_isolation()
    with LocalShell({"/testbed": None}, read_only=["/var/lib/dpkg"]) as shell:
        assert shell.execute("ls /var /var/lib").output.split() == ["/var:", "lib", "/var/lib:", "dpkg"]
        assert shell.execute("touch /var/lib/dpkg/x").returncode != 0
    with pytest.raises(SandboxError, match="somewhere else"):
        LocalShell({"/testbed": None, "/tmp": None}, read_only=["/tmp"])


@pytest.mark.parametrize(
    ("trees", "message"),
    [({"testbed": None}, "absolute"), ({"/usr/x": None}, "can't be at"), ({"/testbed": "/no/such"}, "no folder")],
)
def test_wrong_trees_are_told(trees, message):
    with pytest.raises((ValueError, SandboxError), match=message):
        LocalShell(trees)


def test_a_tree_of_another_user_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can make one")
    os.chown(make_tree(tmp_path / "base"), 12345, 12345)
    with pytest.raises(SandboxError, match="another user"):
        LocalShell({"/testbed": tmp_path / "base"})


def test_without_bubblewrap_it_must_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_bpo.shells.local.find_bwrap", lambda: None)
    with pytest.raises(SandboxError, match="allow_unsafe"):
        LocalShell({"/testbed": None})
    with LocalShell({"/testbed": make_tree(tmp_path / "base")}, allow_unsafe=True) as shell:
        assert shell.facts["isolation"] == "none" and shell.facts["files"] == "git"
        state = shell.save()
        assert shell.execute("echo 2 > a.txt; cat a.txt; sleep 999 & setsid sleep 998 &").output == "2\n"
        shell.load(state)
        assert shell.execute("cat a.txt").output == "one\n"
        assert shell.execute("sleep 50", timeout=0.2).timed_out


def test_states_of_another_shell_are_refused(tmp_path):
    need_isolation()
    with LocalShell({"/testbed": None}) as one, LocalShell({"/testbed": None}) as other:
        one.execute("echo 1 > x")
        with pytest.raises(SandboxError, match="another shell"):
            other.load(one.save())


def test_a_dead_keeper_is_told_and_leaves_nothing(tmp_path):
    need_isolation()
    shell = LocalShell({"/testbed": None})
    pid = shell._keeper._process.pid
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(SandboxCrashed, match="died|gone"):
        shell.execute("sleep 77.7")
    with pytest.raises(SandboxCrashed):
        shell.execute("true")
    shell.close()
    shell.close()
    assert not shell._scratch.path.exists()
    deadline = time.monotonic() + 10  # the kernel ends the command with its keeper, in its own time
    while running("sleep 77.7") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running("sleep 77.7")


def running(command):
    listed = subprocess.run(["ps", "axo", "args"], capture_output=True, text=True).stdout
    return command in [line.strip() for line in listed.splitlines()]


SCRIPT = """
import time
from verl_bpo.shells.local import LocalShell
shell = LocalShell({"/testbed": None})
print(shell._keeper._process.pid, shell._scratch.path, flush=True)
shell.execute("echo 1 > x; sleep 66.6 & setsid sleep 66.6 & sleep 66.6")
"""


def test_a_killed_owner_takes_its_commands_with_it_and_its_folder_is_reclaimed(tmp_path):
    need_isolation()
    owner = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    keeper, folder = owner.stdout.readline().split()
    deadline = time.monotonic() + 10
    while not running("sleep 66.6") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert reclaim(tmp_path) == [] and Path(folder).is_dir(), "its owner lives"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while (running("sleep 66.6") or Path(f"/proc/{keeper}").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running("sleep 66.6") and not Path(f"/proc/{keeper}").exists()
    assert reclaim(tmp_path) == [Path(folder)] and not Path(folder).exists()


def test_a_scratch_folder_in_the_making_is_not_reclaimed(tmp_path, monkeypatch):
    """Another process that starts at that moment looks for folders whose owner is gone."""
    lock = fcntl.flock

    def just_before_it_is_held(descriptor, how):
        monkeypatch.setattr("fcntl.flock", lock)
        assert reclaim(tmp_path) == []
        lock(descriptor, how)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Scratch("first").close()  # this process has looked already
    monkeypatch.setattr("fcntl.flock", just_before_it_is_held)
    scratch = Scratch("test")
    assert scratch.folder.is_dir() and reclaim(tmp_path) == []
    scratch.close()
    assert list(tmp_path.iterdir()) == []


def test_scratch_folders_go_with_their_object(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scratch = Scratch("test")
    (scratch.folder / "x").write_text("1")
    del scratch
    assert list(tmp_path.iterdir()) == []


def test_an_ordinary_user_gets_the_same(tmp_path):
    """In a user namespace of its own: overlays, isolation, and processes limited by ulimit."""
    need_isolation()
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become somebody else")
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from verl_bpo.shells import local
from verl_bpo.shells.base import Limits
from verl_bpo.shells.local import LocalShell
with LocalShell({"/testbed": sys.argv[2]}, limits=Limits(processes=40)) as shell:
    print(shell.facts["isolation"], shell.facts["processes"], shell.facts["files"])
    state = shell.save()
    print(shell.execute("echo 2 > a.txt; rm -rf sub && mkdir sub && ls sub | wc -l; id -u").output.split())
    shell.load(state)
    print(shell.execute("cat a.txt; ls sub | wc -l").output.split())
    print(0 < int(shell.execute(sys.argv[3]).output) < 40)
"""
    base = tmp_path / "base"
    make_tree(base)
    for path in (base, *base.rglob("*")):
        os.chown(path, 54321, 54321, follow_symlinks=False)
    for path in (tmp_path, *tmp_path.parents):
        if path == Path(tempfile.gettempdir()):
            break
        path.chmod(0o755)
    package = tmp_path / "code" / "verl_bpo"  # neither this checkout nor this Python need be open to others
    source = Path(__file__).parents[2] / "verl_bpo"
    for room in ("sandbox", "shells"):
        shutil.copytree(source / room, package / room)
    shutil.copy(source / "__init__.py", package)
    shutil.copytree(Path(msgpack.__file__).parent, package.with_name("msgpack"))  # it has a part in plain Python
    python = "/usr/bin/python3"
    if subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]).returncode != 0:
        pytest.skip("no Python 3.10 or newer for all users")
    user = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups"]
    done = subprocess.run(
        [*user, python, "-B", "-c", script, str(package.parent), str(base), COUNT_FORKS],
        capture_output=True, text=True, env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts, *rest = done.stdout.splitlines()
    assert facts.split()[:2] == ["bwrap", "rlimit"], done.stdout
    assert rest == ["['0', '1000']", "['one', '2']", "True"]


def test_a_keeper_imports_the_standard_library_and_itself_alone():
    """It starts once per shell, and forks once per command."""
    script = local._KEEPER.replace("main(int(sys.argv[2]), sys.argv[3])", "print(*sys.modules)")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, local._PACKAGES], capture_output=True, text=True, check=True
    )
    modules = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names - {"__main__"}
    assert modules == {"verl_bpo"}
    own = {name for name in done.stdout.split() if name.startswith("verl_bpo") and "keeper" not in name}
    assert own == {"verl_bpo", "verl_bpo.shells"}
