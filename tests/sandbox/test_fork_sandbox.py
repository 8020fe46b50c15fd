import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_bpo.sandbox import ForkBackend, SandboxCrashed, SandboxError, SandboxPool, SandboxTimeout, SnapshotUnsupported
from verl_bpo.sandbox.loading import EnvironmentUnavailable

WORLDS = Path(__file__).with_name("sandbox_worlds.py")


@pytest.fixture
def backend():
    backend = ForkBackend(f"{WORLDS}:Machine")
    yield backend
    backend.close()


@pytest.fixture
def trunk(backend):
    trunk = backend.sandbox()
    trunk.reset("t", 3)
    return trunk


def family(backend):
    """Processes of the backend's session, zombies too."""
    listed = subprocess.run(["ps", "axo", "pid=,sid="], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid, session in zip(listed[::2], listed[1::2]) if int(session) == backend._process.pid]


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def texts(sandbox, count):
    return [sandbox.step(f"s{i}").text for i in range(count)]


def test_a_fork_goes_on_exactly_like_its_trunk(trunk):
    """Generators and the process's own random numbers too, which neither a copy nor a save_state could hold."""
    texts(trunk, 3)
    snapshot = trunk.snapshot()
    expected = texts(trunk, 4)
    left, right = snapshot.fork(2)
    assert texts(left, 4) == texts(right, 4) == expected
    assert texts(trunk, 1) == texts(left, 1)


def test_forks_of_forks_of_forks(trunk):
    expected, branch = [], trunk
    for _ in range(12):
        snapshot = branch.snapshot()
        (branch,) = snapshot.fork()
        expected.append(branch.step("d").text)
    other = trunk.snapshot().fork()[0]
    assert texts(other, 12) == expected


def test_a_snapshot_outlives_its_sandbox_and_forks_their_snapshot(trunk):
    texts(trunk, 2)
    snapshot = trunk.snapshot()
    trunk.close()
    trunk.close()
    (fork,) = snapshot.fork()
    snapshot.release()
    snapshot.release()
    assert fork.step("a").text.split()[0] == "4"
    with pytest.raises(SandboxError, match="released"):
        snapshot.fork()
    with pytest.raises(SandboxError, match="closed"):
        trunk.step("a")


def test_a_crash_loses_its_branch_alone(trunk):
    first, second = trunk.snapshot().fork(2)
    with pytest.raises(SandboxCrashed, match="died during step|gone"):
        first.step("exit")
    with pytest.raises(SandboxCrashed):
        first.step("a")
    assert second.step("a").text == trunk.step("a").text


def test_a_trunk_may_be_killed_under_its_forks(trunk):
    snapshot = trunk.snapshot()
    (fork,) = snapshot.fork()
    os.kill(int(trunk.step("pid").text), signal.SIGKILL)
    assert fork.step("a").text.split()[0] == "0"
    assert snapshot.fork()[0].step("a").text.split()[0] == "0"


@pytest.mark.parametrize(
    ("action", "what"), [("thread", "1 threads"), ("child", "1 child processes"), ("connection", "2 connections")]
)
def test_what_a_fork_would_lose_or_share_is_refused_with_the_reason(trunk, action, what):
    trunk.step(action)
    with pytest.raises(SnapshotUnsupported, match=f"Machine can't be forked: it has {what}.*replay"):
        trunk.snapshot()
    assert trunk.step("a").text.split()[0] == "1", "it goes on"


def test_positions_in_files_are_each_branchs_own(tmp_path):
    (tmp_path / "lines").write_text("".join(f"{i:0100000}\n" for i in range(8)))  # longer than any buffer
    backend = ForkBackend(f"{WORLDS}:Machine", {"path": str(tmp_path / "lines")})
    try:
        trunk = backend.sandbox()
        trunk.reset("t")
        trunk.step("read")
        (fork,) = trunk.snapshot().fork()
        assert [int(trunk.step("read").text[-9:]) for _ in range(3)] == [1, 2, 3]
        assert [int(fork.step("read").text[-9:]) for _ in range(2)] == [1, 2]
    finally:
        backend.close()


def test_exit_codes_of_programs_that_the_environment_runs_are_kept(trunk):
    (fork,) = trunk.snapshot().fork()
    assert fork.step("run").text == trunk.step("run").text == "5"


