"""What a command may try, and what must come of it."""

import contextlib
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from shells import COUNT_FORKS, make_tree, need_isolation

from verl_bpo.sandbox import SandboxError
from verl_bpo.shells.base import Limits
from verl_bpo.shells.local import LocalShell

LIMITS = Limits(processes=40, memory=256 << 20, disk=16 << 20, files=500, file_size=8 << 20, seconds=20)


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    need_isolation()
    with LocalShell({"/testbed": make_tree(tmp_path_factory.mktemp("attack") / "base")}, limits=LIMITS) as shell:
        yield shell
        assert shell.execute("echo fine").output == "fine\n", "it survives everything"


@pytest.fixture(autouse=True)
def fresh(shell):
    shell.reset()


def marked(command):
    """Processes on this machine whose command line is this."""
    listed = subprocess.run(["ps", "axo", "args"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.strip() == command]


def test_fork_bomb(shell):
    assert 0 < int(shell.execute(COUNT_FORKS).output) <= 40
    started = time.monotonic()
    result = shell.execute("bomb() { bomb | bomb & }; bomb; sleep 1; echo over", timeout=10)
    assert time.monotonic() - started < 15 and not result.output.count("over") > 1
    assert shell.execute("echo on").output == "on\n"


def test_memory_hog(shell):
    result = shell.execute("python3 -c 'x = bytearray(600 << 20); print(len(x))'")
    assert result.returncode != 0 and "629145600" not in result.output
    hogs = "for i in 1 2 3 4 5 6; do python3 -c 'x = bytearray(120 << 20); import time; time.sleep(2)' & done; wait -n"
    if "cgroup" in shell.facts["memory"]:  # together
        assert shell.execute(f"{hogs}; echo first died: $?").output.strip().endswith("137")


@pytest.mark.parametrize("place", ["/testbed", "/tmp", "/dev/shm"])
def test_disk_filler(shell, place):
    fill = f"for i in 1 2 3 4 5; do head -c 7M /dev/zero > {place}/f$i || break; done; du -sm {place}/f* | wc -l"
    result = shell.execute(fill)
    assert "No space left" in result.output
    assert int(result.output.split()[-1]) <= 3
    shell.reset()
    assert shell.execute(f"head -c 1M /dev/zero > {place}/f && echo fits").output == "fits\n"


def test_the_disk_limit_holds_over_snapshots(shell):
    for number in range(4):
        result = shell.execute(f"head -c 7M /dev/zero > f{number}")
        shell.save()
    assert "No space left" in result.output


def test_one_big_file_and_many_small_ones(shell):
    assert shell.execute("head -c 12M /dev/zero > big; stat -c %s big").output.split()[-1] == str(8 << 20)
    result = shell.execute("for i in $(seq 900); do : > s$i || break; done; ls s* | wc -l")
    assert "No space left" in result.output and int(result.output.split()[-1]) <= 510


def test_output_flood(shell):
    with LocalShell({"/testbed": None}, limits=Limits(output=10_000)) as flooded:
        result = flooded.execute("yes", timeout=1)
        assert result.timed_out and len(result.output) < 11_000


@pytest.mark.parametrize(
    "start",
    ["sleep 91.1 &", "setsid sleep 91.1 &", "nohup setsid sleep 91.1 >/dev/null 2>&1 </dev/null & disown",
     "(trap '' TERM HUP INT; setsid sleep 91.1 & ) &", "python3 -c 'import os\nif os.fork() == 0:\n os.setsid()\n"
     " if os.fork() == 0: os.execvp(\"sleep\", [\"sleep\", \"91.1\"])'"],
)  # fmt: skip
def test_nothing_lives_on_in_the_background(shell, start):
    assert not shell.execute(f"{start}\nsleep 0.2; exit 0").timed_out
    assert marked("sleep 91.1") == []


def test_a_timeout_kills_everything(shell):
    result = shell.execute("trap '' TERM; setsid sleep 92.2 & sleep 92.2", timeout=0.5)
    assert result.timed_out and marked("sleep 92.2") == []


def test_killing_everything_that_can_be_seen(shell):
    victim = subprocess.Popen(["sleep", "93.3"])
    try:
        shell.execute("kill -9 -1; kill -9 1; kill -9 $PPID; pkill -9 sleep")
        shell.execute(f"kill -9 {victim.pid} {os.getpid()}")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert shell.execute("kill -9 $$").returncode == 137
    assert shell.execute("ls /proc | grep -c '^[0-9]'").output.strip() in ("3", "4", "5")


def test_host_files_are_out_of_sight(shell, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    home = Path.home()
    paths = [secret, home, "/root", "/home", "/var", "/opt", "/srv", "/sys", "/run", "/mnt", "/etc/shadow", "/etc/ssl"]
    for path in [
        *paths,
        "/etc/machine-id",
        "/proc/1/root/etc/shadow",
        f"/proc/{os.getpid()}/environ",
        "/boot",
        "/dev/sda",
    ]:
        assert shell.execute(f"ls -d '{path}' && cat '{path}'").returncode != 0, path
    assert "s3cret" not in shell.execute(f"ln -s {secret} x; cat x; ln {secret} y; cat y").output
    assert shell.execute("ls /").output.split() == sorted(
        {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "testbed", "tmp", "usr"}
        & {*os.listdir("/"), "testbed"}
    )
    assert "agent" in shell.execute("cat /etc/passwd").output and "root" not in shell.execute("cat /etc/passwd").output


def test_the_hosts_environment_is_out_of_sight(monkeypatch):
    need_isolation()
    monkeypatch.setenv("VERY_SECRET_TOKEN", "hunter2")
    with LocalShell({"/testbed": None}) as shell:
        assert "hunter2" not in shell.execute("env; cat /proc/*/environ | tr '\\0' '\\n'").output


@pytest.mark.parametrize("path", ["/x", "/usr/bin/x", "/etc/x", "/usr/local/x", "/dev/x", "/proc/x", "/bin/x"])
def test_nothing_outside_the_trees_can_be_written(shell, path):
    assert shell.execute(f"echo x > {path}").returncode != 0
    assert not Path(path).exists()


@pytest.mark.parametrize(
    "attack",
    [
        ": > /proc/sys/kernel/core_pattern",  # opening it is enough: a test must not change the machine
        ": > /proc/sys/vm/drop_caches",
        ": > /proc/mtrr",
        ": > /proc/sysrq-trigger",
        "find /proc -path '/proc/[0-9]*' -prune -o -type f -writable -print | grep .",
        "cat /proc/keys | grep .",
        "echo -1000 > /proc/self/oom_score_adj",
        "mount -t tmpfs none /tmp",
        "mount -o remount,rw /usr",
        "umount /proc",
        "unshare -Ur id",
        "unshare -m true",
        "chroot /tmp /bin/true",
        "mknod /tmp/sda b 8 0 && cat /tmp/sda",
        "dmesg | head -1 | grep .",
        "chown 0:0 a.txt",
        "nsenter -t 1 -m true",
        "hostname other",
        "date -s 2000-01-01 2>/dev/null",
        "renice -n -5 $$",
        "ulimit -f unlimited",
        "python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(250, 0, -3, 1) == -1)'",
        "python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(321, 0, 0, 0) == -1)'",
    ],
)
def test_no_privilege_is_left(shell, attack):
    if "syscall" in attack and os.uname().machine != "x86_64":
        pytest.skip("numbers of x86-64")
    assert shell.execute(attack).returncode != 0


def test_setuid_programs_have_no_effect(shell):
    assert shell.execute("cp /usr/bin/id x && chmod 6755 x && ./x -u").output == "1000\n"
    assert shell.execute("grep NoNewPrivs /proc/self/status").output.split()[-1] == "1"


def test_there_is_no_network(shell):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        reach = f"timeout 3 bash -c 'echo x > /dev/tcp/127.0.0.1/{server.getsockname()[1]}'"
        assert shell.execute(reach).returncode != 0
        with pytest.raises(TimeoutError):
            server.accept()
    assert shell.execute("cat /proc/net/dev | tail -n +3 | cut -d: -f1").output.split() == ["lo"]
    own = "python3 -c 'import socket; s = socket.create_server((\"127.0.0.1\", 0)); socket.create_connection(s.getsockname())'"
    assert shell.execute(own).returncode == 0, "its own loopback works"


def test_abstract_unix_sockets_of_the_host_cant_be_reached(shell):
    name = f"verl-bpo-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        knock = f"python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + \"{name}\")'"
        assert "refused" in shell.execute(knock).output


@pytest.fixture(params=["overlay", "git"])
def filed(request, tmp_path):
    """A shell of each way to keep files: git's are changed by a process outside the sandbox."""
    need_isolation()
    with LocalShell({"/testbed": make_tree(tmp_path / "base")}, limits=LIMITS, files=request.param) as shell:
        yield shell


def test_symlinks_and_hard_links_dont_lead_out(filed, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    target = outside / "target"
    target.write_text("mine")
    target.chmod(0o640)
    links = f"ln -s {target} out; echo yours > out; ln -s / root; rm -rf root/usr/bin/env; ln -s {outside} dir; rm -rf dir/*"
    filed.execute("mkdir -p empty/inside; chmod 711 empty/inside")
    before = filed.save()
    filed.execute(links)
    state = filed.save()
    filed.execute(f"rm -rf sub empty; ln -s {outside} sub; echo evil > sub/deep; ln -s {outside} empty")
    filed.save()
    for files in (state, before, state):
        filed.load(files)
        assert filed.execute("cat sub/b.py; stat -c %a empty/inside").output == "b = 1\n711\n"
    assert target.read_text() == "mine" and target.stat().st_mode & 0o777 == 0o640
    assert Path("/usr/bin/env").exists() and list(outside.iterdir()) == [target]


def test_what_git_would_obey_is_only_a_file(filed, tmp_path):
    """Hooks, filters and links to other repositories, in a tree that git saves and loads."""
    mark = tmp_path / "mark"
    plant = f"""
        printf '#!/bin/sh\ntouch {mark}\n' > hook; chmod 755 hook; mkdir -p .git/hooks; cp hook .git/hooks/post-checkout
        printf '[core]\nfsmonitor = touch {mark}\n[filter "x"]\nclean = touch {mark}\nsmudge = touch {mark}\n' > .git/config
        echo '* filter=x' > .gitattributes; echo 'gitdir: {tmp_path}' > sub/.git; cp .git/config .gitconfig
    """
    start = filed.save()
    assert filed.execute(plant).output == ""
    planted = filed.save()
    for state in (start, planted):
        filed.load(state)
        filed.execute("true")
    assert filed.execute("cat sub/.git").output == f"gitdir: {tmp_path}\n" and not mark.exists()


@pytest.mark.parametrize(("name", "depth"), [("d" * 50, 2000), ("d", 1200)], ids=["long", "deep"])
@pytest.mark.parametrize("files", ["overlay", "git"])
def test_folders_too_deep_to_name_lose_their_branch_only(tmp_path, files, name, depth):
    need_isolation()
    with LocalShell({"/testbed": make_tree(tmp_path / "base")}, files=files) as shell:
        start = shell.save()
        dig = f"import os\nfor i in range({depth}): os.mkdir('{name}'); os.chdir('{name}')\nprint('there')"
        assert shell.execute(f'python3 -c "{dig}"').output == "there\n"
        with contextlib.suppress(SandboxError):  # git can't save it, layers can
            shell.save()
        shell.load(start)
        assert shell.execute("cat a.txt; ls -d d*").output.startswith("one\nls: ")


def test_a_command_inherits_no_descriptor(shell):
    """Through the line to the sandbox's keeper, or to its layers, a command could get out."""
    inherited = shell.execute("for fd in /proc/$$/fd/*; do echo ${fd##*/}; done").output.split()
    assert set(inherited) <= {"0", "1", "2", "3"} and "socket" not in shell.execute("ls -l /proc/[0-9]*/fd").output


def test_the_layers_of_other_branches_are_out_of_reach(shell):
    shell.execute("echo private > mine")
    first = shell.save()
    shell.reset()
    found = shell.execute("find / -xdev -name mine 2>/dev/null; grep -o 'upperdir=[^,]*' /proc/self/mountinfo").output
    assert "mine" not in found
    upper = [line.removeprefix("upperdir=") for line in found.split()]
    for path in upper:
        assert shell.execute(f"ls {path} /{path} /proc/self/cwd/../{path}").returncode != 0
    shell.load(first)
    assert shell.execute("cat mine").output == "private\n"


def test_two_shells_are_out_of_each_others_sight():
    need_isolation()
    with LocalShell({"/testbed": None}) as one, LocalShell({"/testbed": None}) as other:
        worker = threading.Thread(target=one.execute, args=("echo here > /tmp/note; sleep 94.4 & sleep 1",))
        worker.start()
        time.sleep(0.3)
        seen = other.execute("ls /tmp; cat /proc/[0-9]*/cmdline | tr '\\0' ' '; exit 0").output
        worker.join()
        assert "/proc/[0-9]*" in seen and "94.4" not in seen and "note" not in seen
        assert "note" in one.execute("ls /tmp").output


def test_a_frozen_layer_has_no_writer(shell):
    """A process that went on after its command would change what a snapshot holds."""
    shell.execute("(i=0; while :; do i=$((i+1)); echo $i >> tick; done) & sleep 0.2")
    state = shell.save()
    shell.load(state)
    first = shell.execute("wc -l tick").output
    time.sleep(0.1)
    shell.load(state)
    assert shell.execute("wc -l tick").output == first != "0 tick\n"
