import enum
import random
import re
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
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
    left, right = trunk.snapshot().fork(2)
    assert left.step("l").text == "t/0 a l"
    assert trunk.step("b").text == "t/0 a b"
    assert right.step("r").text == "t/0 a r"
    assert left.step("m").text == "t/0 a l m"
    assert trunk.step("c").text == "t/0 a b c"
    assert right.step("s").text == "t/0 a r s"


def test_forks_can_be_snapshot_and_forked_again(world):
    trunk, _ = world
    (fork,) = trunk.snapshot().fork()
    fork.step("f")
    nested_snapshot = fork.snapshot()
    trunk.step("a")
    fork.step("g")
    (nested,) = nested_snapshot.fork()
    assert nested.step("n").text == "t/0 f n"
    assert fork.step("h").text == "t/0 f g h"


def test_a_snapshot_keeps_its_state_however_often_it_is_forked(world):
    trunk, _ = world
    snapshot = trunk.snapshot()
    for word in ("a", "b", "c"):
        trunk.step(word)
        (fork,) = snapshot.fork()
        assert fork.step(word).text == f"t/0 {word}"


def test_a_snapshot_outlives_its_sandbox(world):
    trunk, _ = world
    trunk.step("a")
    snapshot = trunk.snapshot()
    trunk.step("b")
    trunk.close()
    (fork,) = snapshot.fork()
    assert fork.step("f").text == "t/0 a f"


def test_forks_outlive_their_snapshot(world):
    trunk, _ = world
    snapshot = trunk.snapshot()
    (fork,) = snapshot.fork()
    snapshot.release()
    snapshot.release()
    assert fork.step("f").text == "t/0 f"
    with pytest.raises(SandboxError, match="released"):
        snapshot.fork()


def test_the_environment_closes_with_its_last_sandbox_or_snapshot(world):
    trunk, count = world
    snapshot = trunk.snapshot()
    (fork,) = snapshot.fork()
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
    first, second = trunk.snapshot().fork(2)
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
    (fork,) = snapshot.fork()
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
    (fork,) = trunk.snapshot().fork()
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
    (fork,) = trunk.snapshot().fork()
    fork.step("spoil")
    assert trunk.step("a").text == "t/0 a"
    with pytest.raises(SandboxError, match="disk full"):
        fork.step("b")


def test_env_steps_count_a_branchs_own_steps(world):
    trunk, _ = world
    trunk.step("a")
    trunk.step("b")
    (fork,) = trunk.snapshot().fork()
    fork.step("c")
    assert (trunk.env_steps, fork.env_steps) == (2, 1)


def test_branches_may_be_used_from_many_threads_at_once(world):
    trunk, _ = world
    forks = trunk.snapshot().fork(8)

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


class Map:
    """Large and never changed: copies of a world are to share it."""

    def __deepcopy__(self, memo):
        return self


MAP = Map()


class Door(enum.Enum):
    OPEN = 1


class Named:
    """Comes back only with arguments that its pickle doesn't hold."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return (Named, ())

    def __deepcopy__(self, memo):
        return Named(self.name)


class Holder(Diary):
    """Keeps whatever a test puts in, and shows what it is told to evaluate."""

    def __init__(self, **state):
        super().__init__()
        self.__dict__ |= state

    def step(self, action):
        if action.startswith("="):
            return super().step(str(eval(action[1:], globals(), {"self": self})))
        exec(action, globals(), {"self": self})
        return super().step("done")


def held(**state):
    sandbox = MemorySandbox(Holder(**state))
    sandbox.reset("t")
    return sandbox


def last(sandbox, expression):
    return sandbox.step(f"={expression}").text.split(" ", 1)[1].rpartition(" ")[2]


def forked(sandbox):
    snapshot = sandbox.snapshot()
    (fork,) = snapshot.fork()
    return fork


def test_a_copy_keeps_what_is_one_object_one_object():
    shared = ["key"]
    fork = forked(held(inventory=[shared], room={"floor": shared}))
    fork.step("self.inventory[0].append('lamp')")
    assert last(fork, "self.room['floor']==['key','lamp']") == "True"
    assert shared == ["key"]


def test_what_asks_to_be_shared_is_shared():
    sandbox = held(map=MAP, exits=[1])
    fork = forked(sandbox)
    assert last(fork, "self.map is MAP") == "True"
    fork.step("self.exits.append(2)")
    assert last(sandbox, "self.exits") == "[1]"


@pytest.mark.parametrize("odd", [lambda: 1, random.random, Named("a")], ids=["lambda", "method", "bad_pickle"])
def test_what_cant_be_pickled_is_deep_copied(odd):
    sandbox = held(odd=odd, exits=[1])
    fork = forked(sandbox)
    fork.step("self.exits.append(2)")
    assert last(sandbox, "self.exits") == "[1]"
    assert last(fork, "callable(self.odd) or self.odd.name=='a'") == "True"


def test_a_state_may_stop_being_picklable():
    sandbox = held(exits=[1])
    first = sandbox.snapshot()
    sandbox.step("self.odd = lambda: 7")
    fork = forked(sandbox)
    assert last(fork, "self.odd()") == "7"
    (early,) = first.fork()
    assert last(early, "hasattr(self,'odd')") == "False"


def test_usual_state_is_pickled_and_comes_back_the_same():
    """Enumerations, patterns and arrays have a ``__deepcopy__``, which does what pickling does."""
    state = {
        "door": Door.OPEN,
        "pattern": re.compile("a+"),
        "array": np.arange(3),
        "part": Fraction(1, 3),
        "dice": random.Random(4),
        "kind": Map,
    }
    sandbox = held(**state)
    snapshot = sandbox.snapshot()
    assert snapshot.nbytes  # only a pickle knows it
    (fork,) = snapshot.fork()
    checks = (
        "self.door is Door.OPEN",
        "self.pattern.match('aa') and 1",
        "self.array.sum()",
        "self.part",
        "self.kind is Map",
    )
    assert [last(fork, check) for check in checks] == ["True", "1", "3", "1/3", "True"]
    assert last(fork, "self.dice.random()") == last(sandbox, "self.dice.random()") == str(random.Random(4).random())


def test_branches_of_a_pickled_state_differ_like_those_of_a_deep_copied_one():
    """The same random play of both, forks of forks included."""

    def play(**state):
        dice, branches, texts = random.Random(0), [held(numbers=[0], **state)], []
        for _ in range(200):
            branch = dice.choice(branches)
            if dice.random() < 0.2:
                branches += branch.snapshot().fork(2)
            texts.append(branch.step(f"self.numbers[0] = self.numbers[0] * 3 + {dice.randrange(9)}").text)
            texts.append(last(branch, "self.numbers"))
        return texts

    assert play() == play(odd=lambda: 1)
