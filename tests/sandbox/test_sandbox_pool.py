import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_bpo.sandbox import SandboxCrashed, SandboxError, SandboxPool, SandboxTimeout, SnapshotUnsupported, TaskError
from verl_bpo.sandbox.loading import BACKENDS, EnvironmentUnavailable

WORLDS = Path(__file__).with_name("sandbox_worlds.py")


def make_pool(name="Hostile", kwargs=None, **options):
    return SandboxPool(f"{WORLDS}:{name}", kwargs or {}, **{"step_timeout": 20, "reset_timeout": 60, **options})


@pytest.fixture
def pool():
    with make_pool() as pool:
        yield pool


@pytest.fixture(params=["memory", "replay"])
def world(request):
    with make_pool(backend=request.param) as pool, pool.open() as world:
        yield world


def runs(pid):
    """Whether a process runs; one that is dead but not yet reaped doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if runs(pid)]


def pid_of(sandbox):
    return int(sandbox.step("pid").text)


@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize("backend", BACKENDS.built_in())
@pytest.mark.parametrize("name", ["Diary", "SavingDiary"])
def test_branches_are_independent_whatever_the_backend_and_isolation(name, backend, isolation):
    with make_pool(name, backend=backend, isolation=isolation) as pool, pool.open() as world:
        trunk, first = world.reset("t", 3)
        assert first.text == "t/3"
        trunk.step("a")
        snapshot = trunk.snapshot()
        assert trunk.step("b").text == "t/3 a b"
        left, right = snapshot.fork(2)
        trunk.close()
        assert left.step("l").text == "t/3 a l"
        assert right.step("r").text == "t/3 a r"
        (nested,) = right.snapshot().fork()
        snapshot.release()
        left.close()
        assert nested.step("n").text == "t/3 a r n"
        assert (trunk.env_steps, right.env_steps, nested.env_steps) == (2, 1, 1)
        assert world.recoveries == 0


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        ("raise", SandboxError, "ValueError: the wall fell down"),
        ("own_error", SandboxError, "out of lives"),
        ("sysexit", SandboxError, "SystemExit: 4"),
        ("recurse", SandboxError, "RecursionError"),
        ("deep_info", SandboxError, "plain values"),
        ("unpicklable", SandboxError, r"info\['thing'\] is Unpicklable.*plain values"),
    ],
)
def test_a_failing_step_loses_its_branch_and_keeps_the_process(pool, action, error, message):
    with pool.open() as world:
        trunk, _ = world.reset("t")
        (fork,) = trunk.snapshot().fork()
        with pytest.raises(error, match=message):
            fork.step(action)
        with pytest.raises(SandboxError, match="last step failed"):
            fork.step("a")
        assert trunk.step("a").text == "t/0 a"
        assert world.recoveries == 0


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        ("exit", SandboxCrashed, "step: exit code 3"),
        ("hang", SandboxTimeout, "step took longer than 1 s"),
        ("hang_in_c", SandboxTimeout, "step took longer than 1 s"),
    ],
)
@pytest.mark.parametrize("backend", ["memory", "replay"])
def test_a_crash_or_a_hang_loses_its_branch_and_the_others_recover(backend, action, error, message):
    with make_pool(backend=backend) as pool, pool.open() as world:
        pool.step_timeout = 1
        trunk, _ = world.reset("t")
        trunk.step("a")
        snapshot = trunk.snapshot()
        first, second = snapshot.fork(2)
        second.step("s")
        with pytest.raises(error, match=message):
            first.step(action)
        pool.step_timeout = 20
        with pytest.raises(SandboxError, match="last step failed"):
            first.step("x")
        assert second.step("t").text == "t/0 a s t"
        assert trunk.step("b").text == "t/0 a b"
        (late,) = snapshot.fork()
        assert late.step("c").text == "t/0 a c"
        assert world.recoveries == 1
        assert (second.env_steps, second.replayed_steps - (backend == "replay")) == (2, 2)


def test_a_kill_from_outside_between_calls_loses_nothing(world):
    trunk, _ = world.reset("t")
    trunk.step("a")
    pid = pid_of(trunk)
    (fork,) = trunk.snapshot().fork()
    clean, _ = world.reset("t")
    clean.step("c")
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid]) == []
    assert clean.step("d").text == "t/0 c d"
    assert world.recoveries == 1
    # what showed the old process's number can't be the same again, and that is noticed
    with pytest.raises(SandboxError, match=r"step 2 \('pid'\) gave another text"):
        fork.step("b")


def test_a_kill_from_outside_during_a_step_names_the_signal(pool):
    with pool.open() as world:
        probe, _ = world.reset("t")
        pid = pid_of(probe)
        sandbox, _ = world.reset("t")
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(SandboxCrashed, match="killed by SIGKILL"):
            sandbox.step("hang")


def test_recovery_of_a_world_that_drifts_is_refused():
    with make_pool("Drifting") as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        trunk.step("drift")
        world._worker.stop()
        with pytest.raises(SandboxError, match=r"step 1 \('drift'\) gave another text"):
            trunk.step("a")


def test_prints_and_big_texts_dont_disturb_the_line_or_this_programs_output(pool, capfd):
    with pool.open() as world:
        sandbox, _ = world.reset("t")
        assert sandbox.step("print").text == "t/0 print"
        out, err = "", ""
        deadline = time.monotonic() + 20
        while "more noise" not in err and time.monotonic() < deadline:  # prints come by a way of their own
            more = capfd.readouterr()
            out, err = out + more.out, err + more.err
        assert out == "" and "more noise" in err
        assert len(sandbox.step("big").text) == 10_000_000
        assert sandbox.step("a" * 5_000_000).text.endswith("a")


def test_several_root_samples_cost_one_reset(tmp_path):
    log = tmp_path / "log"
    with make_pool("SavingDiary", {"log": str(log)}) as pool, pool.open() as world:
        roots = [world.reset("t", 1) for _ in range(3)]
        assert [o.text for _, o in roots] == ["t/1"] * 3
        assert [s.step(str(i)).text for i, (s, _) in enumerate(roots)] == ["t/1 0", "t/1 1", "t/1 2"]
        assert log.read_text().split().count("reset") == 1
        world.reset("t", 2)
        assert log.read_text().split().count("reset") == 2


def test_root_samples_work_without_snapshots():
    with make_pool("Uncopyable") as pool, pool.open() as world:
        one, _ = world.reset("t")
        two, _ = world.reset("t")
        assert one.step("a").text == "t/0 a"
        assert two.step("b").text == "t/0 b"
        with pytest.raises(SnapshotUnsupported, match="replay"):
            one.snapshot()
        assert one.step("c").text == "t/0 a c"


def test_a_task_error_travels_as_itself(world):
    with pytest.raises(TaskError, match="no task 'missing'"):
        world.reset("missing")


def test_processes_are_reused_and_hold_nothing_of_the_last_tree(tmp_path):
    log = tmp_path / "log"
    with make_pool(kwargs={"log": str(log)}) as pool:
        with pool.open() as world:
            sandbox, _ = world.reset("t")
            pid = pid_of(sandbox)
        assert log.read_text().split().count("close") == 1
        with pytest.raises(SandboxError, match="closed"):
            sandbox.step("a")
        with pool.open() as world:
            again, observation = world.reset("t")
            assert observation.text == "t/0"
            assert pid_of(again) == pid
    assert log.read_text().split().count("close") == 2


def test_no_more_worlds_than_the_pools_size(pool):
    first, second = pool.open(), pool.open()
    with ThreadPoolExecutor(1) as threads:
        third = threads.submit(pool.open)
        time.sleep(0.3)
        assert not third.done()
        first.close()
        third.result(timeout=20).close()
    second.close()


def test_a_failed_open_gives_its_place_back():
    with make_pool("Nothing", size=1) as pool:
        for _ in range(2):
            with pytest.raises(EnvironmentUnavailable, match="no class Nothing"):
                pool.open()


def test_wrong_arguments_of_an_environment_are_told_at_open():
    with make_pool("Diary", {"colour": "red"}) as pool, pytest.raises(EnvironmentUnavailable, match="colour"):
        pool.open()


def test_branches_may_be_used_from_many_threads_while_one_crashes(pool):
    with pool.open() as world:
        trunk, _ = world.reset("t")
        forks = trunk.snapshot().fork(6)

        def play(index):
            for turn in range(10):
                text = forks[index].step("exit" if (index, turn) == (0, 4) else f"{index}.{turn}").text
            return text

        with ThreadPoolExecutor(6) as threads:
            results = [threads.submit(play, index) for index in range(6)]
        assert isinstance(results[0].exception(), SandboxCrashed)
        for index in range(1, 6):
            assert results[index].result() == " ".join(["t/0", *(f"{index}.{turn}" for turn in range(10))])
        assert world.recoveries == 1


def test_a_worker_imports_nothing_heavy(pool):
    with pool.open() as world:
        assert world.reset("t")[0].step("modules").text == ""


def test_closing_the_pool_leaves_no_process_and_no_file():
    pool = make_pool()
    pids, folders = [], []
    for world in (pool.open(), pool.open()):
        sandbox, _ = world.reset("t")
        pids += [pid_of(sandbox), int(sandbox.step("spawn").text)]
        folders.append(Path(sandbox.step("tempfile").text))
    assert all(map(runs, pids)) and all(folder.is_dir() for folder in folders)
    world.close()  # one world given back, one still open
    pool.close()
    pool.close()
    assert wait_until_gone(pids) == []
    assert not any(folder.exists() for folder in folders)
    with pytest.raises(SandboxError, match="pool is closed"):
        pool.open()


def test_a_crash_takes_what_the_environment_started_with_it(pool):
    with pool.open() as world:
        sandbox, _ = world.reset("t")
        child = int(sandbox.step("spawn").text)
        with pytest.raises(SandboxCrashed):
            sandbox.step("exit")
        assert wait_until_gone([child]) == []


SCRIPT = f"""
import sys, threading, time
from verl_bpo.sandbox import SandboxPool
pool = SandboxPool({str(WORLDS) + ":Hostile"!r}, size=3)
for action in ("a", "hang", "hang_in_c"):
    sandbox, _ = pool.open().reset("t")
    print(sandbox.step("pid").text, flush=True)
    if action != "a":
        threading.Thread(target=sandbox.step, args=(action,), daemon=True).start()
