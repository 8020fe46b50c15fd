"""What counts as a time, a duration, a process number, a temporary name or an address, and what doesn't."""

import pytest

from verl_bpo.sandbox import VOLATILE, SandboxError
from verl_bpo.sandbox.base import Environment, Observation
from verl_bpo.sandbox.replay import ReplaySandbox
from verl_bpo.sandbox.volatile import hide


@pytest.mark.parametrize(
    ("kind", "text", "hidden"),
    [
        ("times", "Mon Nov 30 00:28:42 UTC 2026", "<times>"),
        ("times", "Mon, 30 Nov 2026 00:28:42 +0000", "<times> +0000"),
        ("times", "-rw-r--r-- 1 agent agent 4 Nov 30 00:28 a", "-rw-r--r-- 1 agent agent 4 <times> a"),
        ("times", "-rw-r--r-- 1 agent agent 4 Nov 30  2023 a", "-rw-r--r-- 1 agent agent 4 <times> a"),
        ("times", "2026-11-30T00:28:42.123+00:00 started", "<times> started"),
        ("times", "at 00:28:42,123 and 1796000000.25", "at <times> and <times>"),
        ("times", "1:30, 10:30, 12345 and 1234567890123", "1:30, 10:30, 12345 and 1234567890123"),
        ("durations", "3 passed in 0.12s", "3 passed in <durations>"),
        ("durations", "real 0m0.003s, 12 ms, 3 seconds", "real <durations>, <durations>, <durations>"),
        ("durations", "3 sandboxes, 12 items, 2s3, s", "3 sandboxes, 12 items, 2s3, s"),
        ("pids", "pid 123, PID=7, pid: 8", "<pids>, <pids>, <pids>"),
        ("pids", "[1] 4242\n[1] 5\nline [1] 4242", "<pids>\n<pids>\nline [1] 4242"),
        ("pids", "rapid 5", "rapid 5"),
        ("temp_paths", "/tmp/tmp.Ab3dE6gH9j /tmp/tmpa_b3cd8x/y", "<temp_paths> <temp_paths>/y"),
        ("temp_paths", "/tmp/results /tmp/tmp /testbed/tmpfile123", "/tmp/results /tmp/tmp /testbed/tmpfile123"),
        ("addresses", "<object at 0x7f3c975a5cd0>", "<object at <addresses>>"),
        ("addresses", "0xff 0x12", "0xff 0x12"),
        ("folders", "total 8\ndrwxr-xr-x 2 me us 60 x", "total <folders>\ndrwxr-xr-x <folders> me us <folders> x"),
        ("folders", "-rw-r--r-- 2 me us 60 total 8", "-rw-r--r-- 2 me us 60 total 8"),
    ],
)
def test_a_kind_is_what_it_says(kind, text, hidden):
    assert hide(text, {kind: VOLATILE[kind]}) == hidden


class Ticking(Environment):
    """Says a number that only grows, beside one that the action decides."""

    count = 0
    volatile = {"ticks": r"tick \d+"}

    def reset(self, task, seed=0):
        return self.step("reset")

    def step(self, action):
        type(self).count += 1
        tail = str(type(self).count) if action == "drift" else action
        return Observation(f"tick {type(self).count} {tail}")


def test_replay_goes_by_what_is_declared():
    sandbox = ReplaySandbox(Ticking)
    assert sandbox.reset("t").text == "tick 1 reset"
    assert sandbox.step("a").text == "tick 2 a"  # the policy sees all of it
    (fork,) = sandbox.snapshot().fork()
    assert fork.step("b").text == "tick 5 b"
    sandbox.step("drift")
    (error,) = sandbox.snapshot().fork()
    assert isinstance(error, SandboxError) and "step 2 ('drift') gave another text" in str(error)
