"""What worlds start, print, write and grow to ends with them, however they or who asked for them end.

Without a guard each of the daemons here outlived its world: they have a session of their own and no parent.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox_worlds import Diary
from test_sandbox_pool import make_pool, pid_of, runs, wait_until_gone

from verl_bpo.sandbox import Observation, SandboxCrashed, SandboxError, SnapshotUnsupported
from verl_bpo.sandbox.family import _PRINTED, descendants
from verl_bpo.sandbox.scratch import reclaim

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        os.rename(sys.argv[1], sys.argv[1] + ".ready")
        time.sleep(1000)
    os._exit(0)
os.wait()
"""


class Messy(Diary):
    leaked = []

    def step(self, action):
        verb, _, what = action.partition(" ")
        if verb == "pid":
            return Observation(str(os.getpid()))
        if verb == "daemon":
            subprocess.run([sys.executable, "-c", DAEMON, what], check=True)
            return Observation(Path(await_file(f"{what}.ready")).read_text())
        if verb == "child":
            return Observation(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
        if verb == "print":
            print("x" * int(what), flush=True)
        if verb == "crash":
            print("the last words", flush=True)
            os.abort()
        if verb == "grow":
            Messy.leaked.append(bytearray(int(what) << 20))
        if verb == "write":
            Path(os.environ["TMPDIR"], what).write_text("x")
            return Observation(os.environ["TMPDIR"])
        return super().step(action)


def await_file(path, seconds=20):
    deadline = time.monotonic() + seconds
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.002)
    return path


def messy_pool(backend="memory", **options):
    pool = make_pool("", backend=backend, **options)
    pool._spec = (f"{__file__}:Messy", {}, backend)
    return pool


@pytest.fixture
def pool():
    with messy_pool() as pool:
        yield pool


def guard_of(pool):
    (worker,) = pool._workers
    return worker._process.pid


def worker_killed(pool, world, sandbox):
    os.kill(descendants(guard_of(pool))[0], signal.SIGKILL)


def guard_killed(pool, world, sandbox):
    os.kill(guard_of(pool), signal.SIGKILL)
    pool.close()


def crashed(pool, world, sandbox):
    with pytest.raises(SandboxCrashed, match="killed by SIGABRT"):
        sandbox.step("crash")


def given_back(pool, world, sandbox):
    world.close()


def closed(pool, world, sandbox):
    pool.close()


@pytest.mark.parametrize(
    "backend, end",
    [
        *(("memory", end) for end in (worker_killed, guard_killed, crashed, given_back, closed)),
        *(("fork", end) for end in (worker_killed, given_back)),
    ],
)
def test_a_daemon_of_an_environment_ends_with_its_world(backend, end, tmp_path):
    with messy_pool(backend) as pool:
        world = pool.open()
        sandbox, _ = world.reset("t")
        daemon = int(sandbox.step(f"daemon {tmp_path / 'daemon'}").text)
        assert runs(daemon)
        end(pool, world, sandbox)
        assert wait_until_gone([daemon]) == []


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_leftovers import messy_pool
pool = messy_pool({backend!r})
world = pool.open()
sandbox, _ = world.reset("t")
print(sandbox.step("daemon {daemon}").text, pool._workers.copy().pop()._process.pid, flush=True)
sandbox.step("write something")
if sys.argv[1] == "wait":
    sys.stdin.read()
if sys.argv[1] == "raise":
    raise RuntimeError("something else failed")