def test_memory_is_shared_until_it_changes(backend, trunk):
    trunk.step("big")
    snapshot = trunk.snapshot()
    forks = snapshot.fork(8)
    assert all(fork.step("a").text.split()[0] == "1" for fork in forks)
    pss = 0
    for pid in family(backend):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        pss += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    assert pss < 2 * 64 * 1024, "9 processes with a heap of 64 MB each"


def test_the_environment_is_closed_once_with_its_worlds_last_branch(tmp_path):
    log = tmp_path / "log"
    log.touch()
    backend = ForkBackend(f"{WORLDS}:Machine", {"log": str(log)})
    trunk = backend.sandbox()
    trunk.reset("t")
    snapshot = trunk.snapshot()
    (fork,) = snapshot.fork()
    trunk.close()
    snapshot.release()
    assert "close" not in log.read_text()
    fork.close()
    assert log.read_text().split() == ["reset", "close"]
    backend.close()


def test_many_forks_leave_nothing_behind(backend, trunk):
    def play():
        snapshot = trunk.snapshot()
        forks = snapshot.fork(3)
        for fork in forks:
            fork.step("a")
            fork.close()
        snapshot.release()

    for _ in range(20):
        play()

    def alone():
        trunk.step("a")  # a process learns of its children's ends between two requests
        return len(family(backend)) == 2

    assert wait_for(alone), family(backend)


def test_branches_may_be_used_at_once(trunk):
    forks = trunk.snapshot().fork(6)
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda fork: texts(fork, 20), forks))
    assert all(result == results[0] for result in results)


def test_a_large_heap_lies_in_huge_pages_which_a_write_doesnt_copy_whole(backend):
    """A fork copies the table of its pages: 512 times less of it."""
    trunk = backend.sandbox()
    trunk.reset("large")

    def kilobytes(branch, name):
        words = branch.step("sizes").text.split()
        return int(words[words.index(f"{name}:") + 1])

    if kilobytes(trunk, "AnonHugePages") == 0:
        pytest.skip("this kernel doesn't gather pages on demand (MADV_COLLAPSE, Linux 6.1)")
    assert kilobytes(trunk, "AnonHugePages") > 100 << 10
    (fork,) = trunk.snapshot().fork()
    private = kilobytes(fork, "Private_Dirty")
    fork.step("touch 40")
    assert kilobytes(fork, "Private_Dirty") - private < 4 << 10  # 40 pages of 2 MB would be 80 MB


SCRIPT = f"""
import threading, time
from verl_bpo.sandbox import ForkBackend
backend = ForkBackend({str(WORLDS) + ":Hostile"!r})
trunk = backend.sandbox()
trunk.reset("t")
fork, = trunk.snapshot().fork()
print(backend._process.pid, flush=True)
threading.Thread(target=fork.step, args=("hang_in_c",), daemon=True).start()
time.sleep(0.3)
print("ready", flush=True)
time.sleep(1000)
"""


def test_no_branch_outlives_a_killed_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    session = int(parent.stdout.readline())
    parent.stdout.readline()
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def gone():
        listed = subprocess.run(["ps", "axo", "sid=,stat="], capture_output=True, text=True).stdout.split()
        return not any(int(sid) == session and state[0] != "Z" for sid, state in zip(listed[::2], listed[1::2]))

    assert wait_for(gone)


def test_an_environment_that_cant_be_made_is_told():
    with pytest.raises(EnvironmentUnavailable, match="colour"):
        ForkBackend(f"{WORLDS}:Machine", {"colour": "red"})
    with pytest.raises(EnvironmentUnavailable, match="no class Nothing"):
        ForkBackend(f"{WORLDS}:Nothing")


def test_in_a_pool_neither_a_crash_nor_a_hang_costs_another_branch_anything():
    with (
        SandboxPool(f"{WORLDS}:Hostile", backend="fork", step_timeout=3, reset_timeout=60) as pool,
        pool.open() as world,
    ):
        trunk, _ = world.reset("t")
        trunk.step("a")
        first, second, third = trunk.snapshot().fork(3)
        with pytest.raises(SandboxCrashed):
            first.step("exit")
        assert second.step("b").text == "t/0 a b" and world.recoveries == 0
        with pytest.raises(SandboxTimeout, match="its process was killed"):
            third.step("hang")
        assert second.step("c").text == "t/0 a b c" and world.recoveries == 0
        again, _ = world.reset("t")
        assert again.step("z").text == "t/0 z"
