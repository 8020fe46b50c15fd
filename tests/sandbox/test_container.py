"""Against a real engine. ``VERL_BPO_CONTAINER_ENGINE`` names it with its options; the default suits a machine of one's
own that has Debian's podman and runc."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from verl_bpo.sandbox import SandboxError
from verl_bpo.sandbox.container import ContainerShell, reclaim
from verl_bpo.sandbox.overlay import Limits

ENGINE = os.environ.get("VERL_BPO_CONTAINER_ENGINE", "podman --runtime runc --cgroup-manager=cgroupfs")
OPTIONS = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]  # where limits can't be raised
IMAGE = "localhost/verl-bpo-test"


@pytest.fixture(scope="module")
def image():
    """A few megabytes: busybox and a folder."""
    program, busybox = ENGINE.split()[0], shutil.which("busybox")
    if shutil.which(program) is None or busybox is None:
        pytest.skip("no podman or no busybox: apt-get install podman runc busybox-static")
    if subprocess.run(["ldd", busybox], capture_output=True).returncode == 0:
        pytest.skip("busybox is not static: apt-get install busybox-static")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.add(busybox, "bin/busybox")
        listed = subprocess.run([busybox, "--list"], capture_output=True, text=True).stdout.split()
        for name in listed:
            if name != "busybox":
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
        for name in ("testbed", "tmp", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        text = tarfile.TarInfo("testbed/a.txt")
        text.size = 4
        tar.addfile(text, io.BytesIO(b"one\n"))
    done = subprocess.run([*ENGINE.split(), "import", "-", IMAGE], input=file.getvalue(), capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"{program} doesn't work here: {done.stderr.decode().strip()[-200:]}")
    yield IMAGE
    subprocess.run([*ENGINE.split(), "rmi", "--force", IMAGE], capture_output=True)


def open_shell(image, **options):
    options = {"limits": Limits(processes=50, memory=128 << 20, file_size=8 << 20, output=2000), **options}
    return ContainerShell(
        image, engine=ENGINE, run_options=OPTIONS, shell="sh", env={"PATH": "/bin"}, allow_unsafe=True, **options
    )


@pytest.fixture
def shell(image):
    with open_shell(image) as shell:
        try:
            shell.execute("true")
        except SandboxError as error:
            pytest.skip(f"containers don't run here: {error}")
        yield shell


def mine():
    """Containers and images of this process that are left."""
    label = f"label=verl-bpo-owner={__import__('verl_bpo.sandbox.container', fromlist=['_myself'])._myself()}"
    return [
        line
        for listing in (["ps", "-aq"], ["images", "-q"])
        for line in subprocess.run(
            [*ENGINE.split(), *listing, "--filter", label], capture_output=True, text=True
        ).stdout.split()
    ]


def test_states_are_images_that_go_with_the_last_reference(shell):
    assert shell.execute("cat a.txt; pwd").output == "one\n/testbed\n"
    first = shell.save()
    assert first.image == IMAGE, "nothing changed: the image itself"
    shell.execute("echo two > a.txt; mkdir d; ln -s a.txt link; chmod 600 a.txt")
    second = shell.save()
    shell.execute("rm a.txt; echo 3 > d/c")
    third = shell.save()
    show = "cat a.txt; ls; stat -c %a a.txt"
    shell.load(second)
    assert shell.execute(show).output == "two\na.txt\nd\nlink\n600\n"
    assert shell.save() is second, "looking changes nothing"
    shell.load(third)
    assert shell.execute("ls; cat d/c").output == "d\nlink\n3\n"
    shell.load(first)
    assert shell.execute("cat a.txt; ls").output == "one\na.txt\n"
    shell.reset()
    shell.close()
    assert len(mine()) == 2
    del second, third
    shell._state = shell._first
    assert mine() == []


def test_exit_codes_output_stdin_and_time(shell):
    assert shell.execute("exit 7").returncode == 7
    assert shell.execute("cat", stdin="given").output == "given"
    assert shell.execute("echo out; echo err >&2").output == "out\nerr\n"
    assert "bytes left out" in shell.execute("seq 100000").output
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
shell = open_shell("localhost/verl-bpo-test")
shell.execute("echo 1 > x")
state = shell.save()
shell.execute("true")
print("ready", flush=True)
shell.execute("sleep 96.6", timeout=90)
"""


def test_what_a_killed_owner_left_is_reclaimed(shell):
    here = Path(__file__)
    owner = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(here.parent), str(here.parents[2])], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout.readline() == "ready\n"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 20
    while "sleep 96.6" in subprocess.run(["ps", "axo", "args"], capture_output=True, text=True).stdout.split("\n"):
        assert time.monotonic() < deadline, "its container ends with it"
        time.sleep(0.2)
    assert len(reclaim(ENGINE.split())) >= 1
    assert reclaim(ENGINE.split()) == []


def test_a_missing_engine_or_image_is_told(image):
    with pytest.raises(SandboxError, match="no container engine"):
        ContainerShell(image, engine="no-such-engine")
    with pytest.raises(SandboxError, match="image failed"):
        ContainerShell("localhost/no-such-image", engine=ENGINE)
