"""Against real engines, each that there is: podman as Debian has it (with runc), and docker where its daemon answers.
``VERL_BPO_CONTAINER_ENGINE`` names one, with its options, instead."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from verl_bpo.sandbox import SandboxError, TaskError
from verl_bpo.shells import container
from verl_bpo.shells.base import Limits, Workspace
from verl_bpo.shells.container import ContainerConfig, ContainerShell, _myself, find_engine, reclaim

NAMED = os.environ.get("VERL_BPO_CONTAINER_ENGINE")
ENGINES = [NAMED] if NAMED else ["podman --runtime runc --cgroup-manager=cgroupfs", "docker"]
OPTIONS = "--ulimit nofile=1024:1024 --ulimit nproc=4096:4096"  # where limits can't be raised
IMAGE = f"localhost/verl-bpo-test-{os.getpid()}"  # the tests may run twice on a machine


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: engine.split()[0])
def engine(request):
    try:
        find_engine(request.param)
    except SandboxError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture(scope="module")
def image(engine):
    """A few megabytes: busybox and a folder."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox: apt-get install busybox-static")
    if subprocess.run(["ldd", busybox], capture_output=True).returncode == 0:
        pytest.skip("busybox is not static: apt-get install busybox-static")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("bin", "testbed", "tmp", "etc"):  # one that isn't named may come out closed to all but its owner
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        tar.add(busybox, "bin/busybox")
        listed = subprocess.run([busybox, "--list"], capture_output=True, text=True).stdout.split()
        for name in listed:
            if name != "busybox":
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
        text = tarfile.TarInfo("testbed/a.txt")
        text.size = 4
        tar.addfile(text, io.BytesIO(b"one\n"))
    done = subprocess.run([*engine.split(), "import", "-", IMAGE], input=file.getvalue(), capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"{engine} doesn't work here: {done.stderr.decode().strip()[-200:]}")
    yield IMAGE
    subprocess.run([*engine.split(), "rmi", "--force", IMAGE], capture_output=True)


def open_shell(engine, image, **options):
    limits = Limits(processes=50, memory=128 << 20, file_size=8 << 20, output=2000)
    options = {"limits": limits, "allow_unsafe": True, **options}
    return ContainerShell(image, engine=engine, run_options=OPTIONS, shell="sh", env={"PATH": "/bin"}, **options)


@pytest.fixture
def shell(engine, image):
    with open_shell(engine, image) as shell:
        try:
            shell.execute("true")
        except SandboxError as error:
            pytest.skip(f"containers don't run here: {error}")
        yield shell


def mine(shell, what="ps -aq"):
    """Containers (or images) of this process that are there."""
    line = [*shell._engine, *what.split(), "--filter", f"label=verl-bpo-owner={_myself()}"]
    return subprocess.run(line, capture_output=True, text=True).stdout.split()


def test_saved_states_can_be_gone_on_from_again_and_again_and_go_with_the_last_reference(shell):
    assert shell.execute("cat a.txt; pwd").output == "one\n/testbed\n"
    first = shell.save()
    assert first.image == IMAGE, "nothing changed: the image itself"
    shell.execute("echo two > a.txt; mkdir d; ln -s a.txt link; chmod 600 a.txt")
    second = shell.save()
    shell.execute("rm a.txt; echo 3 > d/c")
    third = shell.save()
    show = "cat a.txt; ls; stat -c %a a.txt"
    for _ in range(2):
        shell.load(second)
        assert shell.execute(show).output == "two\na.txt\nd\nlink\n600\n"
        assert shell.save() is second, "looking changes nothing"
        shell.execute("echo 9 > a.txt")
    shell.load(third)
    assert shell.execute("ls; cat d/c").output == "d\nlink\n3\n"
    shell.load(first)
    assert shell.execute("cat a.txt; ls").output == "one\na.txt\n"
    shell.close()
    assert len(mine(shell, "images -q")) == 2 and mine(shell) == []
    del second, third
    assert mine(shell, "images -q") == []


def test_branches_that_take_turns_need_no_image(shell):
    """Each state is gone on from once, so that its container itself can go on."""
    shell.execute("echo 1 > x")
    one = shell.save()
    shell.reset()
    for number in range(3):
        shell.execute(f"echo {number} >> y")
        two = shell.save()
        shell.load(one)
        del one
        shell.execute("echo 1 >> x")
        one = shell.save()
        shell.load(two)
        del two
    assert shell.execute("cat y").output == "0\n1\n2\n"
    assert mine(shell, "images -q") == [] and len(mine(shell)) == 2
    del one
    assert len(mine(shell)) == 1


