"""Sandboxes in Ray actors: a real local Ray, real processes. What holds for local pools must hold here."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from verl_bpo.config.worlds import EnvConfig, PlacementConfig
from verl_bpo.integration.ray_workers import PlacedPools
from verl_bpo.sandbox import SandboxCrashed, SandboxError, SandboxTimeout
from verl_bpo.sandbox.loading import EnvironmentUnavailable

REPOSITORY = Path(__file__).resolve().parents[2]
WORLDS = REPOSITORY / "tests/sandbox/sandbox_worlds.py"
HOSTILE = f"{WORLDS}:Hostile"

_spec = importlib.util.spec_from_file_location("sandbox_pool_tests", REPOSITORY / "tests/sandbox/test_sandbox_pool.py")
local = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(local)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    context = ray.init(
        num_cpus=4, resources={"sandbox": 4}, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20
    )
    yield context.address_info["address"]
    ray.shutdown()


def make_pools(workers=2, step_timeout=30.0, backend="memory", **placement):
    placement = {"where": "ray", "num_cpus": 0.1, "resources": {"sandbox": 1}, "start_timeout": 60.0, **placement}
    return PlacedPools(
        EnvConfig(workers=workers, step_timeout=step_timeout, backend=backend, placement=PlacementConfig(**placement))
    )


@pytest.fixture
def pools():
    pools = make_pools()
    yield pools
    pools.close()


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def actor_process(pools, number=0):
    """Of one of the actors: the process that its worlds' guards are children of."""
    with pools[HOSTILE].open() as world:
        return parent(parent(local.pid_of(world.reset("t")[0])))


def free_places():
    """Of the cluster's custom resource, once it has noticed what ended."""
    deadline = time.monotonic() + 15
    while (free := ray.available_resources().get("sandbox", 0)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    return free


@pytest.mark.parametrize("backend", ["memory", "fork"])
def test_branches_are_independent(backend):
    pools = make_pools(backend=backend)
    with pools[f"{WORLDS}:SavingDiary"].open() as world:
        trunk, first = world.reset("t", 3)
        assert first.text == "t/3"
        trunk.step("a")
        snapshot = trunk.snapshot()
        assert trunk.step("b").text == "t/3 a b"
        left, right = snapshot.fork(2)
        assert (left.step("l").text, right.step("r").text) == ("t/3 a l", "t/3 a r")
        (nested,) = right.snapshot().fork()
        assert nested.step("n").text == "t/3 a r n"
        assert world.recoveries == 0
    pools.close()
    assert free_places() == 4


@pytest.mark.parametrize(
    ("action", "error", "message", "recoveries"),
    [
        ("raise", SandboxError, "ValueError: the wall fell down", 0),
        ("unpicklable", SandboxError, r"info\['thing'\] is Unpicklable.*plain values", 0),
        ("exit", SandboxCrashed, "step: exit code 3", 1),
        ("hang_in_c", SandboxTimeout, "step took longer than 1 s", 1),
    ],
)
def test_a_failure_loses_its_branch_and_the_others_go_on(pools, action, error, message, recoveries):
    pool = pools[HOSTILE]
    with pool.open() as world:
        trunk, _ = world.reset("t")
        trunk.step("a")
        snapshot = trunk.snapshot()
        first, second = snapshot.fork(2)
        pool.step_timeout = 1
        with pytest.raises(error, match=message):
            first.step(action)
        pool.step_timeout = 30
        assert second.step("t").text == "t/0 a t"
        assert trunk.step("b").text == "t/0 a b"
        assert snapshot.fork(1)[0].step("c").text == "t/0 a c"
        assert world.recoveries == recoveries


def test_a_process_or_an_actor_killed_between_calls_loses_nothing(pools):
    actor = actor_process(pools)
    with pools[HOSTILE].open() as world:
        clean, _ = world.reset("t")
        clean.step("c")
        probe, _ = world.reset("t")
        for number, victim in enumerate((local.pid_of(probe), actor)):
            os.kill(victim, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while world._worker.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert clean.step(f"d{number}").text.endswith(f"d{number}")
            assert world.recoveries == number + 1


def test_an_actor_that_dies_during_calls_loses_one_branch_of_each_world_and_is_replaced(pools):
    actor = actor_process(pools)
    with pools[HOSTILE].open() as one, pools[HOSTILE].open() as two, ThreadPoolExecutor(2) as threads:
        kept = [world.reset("t")[0] for world in (one, two)]
        lost = [world.reset("t")[0] for world in (one, two)]
        processes = [local.pid_of(branch) for branch in (world.reset("t")[0] for world in (one, two))]
        threading.Timer(0.5, os.kill, (actor, signal.SIGKILL)).start()
        for failure in [threads.submit(branch.step, "hang") for branch in lost]:
            with pytest.raises(SandboxCrashed, match="actor died during step"):
                failure.result(timeout=30)
        assert local.wait_until_gone(processes) == []
        assert [branch.step("a").text for branch in kept] == ["t/0 a"] * 2
        assert (one.recoveries, two.recoveries) == (1, 1)
    assert actor_process(pools) != actor


def test_an_actor_that_answers_nothing_is_given_up(pools, monkeypatch):
    monkeypatch.setattr("verl_bpo.integration.ray_workers._GRACE", 1.0)
    actor = actor_process(pools)
    with pools[HOSTILE].open() as world:
        branch, _ = world.reset("t")
        lost, _ = world.reset("t")
        pools[HOSTILE].step_timeout = 1.0
        os.kill(actor, signal.SIGSTOP)
        with pytest.raises(SandboxTimeout, match="gave no answer in 2 s"):
            lost.step("a")
        pools[HOSTILE].step_timeout = 30.0
        assert branch.step("b").text == "t/0 b"
        assert world.recoveries == 1
    with contextlib.suppress(ProcessLookupError):  # Ray may have ended it frozen as it is
        os.kill(actor, signal.SIGCONT)
    assert local.wait_until_gone([actor]) == []


def test_no_more_worlds_than_workers_and_no_more_actors_than_needed():
    pools = make_pools(workers=3, worlds=2)
    pool = pools[HOSTILE]
    worlds = [pool.open() for _ in range(3)]
    assert free_places_now() == 2
    with ThreadPoolExecutor(1) as threads:
        fourth = threads.submit(pool.open)
        time.sleep(0.3)
        assert not fourth.done()
        worlds[0].close()
        fourth.result(timeout=20).close()
    pools.close()  # two worlds are open still
    assert free_places() == 4


def free_places_now():
    deadline = time.monotonic() + 5  # Ray's own report lags
    while (free := ray.available_resources().get("sandbox", 0)) > 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    return free


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            {"resources": {"gpu_free": 1}},
            r"\(CPU=0.1, gpu_free=1\) in 1 s: none of 1 nodes is large enough.*gpu_free=0",
        ),
        ({"resources": {"sandbox": 3}, "worlds": 1}, "in 1 s: 1 of 1 nodes are large enough but full; 1 such actors"),
    ],
)
def test_what_cant_be_placed_is_told_in_time(placement, message):
    pools = make_pools(workers=2, **{"start_timeout": 60.0, **placement})
    try:
        if "worlds" in placement:
            pools[HOSTILE].open()  # takes the only place
        short = pools._make_worker.placement.model_copy(update={"start_timeout": 1.0})
        pools._make_worker.placement = short
        started = time.monotonic()
        with pytest.raises(EnvironmentUnavailable, match=message) as raised:
            pools[HOSTILE].open()
        assert time.monotonic() - started < 5 and "\n" not in str(raised.value)
    finally:
        pools.close()
    assert free_places() == 4


