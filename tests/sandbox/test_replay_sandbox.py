import pytest
from sandbox_worlds import Diary, Drifting, Hostile, Uncopyable

from verl_bpo.sandbox import Observation, ReplaySandbox, SandboxError
from verl_bpo.sandbox.history import Fingerprint


@pytest.fixture
def trunk():
    sandbox = ReplaySandbox(Uncopyable)
    sandbox.reset("t", 5)
    return sandbox


def test_branches_of_a_world_that_cannot_be_copied_are_independent(trunk):
    trunk.step("a")
    left, right = trunk.snapshot().fork(2)
    assert left.step("l").text == "t/5 a l"
    assert trunk.step("b").text == "t/5 a b"
    assert right.step("r").text == "t/5 a r"
    (nested,) = left.snapshot().fork()
    assert nested.step("n").text == "t/5 a l n"


def test_a_snapshot_outlives_its_sandbox(trunk):
    trunk.step("a")
    snapshot = trunk.snapshot()
    trunk.step("b")
    trunk.close()
    (fork,) = snapshot.fork()
    assert fork.step("f").text == "t/5 a f"


def test_replayed_steps_are_counted_apart(trunk):
    for action in "abc":
        trunk.step(action)
    (fork,) = trunk.snapshot().fork()
    fork.step("d")
    assert (fork.replayed_steps, fork.env_steps, trunk.replayed_steps) == (3, 1, 0)


def test_a_world_that_drifts_is_caught_and_the_step_named():
    trunk = ReplaySandbox(Drifting)
    trunk.reset("t")
    trunk.step("a")
    trunk.step("drift")
    (fork,) = trunk.snapshot().fork()
    assert isinstance(fork, SandboxError)
    assert "step 2 ('drift') gave another text" in str(fork)
    assert trunk.step("b").text == "t/0 a drift b"


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("text", Observation("other", 1.0, actions=("x",))),
        ("reward", Observation("text", 2.0, actions=("x",))),
        ("terminated", Observation("text", 1.0, terminated=True, actions=("x",))),
        ("truncated", Observation("text", 1.0, truncated=True, actions=("x",))),
        ("actions", Observation("text", 1.0, actions=("y",))),
        ("actions", Observation("text", 1.0)),
    ],
)
def test_every_part_of_an_observation_is_compared(field, other):
    fingerprint = Fingerprint.of(Observation("text", 1.0, actions=("x",), info={"elapsed": 1}), {})
    fingerprint.check(Observation("text", 1.0, actions=("x",), info={"elapsed": 2}), {}, "here")
    with pytest.raises(SandboxError, match=f"gave another {field} when"):
        fingerprint.check(other, {}, "here")


def test_a_fork_that_fails_closes_its_environment(tmp_path):
    log = tmp_path / "log"

    class Fragile(Diary):
        made = 0

        def __init__(self):
            super().__init__(str(log))
            Fragile.made += 1
            self.number = Fragile.made

        def step(self, action):
            if self.number == 2:
                raise OSError("gone")
            return super().step(action)

    trunk = ReplaySandbox(Fragile)
    trunk.reset("t")
    trunk.step("a")
    failed, good = trunk.snapshot().fork(2)
    assert isinstance(failed, OSError)
    assert log.read_text().split().count("close") == 1
    assert good.step("b").text == "t/0 a b"


def test_a_failed_step_ends_its_branch():
    trunk = ReplaySandbox(Hostile)
    trunk.reset("t")
    with pytest.raises(ValueError):
        trunk.step("raise")
    with pytest.raises(SandboxError, match="last step failed"):
        trunk.step("a")


def test_a_closed_or_unopened_sandbox_says_so():
    sandbox = ReplaySandbox(Diary)
    with pytest.raises(SandboxError, match="never reset"):
        sandbox.snapshot()
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.reset("t")
