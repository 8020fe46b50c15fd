"""``verl-bpo check-env``: does an environment keep the contract that trees rely on?

Episodes are played with actions drawn by a seed, and with the expert's where there are any, again and again: in another
instance, in another process, after a restore, from a fork, beside another episode. Every time each turn must look the same.
A check that fails names the first difference, what is likely behind it and what to do. What an environment declares as
``volatile`` is left out of comparisons; where it has a ``digest`` (of its files, say), that is compared too.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl_bpo.commands.environment import add_environment, environment_kwargs
from verl_bpo.sandbox.answers import received
from verl_bpo.sandbox.asynchronous import settled
from verl_bpo.sandbox.base import Environment, Observation, Sandbox, SandboxError, SnapshotUnsupported
from verl_bpo.sandbox.errors import in_a_line
from verl_bpo.sandbox.loading import BACKENDS, list_tasks, load_environment
from verl_bpo.sandbox.memory import MemorySandbox
from verl_bpo.sandbox.tools import Schema, name_of, properties_of
from verl_bpo.sandbox.turns import Action, ToolCall, ToolCalls
from verl_bpo.sandbox.volatile import hide

NONSENSE = ("", "xyzzy", "go [to] <nowhere>\n\\ \x00", "ä" * 300)
"""What a policy may say that no world understands."""
GENERIC = ("look", "help", "wait", "yes", "no", "1", "2", "3")
"""Actions tried where an environment doesn't list its own and has no expert."""
_VALUES = {"integer": (0, 1, 5), "number": (0.5, 2.0), "boolean": (True, False), "array": ([],), "object": ({},)}
"""Arguments of tools that are tried, by their types; texts are ``a``."""
COMMANDS = (
    "ls -la . /tmp",
    "date; date +%s",
    "mktemp",
    "echo $RANDOM $$ > /tmp/number; cat /tmp/number",
    "time sleep 0.01; sleep 1 & jobs -l",
    'python3 -c \'print(hash("a"), set("abc"), object())\'',
    "locale; umask; hostname; id; env | sort",
)
"""Commands tried, beside its own actions, in an environment that is acted in by shell commands."""
APART = 1.1
"""Seconds between two plays that are compared: a clock that counts whole seconds moves."""
PLAIN = (str, int, float, bool, type(None), list, tuple, dict)


class Turn(NamedTuple):
    """What is compared of an observation."""

    text: str
    """Without what is volatile."""
    reward: float
    terminated: bool
    truncated: bool
    actions: tuple[str, ...] | None
    exit_code: int | None


@dataclass(frozen=True)
class Episode:
    """One way to play a task. ``turns`` has one entry more than ``actions``: the first is the reset's."""

    task: str
    kind: str
    """``random`` or ``expert``."""
    actions: list[Action]
    turns: list[Turn]
    digests: list[dict[str, str] | None]
    """Of the environment, at each turn."""


@dataclass
class CheckReport:
    """``findings``: (name of the check, whether it held, detail). ``costs``: median CPU milliseconds, and bytes.
    ``backends``: name -> why its forks aren't exact; empty where they are."""

    findings: list[tuple[str, bool, str]] = field(default_factory=list)
    backends: dict[str, str] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(held for _, held, _ in self.findings)

    def render(self) -> str:
        lines = [f"{'ok' if held else 'NO'}  {name:14} {detail}" for name, held, detail in self.findings]
        lines += [f"    {name:14} {f'no: {why}' if why else 'exact'}" for name, why in self.backends.items()]
        unit = {"snapshot bytes": "bytes"}
        lines += [f"    {name:14} {value:.3g} {unit.get(name, 'ms CPU')}" for name, value in self.costs.items()]
        return "\n".join(lines)


class Difference(Exception):
    """A check failed; the message says where and what to do."""


def check_environment(
    env: str,
    tasks: Sequence[str],
    kwargs: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    max_turns: int = 12,
    backend: str = "memory",
) -> CheckReport:
    """Check an environment on some of its tasks.

    Args:
        env: its name, see :func:`verl_bpo.envs.load_environment`.
        tasks: the more, the more is seen.
        kwargs: the constructor's arguments.
        seed: draws the actions.
        max_turns: most turns of a random episode.
        backend: the one that must be exact; of the others it is only said whether they are.

    Raises:
        EnvironmentUnavailable: it can't be loaded.
    """
    kwargs = kwargs or {}
    return _Checker(env, lambda: load_environment(env)(**kwargs), list(tasks), kwargs, seed, max_turns, backend).run()