def test_an_environment_that_isnt_there_is_told():
    pools = make_pools()
    with pytest.raises(EnvironmentUnavailable, match="no class Nothing"):
        pools[f"{WORLDS}:Nothing"].open()
    pools.close()


def test_waiting_sandboxes_dont_hold_up_an_event_loop(pools):
    async def ticks():
        loop, count = asyncio.get_running_loop(), 0
        with ThreadPoolExecutor(2) as threads:
            world = await loop.run_in_executor(threads, pools[HOSTILE].open)
            sandbox, _ = await loop.run_in_executor(threads, world.reset, "t")
            pools[HOSTILE].step_timeout = 1
            stuck = loop.run_in_executor(threads, sandbox.step, "hang")
            while not stuck.done():
                await asyncio.sleep(0.01)
                count += 1
            with pytest.raises(SandboxTimeout):
                await stuck
            await loop.run_in_executor(threads, world.close)
        return count

    assert asyncio.run(ticks()) > 20


SCRIPT = f"""
import sys, threading, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
from verl_bpo.config.worlds import EnvConfig, PlacementConfig
from verl_bpo.integration.ray_workers import PlacedPools
placement = PlacementConfig(where="ray", num_cpus=0.1, resources={{"sandbox": 1}})
pool = PlacedPools(EnvConfig(workers=2, placement=placement))[{HOSTILE!r}]
for action in ("a", "hang_in_c"):
    sandbox, _ = pool.open().reset("t")
    print(sandbox.step("pid").text, flush=True)
    if action != "a":
        threading.Thread(target=sandbox.step, args=(action,), daemon=True).start()
time.sleep(0.3)
print("ready", flush=True)
time.sleep(1000)
"""


def test_nothing_outlives_the_process_that_asked_for_it(cluster):
    owner = subprocess.Popen([sys.executable, "-c", SCRIPT, cluster], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    lines = [owner.stdout.readline().strip() for _ in range(3)]
    assert lines[2] == "ready"
    pids = [int(line) for line in lines[:2]]
    assert all(map(local.runs, pids))
    owner.kill()
    owner.wait(timeout=20)
    owner.stdout.close()
    assert local.wait_until_gone(pids, seconds=20) == []
    assert free_places() == 4
