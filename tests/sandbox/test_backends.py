"""Snapshot backends by name, an own one in a file, and what every backend must count."""

import pytest
from sandbox_worlds import Hostile
from test_sandbox_pool import make_pool

from verl_bpo.config.schema import build
from verl_bpo.sandbox import MemorySandbox, ReplaySandbox, SandboxCrashed, SandboxError, SnapshotUnsupported
from verl_bpo.sandbox.loading import BACKENDS, EnvironmentUnavailable

OWN = '''
from verl_bpo.sandbox import Backend, MemorySandbox, SnapshotUnsupported
from verl_bpo.sandbox.loading import load_environment


class Full(SnapshotUnsupported):
    """An exception of its own, with arguments of its own."""

    def __init__(self, most, text):
        super().__init__(text)


class FewSandbox(MemorySandbox):
    def snapshot(self):
        if self.env_steps > 1:
            raise Full(1, "no snapshot after the first step")
        return super().snapshot()


class FewBackend(Backend):
    def __init__(self, env, env_kwargs):
        self.environment = load_environment(env)
        self.kwargs = env_kwargs
        self.volatile = dict(self.environment.volatile)

    def sandbox(self):
        return FewSandbox(self.environment(**self.kwargs))


class NoBackend:
    pass
'''


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "few.py"
    file.write_text(OWN)
    return f"{file}:FewBackend"


def test_the_built_in_backends_are_found_by_their_modules():
    assert {"fork", "memory", "replay"} <= set(BACKENDS.built_in())


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_an_own_backend_is_one_file_and_its_exceptions_travel_as_what_they_are(own, isolation):
    assert build({"env": {"backend": own}}, "plain").env.backend == own
    with make_pool("Diary", backend=own, isolation=isolation) as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        trunk.step("a")
        (fork,) = trunk.snapshot().fork()
        assert fork.step("b").text == "t/0 a b"
        trunk.step("b")
        with pytest.raises(SnapshotUnsupported, match="no snapshot after the first step"):
            trunk.snapshot()
        assert trunk.step("c").text == "t/0 a b c"


def test_what_is_no_backend_says_so_in_one_line(own):
    for name, message in [
        ("nonsense", "no snapshot backend named 'nonsense': use one of .*memory.*replay.*, package.module:Class"),
        (own.replace("FewBackend", "NoBackend"), "is no snapshot backend: derive it from verl_bpo.sandbox.Backend"),
    ]:
        with pytest.raises(EnvironmentUnavailable, match=message):
            make_pool(backend=name)


# --- what was executed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: MemorySandbox(Hostile()), lambda: ReplaySandbox(Hostile)])
def test_a_step_that_fails_was_executed(make):
    sandbox = make()
    sandbox.reset("t")
    sandbox.step("a")
    with pytest.raises(ValueError):
        sandbox.step("raise")
    assert sandbox.env_steps == 2


@pytest.mark.parametrize("backend", ["memory", "fork", "replay"])
@pytest.mark.parametrize("action", ["exit", "hang"])
def test_a_step_that_crashed_or_timed_out_was_executed(backend, action):
    with make_pool(backend=backend, step_timeout=2) as pool, pool.open() as world:
        sandbox, _ = world.reset("t")
        sandbox.step("a")
        with pytest.raises(SandboxError):
            sandbox.step(action)
        assert sandbox.env_steps == 2
        with pytest.raises(SandboxError, match="last step failed"):
            sandbox.step("never executed")
        assert sandbox.env_steps == 2


def test_forks_by_replay_count_the_steps_of_their_prefix():
    with make_pool("Diary", backend="replay") as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        for action in "abc":
            trunk.step(action)
        forks = trunk.snapshot().fork(2)
        assert [fork.replayed_steps for fork in forks] == [3, 3]
        assert (trunk.replayed_steps, world.replayed_steps) == (0, 6)


def test_a_fork_by_replay_that_fails_on_the_way_counts_what_it_executed():
    with make_pool("Drifting", backend="replay") as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        for action in ("a", "drift", "b"):
            trunk.step(action)
        (fork,) = trunk.snapshot().fork()
        assert isinstance(fork, SandboxError)
        assert world.replayed_steps == 2  # the third isn't reached


def test_a_forgotten_snapshot_that_is_built_anew_counts_its_steps():
    with make_pool("HeavyDiary", snapshot_bytes=1500) as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        trunk.step("a")
        trunk.step("b")
        first = trunk.snapshot()
        trunk.step("c")
        trunk.snapshot()
        assert (world.evictions, world.replayed_steps) == (1, 0)
        forks = first.fork(2)
        assert [fork.replayed_steps for fork in forks] == [2, 0]  # built once, for both
        assert world.replayed_steps == 2


def test_branches_rebuilt_after_a_crash_count_their_steps():
    with make_pool() as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        trunk.step("a")
        trunk.step("b")
        (fork,) = trunk.snapshot().fork()
        fork.step("c")
        with pytest.raises(SandboxCrashed):
            world.reset("t")[0].step("exit")
        assert world.replayed_steps == 0
        trunk.step("d")
        fork.step("e")
        assert (trunk.replayed_steps, fork.replayed_steps, world.replayed_steps) == (2, 3, 5)
        assert (trunk.env_steps, fork.env_steps) == (3, 2)


def test_a_rebuild_that_fails_counts_what_it_executed():
    with make_pool("Drifting") as pool, pool.open() as world:
        trunk, _ = world.reset("t")
        for action in ("a", "drift", "b"):
            trunk.step(action)
        world._worker.stop()
        with pytest.raises(SandboxError, match="step 2"):
            trunk.step("c")
        assert world.replayed_steps == 2