class _Checker:
    def __init__(
        self,
        env: str,
        make: Callable[[], Environment],
        tasks: list[str],
        kwargs: dict[str, Any],
        seed: int,
        max_turns: int,
        backend: str,
    ) -> None:
        self.env, self.make, self.tasks, self.kwargs, self.backend = env, make, tasks, kwargs, backend
        self.seed, self.max_turns = seed, max_turns
        self.volatile, self.by_commands = load_environment(env).volatile, load_environment(env).runs_commands
        self.episodes: list[Episode] = []
        self.report = CheckReport()

    def run(self) -> CheckReport:
        if not self._check("contract", self._contract):
            return self.report  # nothing further would mean anything
        self._check("determinism", self._determinism)
        self._check("other process", self._other_process)
        self._check("nonsense", self._nonsense)
        self._check("independence", self._independence)
        if self.backend == "memory" and self._check("restore", self._restore):
            self._check("same twice", self._twice)
            self._check("fork", self._fork)
        if self.backend != "memory":
            self._check(self.backend, lambda: self._exact(self.backend))
        self._check("close", self._close)
        self._compare_backends()
        if self.report.ok:
            self._costs()
        return self.report

    def _compare_backends(self) -> None:
        """Where the environment itself is at fault, no backend is worth a try."""
        failed = {name: detail for name, held, detail in self.report.findings if not held}
        known = {"memory": failed.get("restore", failed.get("same twice", failed.get("fork", "")))}
        if set(failed) - {"restore", "same twice", "fork", self.backend}:
            return
        for name in BACKENDS.built_in():
            why = known.get(name, "") or failed.get(name, "")
            if not why:
                try:
                    self._exact(name)
                except Exception as error:  # whatever a user's class raises is the reason
                    why = in_a_line(error)
            self.report.backends[name] = why

    def _check(self, name: str, check: Callable[[], str]) -> bool:
        try:
            detail, held = check(), True
        except Difference as difference:
            detail, held = str(difference), False
        except Exception as error:  # whatever a user's class raises is the finding
            detail, held = f"{type(error).__name__}: {error}", False
        self.report.findings.append((name, held, detail))
        return held

    # --- playing ----------------------------------------------------------------------------------------------------

    def _contract(self) -> str:
        """Record the episodes that everything else is compared with, looking at each observation."""
        for number, task in enumerate(self.tasks):
            environment = self.make()
            try:
                first = _looked_at(settled(environment.reset(task, self.seed)), f"task {task}, reset")
                if first.done:
                    raise Difference(f"task {task} is over as soon as it is reset: reset must return a state to act in")
                expert = environment.expert_actions()
                self._record(environment, task, "random", None, random.Random(f"{self.seed}/{number}"), first)
                if expert:
                    again = settled(environment.reset(task, self.seed))
                    self._record(environment, task, "expert", expert, random.Random(0), again)
                    self._expert_wins(self.episodes[-1])
            finally:
                environment.close()
        tasks = f"{len(self.tasks)} task{'s' * (len(self.tasks) > 1)}"
        episodes = f"{len(self.episodes)} episode{'s' * (len(self.episodes) > 1)}"
        return f"{episodes} of {tasks}, {sum(len(e.actions) for e in self.episodes)} steps"

    def _record(
        self,
        environment: Environment,
        task: str,
        kind: str,
        actions: Sequence[Action] | None,
        rng: random.Random,
        first: Observation,
    ) -> None:
        observation = first
        episode = Episode(task, kind, [], [self._turn(first)], [environment.digest()])
        while not observation.done and len(episode.actions) < (self.max_turns if actions is None else len(actions)):
            offered = observation.actions or tried(first.tools) or (() if self.by_commands else GENERIC)
            offered += COMMANDS if self.by_commands else ()
            action = rng.choice(offered) if actions is None else actions[len(episode.actions)]
            where = f"task {task}, {kind} episode, turn {len(episode.actions) + 1} ({str(action)!r})"
            observation = _looked_at(settled(environment.step(action)), where)
            episode.actions.append(action)
            episode.turns.append(self._turn(observation))
            episode.digests.append(environment.digest())
        self.episodes.append(episode)

    @staticmethod
    def _expert_wins(episode: Episode) -> None:
        if sum(turn.reward for turn in episode.turns) <= 0:
            raise Difference(
                f"task {episode.task}: expert_actions() earns {sum(t.reward for t in episode.turns)}: they must solve the "
                "task as it was reset, or be None"
            )

    def _replay(self, environment: Environment, episode: Episode, why: str) -> None:
        _same(episode, 0, self._turn(settled(environment.reset(episode.task, self.seed))), why)
        for number, action in enumerate(episode.actions, 1):
            _same(episode, number, self._turn(settled(environment.step(action))), why)

    def _turn(self, observation: Observation) -> Turn:
        return _turn(observation, self.volatile)

    # --- checks -----------------------------------------------------------------------------------------------------

    def _determinism(self) -> str:
        why = (
            "the same actions gave something else: draw chance from reset's seed, keep no state between resets, or declare "
            "what may differ as volatile"
        )
        environment = self.make()
        try:
            for episode in self.episodes:
                self._replay(environment, episode, f"in a second instance {why}")
            for episode in reversed(self.episodes):
                self._replay(environment, episode, f"after other episodes in the same instance {why}")
        finally:
            environment.close()
        return "equal in a second instance, and in one instance after other episodes"

    def _other_process(self) -> str:
        """String hashes differ there, and so does the clock: what hangs on them shows."""
        job = {
            "env": self.env,
            "kwargs": self.kwargs,
            "seed": self.seed,
            "episodes": [[episode.task, list(map(_plain, episode.actions))] for episode in self.episodes],
        }
        environment = {**os.environ, "PYTHONHASHSEED": "7"}
        done = subprocess.run(
            [sys.executable, "-m", "verl_bpo.commands.check_env"],
            input=json.dumps(job),
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise Difference(f"it can't be played in a new process: {done.stderr.strip().splitlines()[-1]}")
        traces = json.loads(done.stdout.splitlines()[-1])
        why = (
            "in another process the same actions gave something else: sort what comes out of sets, and read no clock, "
            "process number or environment variable"
        )
        for episode, turns in zip(self.episodes, traces):
            for number, turn in enumerate(turns):
                _same(episode, number, _untuple(turn), why)
        return "equal under another hash seed"

    def _nonsense(self) -> str:
        environment = self.make()
        try:
            for action in NONSENSE:
                settled(environment.reset(self.tasks[0], self.seed))
                try:
                    observation = settled(environment.step(action))
                except Exception as error:
                    raise Difference(
                        f"step({action!r}) raised {type(error).__name__}: {error}. A policy says such things: answer in "
                        "the observation's text"
                    ) from error
                _looked_at(observation, f"step({action!r})")
        finally:
            environment.close()
        return "answered"

    def _restore(self) -> str:
        """Save at every turn; later, go back to each in a shuffled order and play on from there."""
        for number, episode in enumerate(self.episodes):
            sandbox = MemorySandbox(self.make())
            snapshots, branches = [], []
            try:
                sandbox.reset(episode.task, self.seed)
                for action in episode.actions:
                    snapshots.append(sandbox.snapshot())
                    sandbox.step(action)
                order = random.Random(number).sample(range(len(snapshots)), len(snapshots))
                for start in [*order, *order[:2]]:  # a snapshot serves more than once
                    (branch,) = _opened(snapshots[start].fork())
                    branches.append(branch)
                    why = (
                        f"restored to turn {start}, it went on differently: save_state must hold all that step reads or "
                        "changes, and nothing that a later step changes in place"
                    )
                    for turn in range(start, len(episode.actions)):
                        _same(episode, turn + 1, self._turn(branch.step(episode.actions[turn])), why)
            except SnapshotUnsupported as error:
                raise Difference(f"no snapshots: {error}") from error
            finally:
                _let_go([*snapshots, sandbox, *branches])
        return "every turn of every episode, in any order, more than once"

    def _twice(self) -> str:
        """Each episode twice from one snapshot, and what it leaves after every turn compared with the recording."""
        hidden: Counter[str] = Counter()
        started = [MemorySandbox(self.make()) for _ in self.episodes]
        held: list[Any] = []
        try:
            for sandbox, episode in zip(started, self.episodes):
                sandbox.reset(episode.task, self.seed)
                held.append(sandbox.snapshot())
            snapshots = list(held)
            for again in (False, True):
                for snapshot, episode in zip(snapshots, self.episodes):
                    (branch,) = _opened(snapshot.fork())
                    held.append(branch)
                    for number, action in enumerate(episode.actions, 1):
                        if again and number == len(episode.actions) // 2:  # what a snapshot loses shows here
                            held.append(branch.snapshot())
                            (branch,) = _opened(held[-1].fork())
                            held.append(branch)
                        observation = branch.step(action)
                        why = "played again from a snapshot it went on differently: draw chance from reset's seed"
                        _same(
                            episode, number, self._turn(observation), f"{why}, or declare what may differ as volatile"
                        )
                        _same_state(episode, number, branch.digest(), why)
                        for kind, pattern in self.volatile.items():
                            hidden[kind] += len(re.findall(pattern, observation.text))
                if not again:
                    time.sleep(APART)
        finally:
            _let_go([*started, *held])
        state = ", and so is what they leave behind after every turn" if self.episodes[0].digests[0] is not None else ""
        left_out = ", ".join(f"{count} {kind}" for kind, count in hidden.items() if count)
        return f"two plays of each episode {APART} s apart are equal{state}" + (
            f" (left out as volatile: {left_out})" if left_out else ""
        )

    def _fork(self) -> str:
        """Two forks and their origin take turns; a fork of a fork goes on alone."""
        for episode in self.episodes:
            middle = len(episode.actions) // 2
            held: list[Any] = []
            try:
                origin = MemorySandbox(self.make())
                held.append(origin)
                origin.reset(episode.task, self.seed)
                for action in episode.actions[:middle]:
                    origin.step(action)
                snapshot = origin.snapshot()
                held.append(snapshot)
                forks = _opened(snapshot.fork(2))
                held += forks
                why = "branches of one state must not feel each other: they share something that a step changes"
                for turn in range(middle, len(episode.actions)):
                    for branch in (origin, *forks):
                        _same(episode, turn + 1, self._turn(branch.step(episode.actions[turn])), why)
                (first,) = _opened(snapshot.fork())
                held.append(first)
                inner = first.snapshot()
                held.append(inner)
                held += (nested := _opened(inner.fork()))
                for turn in range(middle, len(episode.actions)):
                    turned = self._turn(nested[0].step(episode.actions[turn]))
                    _same(episode, turn + 1, turned, f"in a fork of a fork: {why}")
            finally:
                _let_go(held)
        return "forks, their origin and forks of forks go on alike and apart"

    def _exact(self, backend: str) -> str:
        """Two forks from the middle of each episode, their origin and a fork of a fork take turns, by the backend itself."""
        why = f"with bpo.env.backend={backend} a fork went on differently"
        started = BACKENDS.load(backend)(self.env, self.kwargs)
        try:
            for episode in self.episodes:
                middle, held = len(episode.actions) // 2, []
                try:
                    held.append(origin := started.sandbox())
                    _same(episode, 0, self._turn(received(origin.reset(episode.task, self.seed))), why)
                    for number in range(middle):
                        _same(episode, number + 1, self._turn(origin.step(episode.actions[number])), why)
                    held.append(snapshot := origin.snapshot())
                    held += (branches := _opened(snapshot.fork(2)))
                    held.append(inner := branches[0].snapshot())
                    held += (nested := _opened(inner.fork()))
                    for number in range(middle, len(episode.actions)):
                        for branch in (origin, *branches, *nested):
                            _same(episode, number + 1, self._turn(branch.step(episode.actions[number])), why)
                finally:
                    _let_go(held)
        finally:
            started.clear()
            started.close()
        return "forks, their origin and forks of forks go on alike and apart"

    def _independence(self) -> str:
        """All episodes at once in instances of their own, one turn of each after the other."""
        why = "beside other episodes in the same process it went differently: instances share something that a step changes"
        environments = [self.make() for _ in self.episodes]
        try:
            for environment, episode in zip(environments, self.episodes):
                _same(episode, 0, self._turn(settled(environment.reset(episode.task, self.seed))), why)
            for number in range(max(len(episode.actions) for episode in self.episodes)):
                for environment, episode in zip(environments, self.episodes):
                    if number < len(episode.actions):
                        _same(episode, number + 1, self._turn(settled(environment.step(episode.actions[number]))), why)
        finally:
            for environment in environments:
                environment.close()
        return f"{len(environments)} at once"

    def _close(self) -> str:
        def once() -> None:
            environment = self.make()
            settled(environment.reset(self.tasks[0], self.seed))
            settled(environment.step(self.episodes[0].actions[0]))
            environment.close()

        once()  # libraries open what they keep
        before = _held()
        for _ in range(3):
            once()
        gc.collect()
        for name, count in _held().items():
            if count > before[name]:
                raise Difference(
                    f"three episodes left {count - before[name]} {name} behind: close() must free what reset opened"
                )
        return "no file, thread or process left"

    # --- costs ------------------------------------------------------------------------------------------------------

    def _costs(self) -> None:
        samples: dict[str, list[float]] = {"reset": [], "step": [], "save": [], "load": []}
        sandbox = MemorySandbox(self.make())
        world, saves = sandbox.shared, not self.report.backends["memory"]
        try:
            for episode in self.episodes:
                _timed(samples["reset"], world.environment.reset, episode.task, self.seed)
                for action in episode.actions:
                    if saves:
                        saved = _timed(samples["save"], world.save)  # a copy, where the environment has no save_state
                        _timed(samples["load"], world.load, saved)
                    _timed(samples["step"], world.environment.step, action)
        finally:
            sandbox.close()
        self.report.costs = {name: statistics.median(values) for name, values in samples.items() if values}
        if saves:
            self.report.costs["snapshot bytes"] = self._snapshot_bytes()

    def _snapshot_bytes(self, count: int = 50) -> float:
        """What one more snapshot of one state adds, so that what snapshots share isn't counted."""
        sandbox = MemorySandbox(self.make())
        try:
            episode = max(self.episodes, key=lambda e: len(e.actions))
            sandbox.reset(episode.task, self.seed)
            for action in episode.actions[:-1]:
                sandbox.step(action)
            world = sandbox.shared
            kept = [world.save()]
            tracemalloc.start()
            start = tracemalloc.get_traced_memory()[0]
            kept += [world.save() for _ in range(count)]
            return (tracemalloc.get_traced_memory()[0] - start) / count
        finally:
            tracemalloc.stop()
            sandbox.close()


def tried(tools: Sequence[Schema]) -> tuple[Action, ...]:
    """What to try where there are tools: right calls, by what their schemas say of the arguments, wrong ones, two at once,
    and an answer without a call."""
    calls = []
    for tool in tools:
        values = [
            [(name, value) for value in kind.get("enum") or _VALUES.get(kind.get("type"), ("a",))]
            for name, kind in properties_of(tool).items()
        ]
        longest = max(map(len, values), default=1)
        for number in range(longest):
            calls.append(ToolCall(name_of(tool), dict(each[number % len(each)] for each in values)))
        calls.append(ToolCall(name_of(tool), {"no such argument": 1}))
    if not calls:
        return ()
    calls.append(ToolCall("no_such_tool", {}))
    return (*(ToolCalls((call,)) for call in calls), ToolCalls(tuple(calls[:2])), "That is all.")


def _plain(action: Action) -> Any:
    return action if isinstance(action, str) else [[call.name, dict(call.arguments)] for call in action.calls]


def _unplain(action: Any) -> Action:
    return action if isinstance(action, str) else ToolCalls(tuple(ToolCall(*call) for call in action))


def _looked_at(observation: Any, where: str) -> Observation:
    """The observation, if it is one as the protocol describes."""

    def demand(holds: bool, what: str) -> None:
        if not holds:
            raise Difference(f"{where}: {what}")

    demand(isinstance(observation, Observation), f"returned {type(observation).__name__}, not an Observation")
    demand(isinstance(observation.text, str), f"text is {type(observation.text).__name__}, not str")
    demand(
        isinstance(observation.reward, (int, float)) and math.isfinite(observation.reward),
        f"reward={observation.reward!r} is no finite number",
    )
    for name in ("terminated", "truncated"):
        demand(isinstance(getattr(observation, name), bool), f"{name}={getattr(observation, name)!r} is no bool")
    actions = observation.actions
    demand(
        actions is None or (isinstance(actions, tuple) and all(isinstance(action, str) for action in actions)),
        f"actions={actions!r} is neither None nor a tuple of str",
    )
    for key, value in observation.info.items():
        demand(
            isinstance(value, PLAIN), f"info[{key!r}] is a {type(value).__name__}: give plain values, they are logged"
        )
    return observation


def _turn(observation: Observation, volatile: Mapping[str, str]) -> Turn:
    return Turn(
        hide(observation.text, volatile),
        float(observation.reward),
        observation.terminated,
        observation.truncated,
        observation.actions,
        observation.info.get("exit_code"),
    )


def _untuple(turn: list) -> Turn:
    *rest, actions, exit_code = turn
    return Turn(*rest, None if actions is None else tuple(actions), exit_code)


def _same(episode: Episode, number: int, turn: Turn, why: str) -> None:
    expected = episode.turns[number]
    for name, was, now in zip(Turn._fields, expected, turn):
        if was != now:
            raise Difference(f"{_place(episode, number)}: {name.replace('_', ' ')} {_apart(was, now)}; {why}")


def _same_state(episode: Episode, number: int, digest: dict[str, str] | None, why: str) -> None:
    was, now = episode.digests[number] or {}, digest or {}
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            how = "is there only now" if name not in was else "is gone" if name not in now else "is another"
            raise Difference(f"{_place(episode, number)}: {name} {how} afterwards; {why}")


def _place(episode: Episode, number: int) -> str:
    before = f"turn {number} ({str(episode.actions[number - 1])!r})" if number else "reset"
    return f"task {episode.task}, {episode.kind} episode, {before}"


def _let_go(held: Sequence[Any]) -> None:
    """Close sandboxes and release snapshots, the last first."""
    for thing in reversed(held):
        thing.close() if isinstance(thing, Sandbox) else thing.release()


def _apart(was: Any, now: Any) -> str:
    """Two values around their first difference."""
    if isinstance(was, str) and isinstance(now, str):
        start = next((i for i, (a, b) in enumerate(zip(was, now)) if a != b), min(len(was), len(now)))
        cut = max(0, start - 15)
        return f"{was[cut : start + 40]!r} became {now[cut : start + 40]!r} at character {start}"
    if isinstance(was, tuple) and isinstance(now, tuple):
        gone, new = [a for a in was if a not in now], [a for a in now if a not in was]
        return f"lost {gone[:3]}, gained {new[:3]}" if gone or new else "changed their order"
    return f"{was!r} became {now!r}"


def _opened(forks: list) -> list:
    for fork in forks:
        if isinstance(fork, Exception):
            raise fork
    return forks


def _held() -> dict[str, int]:
    """What this process holds of the system."""
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return {
        "open files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "threads": threading.active_count(),
        "processes": sum(map(len, children)),
    }


def _timed(samples: list[float], call: Callable, *arguments: Any) -> Any:
    start = time.process_time()
    result = settled(call(*arguments))
    samples.append(1e3 * (time.process_time() - start))
    return result


def _play_job() -> None:
    """The other process: plays the episodes of stdin and prints their turns as JSON."""
    job = json.load(sys.stdin)
    environment = load_environment(job["env"])(**job["kwargs"])
    volatile, traces = environment.volatile, []
    for task, actions in job["episodes"]:
        turns = [_turn(settled(environment.reset(task, job["seed"])), volatile)]
        traces.append([*turns, *(_turn(settled(environment.step(_unplain(action))), volatile) for action in actions)])
    environment.close()
    print(json.dumps(traces))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_environment(parser)
    parser.add_argument("--tasks", type=int, default=3, help="tasks to play (default 3)")
    parser.add_argument(
        "--backend",
        default="memory",
        choices=list(BACKENDS.built_in()),
        help="the one that must be exact (default memory)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Exit status: 0 when every check held."""
    kwargs = environment_kwargs(arguments)
    options = {**kwargs, **({"root": arguments.root} if arguments.root else {})}
    tasks = list_tasks(arguments.env, arguments.split, **options)
    if not tasks:
        raise SandboxError(f"environment {arguments.env} has no tasks in split {arguments.split!r}")
    step = max(1, len(tasks) // arguments.tasks)  # spread over the split, which may go by kind
    report = check_environment(arguments.env, tasks[::step][: arguments.tasks], kwargs, backend=arguments.backend)
    print(report.render())
    return 0 if report.ok else 1


if __name__ == "__main__":
    argparse.ArgumentParser(description=_play_job.__doc__).parse_args()
    _play_job()
