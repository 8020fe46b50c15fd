from concurrent.futures import ThreadPoolExecutor

import pytest
from sandbox_worlds import Diary, Hostile, SavingDiary, Uncopyable

from verl_bpo.sandbox import MemorySandbox, SandboxError, SnapshotUnsupported


@pytest.fixture(params=[SavingDiary, Diary], ids=["own_state", "deep_copy"])
def world(request, tmp_path):
    """A sandbox in its initial state, and a function that counts what happened to its environment."""
    log = tmp_path / "log"
    log.touch()
    sandbox = MemorySandbox(request.param(str(log)))
    sandbox.reset("t")
    return sandbox, lambda event: log.read_text().split().count(event)


def test_branches_dont_see_each_others_steps(world):
    trunk, _ = world
    trunk.step("a")
    left, right = trunk.fork(trunk.snapshot(), 2)
    assert left.step("l").text == "t/0 a l"
    assert trunk.step("b").text == "t/0 a b"
    assert right.step("r").text == "t/0 a r"
    assert left.step("m").text == "t/0 a l m"
    assert trunk.step("c").text == "t/0 a b c"
    assert right.step("s").text == "t/0 a r s"


def test_forks_can_be_snapshot_and_forked_again(world):
    trunk, _ = world
    (fork,) = trunk.fork(trunk.snapshot())
    fork.step("f")
    nested_snapshot = fork.snapshot()
    trunk.step("a")
    fork.step("g")
    (nested,) = fork.fork(nested_snapshot)
    assert nested.step("n").text == "t/0 f n"
    assert fork.step("h").text == "t/0 f g h"


def test_a_snapshot_keeps_its_state_however_often_it_is_forked(world):
    trunk, _ = world
    snapshot = trunk.snapshot()
    for word in ("a", "b", "c"):
        trunk.step(word)
        (fork,) = trunk.fork(snapshot)
        assert fork.step(word).text == f"t/0 {word}"


def test_a_snapshot_outlives_its_sandbox(world):
    trunk, _ = world
    trunk.step("a")
    snapshot = trunk.snapshot()
    trunk.step("b")
    trunk.close()
    (fork,) = trunk.fork(snapshot)
    assert fork.step("f").text == "t/0 a f"


def test_forks_outlive_their_snapshot(world):
    trunk, _ = world
    snapshot = trunk.snapshot()
    (fork,) = trunk.fork(snapshot)
    snapshot.release()
    snapshot.release()
    assert fork.step("f").text == "t/0 f"
    with pytest.raises(SandboxError, match="released"):
        trunk.fork(snapshot)


def test_the_environment_closes_with_its_last_sandbox_or_snapshot(world):
    trunk, count = world
    snapshot = trunk.snapshot()
    (fork,) = trunk.fork(snapshot)
    trunk.close()
    trunk.close()
    fork.close()
    assert count("close") == 0
    snapshot.release()
    assert count("close") == 1


def test_a_state_is_saved_only_once_until_it_changes(tmp_path):
    log = tmp_path / "log"
    trunk = MemorySandbox(SavingDiary(str(log)))
    trunk.reset("t")
    first, second = trunk.fork(trunk.snapshot(), 2)
    first.step("f")  # the trunk's state is the snapshot's: nothing to save
    trunk.snapshot()  # the same state again
    second.step("s")  # saves first
    assert log.read_text().split().count("save") == 2


def test_a_snapshot_or_a_fork_costs_one_deep_copy(monkeypatch):
    copies = []
    monkeypatch.setattr(Diary, "__deepcopy__", lambda self, memo: copies.append(1) or _copied(self), raising=False)
    trunk = MemorySandbox(Diary())
    trunk.reset("t")
    snapshot = trunk.snapshot()
    assert len(copies) == 1
    (fork,) = trunk.fork(snapshot)
    assert len(copies) == 2
    for _ in range(3):
        trunk.step("a")
        fork.step("b")
    assert len(copies) == 2


def _copied(diary):
    new = Diary(diary.log)
    new.actions = list(diary.actions)
    return new


def test_a_world_that_cannot_be_copied_says_what_to_do():
    sandbox = MemorySandbox(Uncopyable())
    sandbox.reset("t")
    with pytest.raises(SnapshotUnsupported, match="cannot copy an open file.*save_state.*replay.*none"):
        sandbox.snapshot()
    assert sandbox.step("a").text == "t/0 a"


def test_a_failed_step_loses_its_branch_and_no_other():
    trunk = MemorySandbox(Hostile())
    trunk.reset("t")
    (fork,) = trunk.fork(trunk.snapshot())
    with pytest.raises(ValueError, match="the wall"):
        fork.step("raise")
    with pytest.raises(SandboxError, match="last step failed"):
        fork.step("a")
    with pytest.raises(SandboxError, match="last step failed"):
        fork.snapshot()
    assert trunk.step("a").text == "t/0 a"


def test_a_state_that_cannot_be_saved_loses_its_own_branch_only():
    class Unsavable(SavingDiary):
        def save_state(self):
            if "spoil" in self.actions:
                raise OSError("disk full")
            return super().save_state()

    trunk = MemorySandbox(Unsavable())
    trunk.reset("t")
    (fork,) = trunk.fork(trunk.snapshot())
    fork.step("spoil")
    assert trunk.step("a").text == "t/0 a"
    with pytest.raises(SandboxError, match="disk full"):
        fork.step("b")


def test_env_steps_count_a_branchs_own_steps(world):
    trunk, _ = world
    trunk.step("a")
    trunk.step("b")
    (fork,) = trunk.fork(trunk.snapshot())
    fork.step("c")
    assert (trunk.env_steps, fork.env_steps) == (2, 1)


def test_branches_may_be_used_from_many_threads_at_once(world):
    trunk, _ = world
    forks = trunk.fork(trunk.snapshot(), 8)

    def play(index):
        for turn in range(20):
            text = forks[index].step(f"{index}.{turn}").text
        return text

    with ThreadPoolExecutor(8) as threads:
        for index, text in enumerate(threads.map(play, range(8))):
            assert text == " ".join(["t/0", *(f"{index}.{turn}" for turn in range(20))])


def test_a_world_with_other_branches_is_not_reset_under_them(world):
    trunk, _ = world
    snapshot = trunk.snapshot()
    with pytest.raises(SandboxError, match="can't be reset"):
        trunk.reset("u")
    snapshot.release()
    assert trunk.reset("u", 1).text == "u/1"
    assert trunk.step("a").text == "u/1 a"


def test_a_closed_or_unopened_sandbox_says_so():
    sandbox = MemorySandbox(Diary())
    with pytest.raises(SandboxError, match="never reset"):
        sandbox.step("a")
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.reset("t")


def test_what_cant_be_copied_is_named():
    class Holder(Diary):
        def reset(self, task, seed=0):
            self.stream = (i for i in range(3))
            return super().reset(task, seed)

    sandbox = MemorySandbox(Holder())
    sandbox.reset("t")
    with pytest.raises(
        SnapshotUnsupported, match=r"its attribute stream \(generator\) fails with TypeError.*fork or replay"
    ):
        sandbox.snapshot()
