"""Worlds that attack who asks them. With pickled answers, as they once were, the first three ran the attack here."""

import contextlib
import os
import pickle
import stat
import struct
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sandbox_pool import make_pool

from verl_bpo.sandbox import Environment, Observation, SandboxError
from verl_bpo.sandbox.answers import failure, read_answer, success
from verl_bpo.shells.keeper.line import pack, unpack


class Attack:
    """Runs a command where it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class Forger(Environment):
    """Writes answers of its own to the line, before the one that it is asked for."""

    def reset(self, task, seed=0):
        self.mark = task
        return Observation("ready")

    def step(self, action):
        if action == "info":
            return Observation("ok", info={"thing": Attack(f"touch {self.mark}")})
        forged = action.encode() + pickle.dumps(Attack(f"touch {self.mark}"))
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            try:
                if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.write(descriptor, struct.pack("!I", len(forged)) + forged)
            except OSError:
                pass
        return Observation("ok")


@pytest.mark.parametrize("backend", ["memory", "fork"])
@pytest.mark.parametrize("action", ["", ".", "info"])
def test_an_answer_that_would_run_a_command_runs_none_and_loses_its_branch(backend, action, tmp_path):
    mark = tmp_path / "ran"
    with make_pool("", backend=backend) as pool:
        pool._spec = (f"{__file__}:Forger", {}, backend)
        with pool.open() as world:
            sandbox, _ = world.reset(str(mark))
            with pytest.raises(SandboxError, match="can't be read|plain values|out of turn"):
                sandbox.step(action)
            assert not mark.exists()
            again, seen = world.reset(str(mark))
            assert seen.text == "ready", "the answer that came late isn't taken for this one"


ANSWERS = [
    ("step", b""),
    ("step", pickle.dumps(Observation("ok"))),
    ("step", success(3)),
    ("step", success(None)),
    ("step", msgpack.packb(("ok",))),
    ("step", msgpack.packb(("ok", 1, 2))),
    ("step", msgpack.packb({"ok": 1})),
    ("step", msgpack.packb(("ok", msgpack.ExtType(1, msgpack.packb(("text",)) + b"more")))),
    ("step", msgpack.packb(("ok", msgpack.ExtType(1, msgpack.packb((b"text",)))))),
    ("step", msgpack.packb(("ok", msgpack.ExtType(1, msgpack.packb(("t", float("nan"))))))),
    ("step", msgpack.packb(("ok", msgpack.ExtType(1, msgpack.packb([0] * 9))))),
    ("step", msgpack.packb(("ok", msgpack.ExtType(2, b"")))),
    ("step", b"\x92\xa2ok\xa3\xed\xa0\xbd"),  # half a pair of characters
    ("step", b"\x91" * 100_000),
    ("step", b"\xdd\xff\xff\xff\xff"),
    ("step", msgpack.packb(("error", "Nothing", "text"))),
    ("step", msgpack.packb(("error", "SystemExit", 3))),
    ("step", msgpack.packb(("error", "SandboxError"))),
    ("snapshot", success(-1)),
    ("snapshot", success(True)),
    ("fork", success(3)),
    ("fork", success(([1, "x"], 0))),
    ("fork", success(([["Nothing", "x"]], 0))),
    ("open", success({"a": 1})),
    ("clear", success("done")),
]


@pytest.mark.parametrize("operation, data", ANSWERS)
def test_a_forged_answer_costs_one_branch_and_one_line(operation, data):
    with pytest.raises(SandboxError, match=f"the answer to {operation} can't be read") as error:
        read_answer(data, operation)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@given(st.binary(max_size=200))
def test_whatever_bytes_come_are_an_answer_or_an_error_of_one_branch(data):
    for whole in (data, msgpack.packb(("ok", 1))[:-1] + data, msgpack.packb(("ok", msgpack.ExtType(1, data)))):
        for operation in ("step", "fork", "open"):
            with contextlib.suppress(SandboxError):
                read_answer(whole, operation)


def test_an_errors_text_is_bounded_and_can_be_printed():
    with pytest.raises(SandboxError) as error:
        read_answer(failure(ValueError("\ud800" + "x" * 1_000_000)), "step")
    assert len(str(error.value)) < 2100 and str(error.value).encode()


def test_what_a_shells_keeper_says_is_read_as_data(tmp_path):
    mark = tmp_path / "ran"
    body = pickle.dumps(Attack(f"touch {mark}"))
    message = pack(["ok", None], body)
    assert unpack(reader(message)) == (["ok", None], body)
    with pytest.raises(ValueError):
        unpack(reader(struct.pack("!II", len(body), 0) + body))
    assert not mark.exists()


def reader(message):
    rest = [message]

    def read(count):
        part, rest[0] = rest[0][:count], rest[0][count:]
        return part

    return read


def test_no_module_that_reads_from_a_world_unpickles():
    """Requests are unpickled in the world's own process alone; :mod:`verl_bpo.sandbox.memory` keeps a world's own copies."""
    root = Path(__file__).parents[2] / "verl_bpo"
    found = {
        str(file.relative_to(root)): file.read_text().count("pickle.load")
        for room in ("sandbox", "shells", "generation")
        for file in (root / room).rglob("*.py")
        if "pickle.load" in file.read_text()
    }
    assert found == {"sandbox/process.py": 1, "sandbox/fork.py": 1, "sandbox/memory.py": 1}