"""


@pytest.mark.parametrize("how, backend", [(signal.SIGKILL, "memory"), (signal.SIGKILL, "fork"), ("raise", "memory")])
def test_nothing_outlives_the_trainer_and_its_scratch_folders_go(how, backend, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = SCRIPT.format(tests=str(Path(__file__).parent), backend=backend, daemon=tmp_path / "daemon")
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, how if isinstance(how, str) else "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    daemon, guard = map(int, trainer.stdout.readline().split())
    family = descendants(guard)
    if not isinstance(how, str):
        assert runs(daemon) and any(scratch.iterdir())
        trainer.send_signal(how)
    trainer.communicate(timeout=60)
    assert wait_until_gone([daemon, guard, *family]) == []
    assert list(scratch.iterdir()) == []


def test_what_a_guard_left_that_was_killed_with_its_trainer_ends_with_the_next_start(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = SCRIPT.format(tests=str(Path(__file__).parent), backend="memory", daemon=tmp_path / "daemon")
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    daemon, guard = map(int, trainer.stdout.readline().split())
    os.kill(guard, signal.SIGSTOP)  # or it would do its work before it dies
    trainer.kill()
    os.kill(guard, signal.SIGKILL)
    trainer.communicate(timeout=60)
    assert runs(daemon)
    assert len(reclaim(scratch)) == 1
    assert wait_until_gone([daemon]) == [] and list(scratch.iterdir()) == []


# --- workers are renewed ------------------------------------------------------------------------------------------------


def play(pool, *actions):
    """One tree's play; the process that it was in."""
    with pool.open() as world:
        sandbox, _ = world.reset("t")
        for action in actions:
            sandbox.step(action)
        return pid_of(sandbox)


def test_a_worker_that_grows_is_renewed_between_two_trees():
    with messy_pool(growth_bytes=50 << 20) as pool:
        first = play(pool, "grow 60")  # a table that it loads once, say: it counts from here
        assert play(pool, "grow 20") == first
        assert play(pool, "grow 40") == first
        assert play(pool) != first
        assert pool.renewals == 1


def test_a_worker_is_renewed_after_so_many_trees():
    with messy_pool(worker_trees=2) as pool:
        pids = [play(pool) for _ in range(3)]
        assert pids[0] == pids[1] != pids[2]


def test_a_worker_whose_environment_leaves_processes_is_renewed(pool):
    with pool.open() as world:
        sandbox, _ = world.reset("t")
        left = [int(sandbox.step("child").text), pid_of(sandbox)]
    assert wait_until_gone(left) == [] and pool.renewals == 1


def test_a_fork_worker_keeps_its_first_process_from_tree_to_tree():
    with messy_pool("fork") as pool:
        for _ in range(3):
            with pool.open() as world:
                branch, _ = world.reset("t")
                for fork in branch.snapshot().fork(3):
                    fork.step("a")
        assert pool.renewals == 0


# --- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["memory", "fork"])
def test_a_world_that_needs_more_memory_than_it_may_loses_one_branch_with_a_line(backend):
    with messy_pool(backend, memory_bytes=300 << 20) as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        trunk.step("a")
        (fork,) = trunk.snapshot().fork()
        with pytest.raises(SandboxError, match=r"turn 2: MemoryError: .*no more memory \(bpo.env.memory_mb\)"):
            fork.step("grow 500")
        assert trunk.step("b").text == "t/0 a b"
        assert trunk.step("grow 100").text == "t/0 a b grow 100"


def test_a_state_that_memory_is_too_small_to_copy_is_no_reason_to_end_a_run():
    with messy_pool(memory_bytes=300 << 20) as pool:
        pool._spec = (f"{__file__}:Large", {}, "memory")
        with pool.open() as world:
            trunk, _ = world.reset("t")
            trunk.step("a")
            with pytest.raises(SandboxError, match="memory_mb") as error:
                trunk.snapshot()
            assert not isinstance(error.value, SnapshotUnsupported)


class Large(Diary):
    def step(self, action):
        self.heap = bytearray(180 << 20)
        return super().step(action)


# --- prints -------------------------------------------------------------------------------------------------------------


def printed(capfd, until, seconds=20):
    said, deadline = "", time.monotonic() + seconds
    while until not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
    return said


def test_prints_are_bounded_and_that_is_said_once(pool, capfd):
    """2 MB of prints a step used to be 2 MB a step in the trainer's log."""
    with pool.open() as world:
        sandbox, _ = world.reset("t")
        for _ in range(4):
            sandbox.step(f"print {2 << 20}")
        with pytest.raises(SandboxCrashed):
            sandbox.step("crash")
    said = printed(capfd, "the last words")
    assert said.count("has printed 64 KB: the rest is left out") == 1
    assert _PRINTED <= said.count("x") < _PRINTED + 5000 and "the last words" in said
