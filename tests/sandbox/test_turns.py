"""Structured turns: tool calls as actions, messages as observations, the prompt row, asynchronous environments."""

import threading

import pytest
from sandbox_worlds import Structured
from test_sandbox_pool import make_pool

from verl_bpo.sandbox import Message, Observation, SandboxError, ToolCall, ToolCalls
from verl_bpo.sandbox.answers import received
from verl_bpo.sandbox.history import Fingerprint


def add(*numbers):
    return ToolCalls(tuple(ToolCall("add", {"n": n}) for n in numbers))


@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize("backend", ["memory", "fork", "replay"])
def test_calls_messages_and_the_row_reach_an_async_world_and_its_forks(backend, isolation):
    with make_pool("Structured", backend=backend, isolation=isolation) as pool, pool.open() as world:
        trunk, first = world.reset("t", 0, {"start": 5})
        assert [(m.role, m.content) for m in first.messages] == [("system", "Add."), ("user", "The sum is 5.")]
        assert first.tools == (Structured.TOOL,)
        assert trunk.step(add(2, 3)).messages == (
            Message("tool", "The sum is 7.", "add"),
            Message("tool", "The sum is 10.", "add"),
        )
        one, other = trunk.snapshot().fork(2)
        assert one.step(add(1)).text == "The sum is 11."
        assert other.step("done") == Observation("You said done.", reward=10.0, terminated=True)
        assert trunk.step(add(7)).text == "The sum is 17."


def test_a_world_whose_process_died_is_rebuilt_from_its_row():
    with make_pool("Structured") as pool, pool.open() as world:
        trunk, _ = world.reset("t", 0, {"start": 5})
        trunk.step(add(1))
        world._worker.stop()
        assert trunk.step(add(1)).text == "The sum is 7."
        assert world.recoveries == 1


def test_async_environments_of_one_process_share_one_thread():
    pool = make_pool("Structured", isolation="none", size=3)
    with pool, pool.open() as a, pool.open() as b, pool.open() as c:
        before = threading.active_count()
        worlds = [world.reset("t")[0] for world in (a, b, c)]
        assert {sandbox.step(add(1)).info["threads"] for sandbox in worlds} <= {before, before + 1}
        assert len({world_of(sandbox).loop for sandbox in worlds}) == 1


def world_of(sandbox):
    return sandbox._world._worker._objects[sandbox._key].shared.environment


def test_the_text_of_messages_is_what_they_say_and_their_roles_count_when_compared():
    user, tool = (Observation(messages=(Message(role, "a"), Message(role, "b"))) for role in ("user", "tool"))
    assert user.text == tool.text == "a\nb"
    assert Fingerprint.of(user, {}) != Fingerprint.of(tool, {})


@pytest.mark.parametrize(
    "make, wrong",
    [
        (lambda: Observation(messages=({"role": "user", "content": "a"},)), "messages"),
        (lambda: received(Observation("a", tools=({"name": "add"},))), "OpenAI's function form"),
    ],
)
def test_what_is_no_message_or_schema_is_told(make, wrong):
    with pytest.raises((TypeError, SandboxError), match=wrong):
        make()
