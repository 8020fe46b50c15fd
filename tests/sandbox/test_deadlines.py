"""Every wait for a world has an end, and it covers the whole of what is waited for."""

import contextlib
import os
import signal
import stat
import struct
import threading
import time

import pytest
from sandbox_worlds import Diary
from test_sandbox_pool import make_pool, pid_of

from verl_bpo.sandbox import Observation, SandboxCrashed, SandboxError, SandboxTimeout
from verl_bpo.sandbox import line as line_module
from verl_bpo.sandbox.worker import LocalWorker
from verl_bpo.shells import local
from verl_bpo.shells.container import ContainerShell


class Slow(Diary):
    """Waits longer than any deadline here where the action says so."""

    def step(self, action):
        if action == "trickle":  # the beginning of an answer
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                        os.write(int(name), struct.pack("!I", 1000) + b".")
        if action in ("trickle", "hang"):
            time.sleep(1000)
        if action == "pid":
            return Observation(str(os.getpid()))
        return super().step(action)

    def close(self):
        if self.actions[-1] == "close hangs":
            time.sleep(1000)


@contextlib.contextmanager
def within(seconds):
    """The time is far above what is waited for, and far below what used to be."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def slow_pool(**options):
    pool = make_pool("", **options)
    pool._spec = (f"{__file__}:Slow", {}, options.get("backend", "memory"))
    return pool


@pytest.mark.parametrize("action", ["hang", "trickle"])
def test_a_step_that_answers_nothing_or_half_costs_its_deadline(action):
    """Half an answer used to be waited for without end: the deadline covered its first byte."""
    with slow_pool() as pool, pool.open() as world:
        sandbox, _ = world.reset("t")
        pool.step_timeout = 0.2
        with within(10), pytest.raises(SandboxTimeout, match="t, turn 1: step took longer than 0.2 s"):
            sandbox.step(action)


def test_a_world_that_doesnt_read_costs_the_deadline_of_what_it_is_sent():
    """Sending used to have none."""
    with slow_pool() as pool, pool.open() as world:
        sandbox, _ = world.reset("t")
        os.kill(pid_of(sandbox), signal.SIGSTOP)
        pool.step_timeout = 0.2
        with within(10), pytest.raises(SandboxTimeout, match="step took longer than 0.2 s"):
            sandbox.step("x" * 5_000_000)


def test_a_branch_that_hangs_in_a_fork_of_the_process_ends_alone_and_by_the_inner_deadline():
    """The two deadlines were one: the outer one came first and ended every branch."""
    with slow_pool(backend="fork") as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        forks = trunk.snapshot().fork(3)
        for number, fork in enumerate(forks[:2]):
            pool.step_timeout = 0.2
            with within(10), pytest.raises(SandboxTimeout, match="step took longer than 0.2 s: its process was killed"):
                fork.step("hang")
            pool.step_timeout = 20
            assert forks[2].step(str(number)).text.endswith(str(number))
        assert world.recoveries == 0


def test_giving_back_a_world_whose_close_hangs_costs_one_deadline():
    with slow_pool() as pool:
        world = pool.open()
        sandbox, _ = world.reset("t")
        sandbox.step("close hangs")
        pool.step_timeout = 0.2
        with within(10):
            world.close()
        assert not pool._workers


def test_a_place_that_never_comes_free_is_waited_for_within_a_deadline():
    said = pytest.raises(SandboxTimeout, match="places of .*Diary were taken for 0.1 s.*bpo.env.workers")
    with make_pool("Diary", size=1, isolation="none", place_timeout=0.1) as pool, pool.open(), within(10), said:
        pool.open()


def test_whoever_waits_for_a_place_learns_of_the_pools_end():
    """It used to wait for a place of a pool that had ended."""
    pool = make_pool("Diary", size=1, isolation="none")
    world, told = pool.open(), []

    def wait():
        try:
            pool.open()
        except SandboxError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not pool._place_came_free._waiters:
        time.sleep(0.001)
    pool.close()
    thread.join(10)
    assert told == ["the sandbox pool is closed"]
    world.close()


# --- a world's waits together: a worker that only says that it hung, and a clock that it moves ------------------------------


class FakeWorker(LocalWorker):
    """Hangs where ``hangs(operation, args)`` says so, without taking the time: it moves the clock. Fake: no process."""

    clock = 0.0

    def __init__(self, hangs, takes):
        super().__init__()
        self.hangs, self.takes, self.dead = hangs, takes, False

    def call(self, operation, *args, timeout):
        takes = self.takes(operation)
        if self.hangs(operation, args):
            takes = timeout
        if takes >= timeout:
            FakeWorker.clock += timeout
            self.dead = True
            raise SandboxTimeout(f"{operation} took longer than {timeout:g} s: the process was killed")
        FakeWorker.clock += takes
        return super().call(operation, *args, timeout=timeout)

    def alive(self):
        return not self.dead


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(FakeWorker, "clock", 0.0)
    monkeypatch.setattr(line_module.time, "monotonic", lambda: FakeWorker.clock)

    def make(hangs=lambda operation, args: False, takes=lambda operation: 0.0, **options):
        options = {"step_timeout": 60.0, "reset_timeout": 300.0, **options}
        return make_pool("SavingDiary", make_worker=lambda: FakeWorker(hangs, takes), **options)

    return make


def test_a_world_that_always_hangs_is_given_up_after_three_calls_and_says_so_at_once(fake, caplog):
    """Eight roots used to cost eight deadlines before anything was said."""
    with fake(lambda operation, _: operation == "step") as pool, pool.open() as world:
        for _ in range(8):
            with pytest.raises(SandboxTimeout):
                world.reset("t")[0].step("a")
        assert FakeWorker.clock == 3 * 60
    assert "turn 1: step took longer than 60 s" in caplog.messages[0]
    assert "given up" in caplog.messages[-1]


def test_a_step_that_is_answered_clears_a_world_of_suspicion(fake):
    with fake(lambda operation, args: operation == "step" and args[1] == "hang") as pool, pool.open() as world:
        for _ in range(5):
            branch, _ = world.reset("t")
            branch.step("a")
            with pytest.raises(SandboxTimeout):
                branch.step("hang")
        assert FakeWorker.clock == 5 * 60


@pytest.mark.parametrize("backend", ["memory", "replay"])
def test_one_fork_that_hangs_is_lost_alone(fake, backend):
    """All of them used to be, after (reset + steps) times their number."""
    asked = []

    def third(operation, args):
        if operation == "fork":
            asked.append(len(args[1]))
        return operation == "fork" and (len(args[1]) > 1 or asked.count(1) == 3)

    with fake(third, backend=backend) as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        trunk.step("a")
        forks = trunk.snapshot().fork(5)
        assert [isinstance(fork, SandboxTimeout) for fork in forks] == [False, False, True, False, False]
        assert {fork.step("b").text for fork in forks if not isinstance(fork, Exception)} == {"t/0 a b"}
        assert FakeWorker.clock == (1 if backend == "replay" else 2) * 60


@pytest.mark.parametrize("backend, most", [("memory", 3 * 60), ("replay", 2 * 60)])
def test_forks_that_all_hang_cost_a_bounded_number_of_deadlines(fake, backend, most):
    with fake(lambda operation, _: operation == "fork", backend=backend) as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        trunk.step("a")
        forks = trunk.snapshot().fork(16)
        assert all(isinstance(fork, SandboxTimeout) for fork in forks) and len(forks) == 16
        assert FakeWorker.clock == most


def test_a_fork_that_plays_slow_steps_again_has_the_time_for_it(fake):
    takes = {"step": 30.0, "fork": 0.0}
    with fake(takes=lambda operation: takes.get(operation, 0.0), backend="replay") as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        for action in "ab":
            trunk.step(action)
        takes["fork"] = 200.0
        assert trunk.snapshot().fork()[0].step("c").text == "t/0 a b c"
        takes["fork"] = 299.0
        assert isinstance(trunk.snapshot().fork()[0], SandboxTimeout)
        assert FakeWorker.clock == 3 * 30 + 200 + 60 + 3 * 60


def test_playing_a_branch_again_has_one_deadline_for_all_its_steps(fake):
    """Each step used to have its own: 20 turns could take 1,500 s."""
    takes = {"step": 0.0}
    with fake(takes=lambda operation: takes.get(operation, 0.0)) as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        for number in range(20):
            trunk.step(str(number))
        world._worker.dead = True
        takes["step"] = 50.0
        with pytest.raises(SandboxTimeout, match="turn 21: "):
            trunk.step("a")
        assert FakeWorker.clock == 300


# --- shells -----------------------------------------------------------------------------------------------------------------


def test_a_shells_keeper_that_stops_costs_the_deadline_of_the_command(monkeypatch):
    with local.LocalShell({"/testbed": None}, allow_unsafe=True) as shell:
        os.kill(shell._keeper._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(local, "_GRACE", 0.1)
        monkeypatch.setattr(local, "_END_SECONDS", 0.1)
        with within(10), pytest.raises(SandboxCrashed, match=r"gave no answer in 0.2 s"):
            shell.execute("true", timeout=0.1)


ENGINE = """#!/bin/sh
case "$1" in
  run) exec sleep 1000 ;;
  ps | rm | images | image) exit 0 ;;
esac
"""


def test_a_container_engine_that_says_nothing_costs_a_deadline(monkeypatch, tmp_path):
    """It used to be waited for without end."""
    engine = tmp_path / "engine"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    with ContainerShell("image", engine=str(engine), allow_unsafe=True) as shell:
        monkeypatch.setattr("verl_bpo.shells.container._ENGINE_SECONDS", 0.2)
        monkeypatch.setattr("verl_bpo.shells.container._END_SECONDS", 0.2)
        with within(10), pytest.raises(SandboxError, match="nothing was heard in 0.2 s"):
            shell.execute("true")