def test_of_many_states_some_become_images(shell, monkeypatch):
    monkeypatch.setattr(container, "_MOST_WAITING", 2)
    states = []
    for number in range(4):
        shell.reset()
        shell.execute(f"echo {number} > x")
        states.append(shell.save())
    shell.reset()
    assert len(mine(shell)) == 2 and len(mine(shell, "images -q")) == 2
    for number in (0, 3, 1, 0):
        shell.load(states[number])
        assert shell.execute("cat x").output == f"{number}\n"
    states.clear()
    shell.close()
    assert mine(shell) == [] and mine(shell, "images -q") == []


def test_what_is_kept_outlives_its_shell(engine, image):
    kept = f"{IMAGE}-kept"
    with open_shell(engine, image) as shell:
        shell.execute("echo 1 > x")
        shell.keep(kept)
    try:
        assert reclaim(engine.split()) == []
        with open_shell(engine, kept) as shell:
            assert shell.execute("cat x").output == "1\n"
    finally:
        subprocess.run([*engine.split(), "rmi", "--force", kept], capture_output=True)


def test_a_shell_that_is_forgotten_leaves_no_container(engine, image, shell):
    forgotten = open_shell(engine, image)
    forgotten.execute("echo 1 > x")
    before = len(mine(shell))
    del forgotten
    assert len(mine(shell)) == before - 1


@pytest.mark.parametrize("ended", [True, False])
def test_a_container_that_is_gone_is_told_once(shell, monkeypatch, ended):
    """Even while the process that started it has yet to end."""
    shell.reset()
    shell.execute("echo 1 > x")
    state = shell.save()
    shell.load(state)
    shell.execute("echo 2 > x")
    container = shell._container
    subprocess.run([*shell._engine, "rm", "--force", container.name], capture_output=True)
    if ended:
        container.process.wait()
    else:
        monkeypatch.setattr(container.process, "poll", lambda: None)
    with pytest.raises(SandboxError, match="unsaved files are lost"):
        shell.execute("cat x")
    assert shell.execute("cat x").output == "1\n", "what was saved is there"
    assert shell.execute("echo Error: mine; exit 125").returncode == 125, "a command may say so, too"


def test_exit_codes_output_stdin_and_time(shell):
    assert shell.execute("exit 7").returncode == 7
    assert shell.execute("cat", stdin="given").output == "given"
    assert shell.execute("for i in $(seq 50); do echo out; echo err >&2; done").output == "out\nerr\n" * 50
    assert "bytes left out" in shell.execute("seq 100000").output
    whole = shell.execute("printf 'caf\\351\\n'; seq 100000", most=1 << 24)
    assert whole.left_out == 0 and whole.data.startswith(b"caf\xe9\n1\n") and whole.data.endswith(b"\n100000\n")
    late = shell.execute("echo begun; sleep 60", timeout=1)
    assert late.timed_out and late.returncode == 137 and late.output.startswith("begun\n")
    assert shell.execute("pwd", cwd="/tmp").output == "/tmp\n"


def test_attacks(shell):
    assert shell.execute("sleep 95.5 & setsid sleep 95.5 & nohup sleep 95.5 >/dev/null 2>&1 &").returncode == 0
    assert "95.5" not in shell.execute("ps").output
    assert "sleep 95.5" not in subprocess.run(["ps", "axo", "args"], capture_output=True, text=True).stdout.split("\n")
    assert shell.execute("i=0; while [ $i -lt 90 ]; do sleep 3 & i=$((i+1)); done", timeout=20).returncode != 0
    shell.reset()  # busybox's shell, unlike bash, leaves the dead in the process table
    assert shell.execute("echo on").output == "on\n"
    assert shell.execute("dd if=/dev/zero of=f bs=1M count=12; [ $(stat -c %s f) -gt 8388608 ]").returncode != 0
    assert shell.execute("mount -t tmpfs none /tmp").returncode != 0
    assert shell.execute("ls -A /sys/class/net; ip route | grep .").returncode != 0
    assert shell.execute(f"ls {Path.home()}").returncode != 0
    shell.execute("kill -9 -1; kill -9 1")
    assert shell.execute("echo on").output == "on\n"


SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:3]
from test_container import open_shell
shell = open_shell(sys.argv[3], sys.argv[4])
shell.execute("echo 1 > x")
state = shell.save()
shell.execute("true")
print("ready", flush=True)
shell.execute("sleep 96.6", timeout=90)
"""


def test_what_a_killed_owner_left_is_reclaimed(engine, shell):
    here = Path(__file__)
    arguments = [str(here.parent), str(here.parents[2]), engine, IMAGE]
    owner = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "ready\n"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 20
    while "sleep 96.6" in subprocess.run(["ps", "axo", "args"], capture_output=True, text=True).stdout.split("\n"):
        assert time.monotonic() < deadline, "its container ends with it"
        time.sleep(0.2)
    assert len(reclaim(engine.split())) >= 1
    assert reclaim(engine.split()) == []


def test_files_travel_as_bytes(shell):
    data = bytes(range(256)) * 100
    shell.write("new/folder/it's", data)
    assert shell.read("new/folder/it's") == shell.read("/testbed/new/folder/it's") == data
    with pytest.raises(SandboxError, match="no-such-file can't be read in the shell"):
        shell.read("no-such-file")
    with pytest.raises(SandboxError, match="new can't be written in the shell"):
        shell.write("new", b"x")


def test_a_shell_opens_on_the_workspaces_image_or_the_configs(engine, image):
    options = {"engine": engine, "run_options": OPTIONS}
    with pytest.raises(SandboxError, match="names no image: set bpo.env.container.image"):
        ContainerShell.open(Workspace({"/testbed": None}), Limits(), **options)
    with pytest.raises(TaskError, match="no image localhost/no-such-image on this machine"):
        ContainerShell.open(Workspace({"/testbed": None}, image="localhost/no-such-image"), Limits(), **options)
    with ContainerShell.open(Workspace({"/testbed": None}), Limits(), True, image=image, **options) as shell:
        assert shell.cwd == "/testbed"


def test_a_missing_engine_or_image_is_told(engine, image):
    with pytest.raises(SandboxError, match="no container engine can be used .no-such-engine: not installed"):
        ContainerShell(image, engine="no-such-engine")
    with pytest.raises(SandboxError, match="image failed"):
        ContainerShell("localhost/no-such-image", engine=engine)
    with pytest.raises(ValueError, match="bpo.env.container.run_options='--env \"': No closing quotation"):
        ContainerConfig(run_options='--env "')


def test_an_engine_that_is_there_but_does_not_answer_is_passed_over(tmp_path, monkeypatch):
    """A fake docker, whose daemon is not running, and nothing else."""
    (tmp_path / "docker").write_text("#!/bin/sh\necho Cannot connect to the daemon >&2; exit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    find_engine.cache_clear()
    with pytest.raises(SandboxError, match="podman: not installed; docker: Cannot connect to the daemon"):
        find_engine()
    assert ContainerShell.probe() == (False, str(pytest.raises(SandboxError, find_engine).value))


def test_the_disk_is_limited_or_it_takes_consent(engine, image, shell):
    """Few storages can: Docker's overlay2 on xfs with pquota, or btrfs, whose older quotas aren't always kept."""
    _, detail = ContainerShell.probe(engine=engine, run_options=OPTIONS)
    options = {"allow_unsafe": False, "limits": Limits(disk=32 << 20, file_size=8 << 20)}
    if "disk: limited" in detail:
        with open_shell(engine, image, **options) as limited:
            fill = "for i in 1 2 3 4 5 6; do head -c 7m /dev/zero > f$i || exit 9; done"
            assert limited.execute(fill).returncode == 9
            limited.reset()
            assert limited.execute("head -c 7m /dev/zero > f").returncode == 0
    else:
        with pytest.raises(SandboxError, match="allow_unsafe=true"), open_shell(engine, image, **options) as unlimited:
            unlimited.execute("true")


def test_a_limit_that_is_taken_and_not_kept_is_no_limit(tmp_path):
    """A fake engine to which everything is well: btrfs that has lost count of its quotas looks like this."""
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    with pytest.raises(SandboxError, match="fake takes a limit on the disk and doesn't keep it.*allow_unsafe=true"):
        ContainerShell("image", engine=str(fake))
    ContainerShell("image", engine=str(fake), allow_unsafe=True).close()


def test_the_probe_runs_a_container_and_leaves_nothing(engine, shell):
    works, detail = ContainerShell.probe(engine=engine, run_options=OPTIONS)
    assert works and "processes, memory: limited" in detail
    listed = subprocess.run([*engine.split(), "images"], capture_output=True, text=True).stdout
    assert "probe" not in listed