time.sleep(0.3)
print("ready", flush=True)
if sys.argv[1] == "stay":
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["stay", "leave"])
def test_no_process_outlives_its_parent(how, tmp_path):
    """Killed, or just ended without closing the pool; with an idle world, a sleeping one and one stuck in C code."""
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    lines = [parent.stdout.readline().strip() for _ in range(4)]
    pids = [int(line) for line in lines[:3]]
    assert lines[3] == "ready"
    if how == "stay":
        assert all(map(runs, pids))
        parent.kill()
    parent.wait(timeout=20)
    assert wait_until_gone(pids) == []
    parent.stdout.close()


def test_the_snapshots_used_least_recently_make_room(tmp_path):
    with make_pool("HeavyDiary", {"log": str(tmp_path / "log")}, snapshot_bytes=3500) as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        snapshots = []
        for word in "abcde":
            trunk.step(word)
            if len(snapshots) == 3:
                snapshots[0].fork(1)  # so it isn't the one to go
            snapshots.append(trunk.snapshot())
        assert snapshots[0].nbytes == 1000 and world.evictions == 2
        before = (tmp_path / "log").read_text().count("load")
        texts = [snapshot.fork(1)[0].step("x").text for snapshot in snapshots]
        assert texts == [f"t/0 {' '.join('abcde'[: i + 1])} x" for i in range(5)]
        assert (tmp_path / "log").read_text().count("load") > before
        snapshots[0].release()
        assert len(world._kept) <= 3 and world.recoveries == 0


@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize("backend", BACKENDS.built_in())
def test_a_branchs_digest_is_its_environments_in_that_branchs_state(backend, isolation):
    with make_pool("DigestedDiary", backend=backend, isolation=isolation) as pool, pool.open() as world:
        trunk, _ = world.reset("t", 3)
        trunk.step("a")
        (fork,) = trunk.snapshot().fork()
        fork.step("b")
        trunk.step("c")
        assert (fork.digest(), trunk.digest()) == ({"entries": "a b"}, {"entries": "a c"})
        other, _ = world.reset("t", 3)
        assert other.digest() == {"entries": ""}


def test_an_environment_without_a_digest_has_none():
    with make_pool("Diary") as pool, pool.open() as world:
        assert world.reset("t")[0].digest() is None
