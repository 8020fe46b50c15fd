"""Rolling one tree: sandboxes, generation and branching, asynchronously. No verl, no Ray.

The trunk goes on while its forks run. Trajectories have the budget in the order of their numbers, whichever runs faster:
only the first that still runs may branch, those behind it keep the points that they chose until it is their turn. So the
same actions in the same places give the same tree. Every sandbox is closed whatever happens; a sandbox that crashes, hangs
or lies loses its own branch and is counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol, TypeVar

from verl_bpo.sandbox.base import (
    NoTaskCanWork,
    Observation,
    PromptTooLong,
    Row,
    Sandbox,
    SandboxError,
    SandboxTimeout,
    Snapshot,
    TaskError,
)
from verl_bpo.sandbox.history import Fingerprint
from verl_bpo.sandbox.turns import Action
from verl_bpo.tree.branching import Branching
from verl_bpo.tree.budget import Budget
from verl_bpo.tree.prompting import Conversation, Prompter
from verl_bpo.tree.selectors import Choosing, DecisionPoint, NoBranching, Ranking
from verl_bpo.tree.states import StateId
from verl_bpo.tree.topology import ROOT, Failure, Node, Tree

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Generation:
    """One sampled action. Lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    entropy: list[float]
    cached_tokens: int = 0
    prefill_tokens: int = 0
    weights_version: int | None = None
    state_value: float | None = None
    """V of the state before the action, where the engine has a value readout."""


Generate = Callable[[list[int], int, str], Awaitable[Generation]]
"""(prompt ids, most tokens to sample, "trajectory/depth" of the action in its tree) -> the sampled action."""


class World(Protocol):
    """One tree's world: opens root sandboxes. ``recoveries`` counts worlds rebuilt after a crash, ``replayed_steps`` what was
    executed again to get back to a state."""

    recoveries: int
    replayed_steps: int
    volatile: Mapping[str, str]
    """What observations of one state may differ in."""

    def reset(self, task: str, seed: int = 0, row: Row | None = None) -> tuple[Sandbox, Observation]: ...


@dataclass
class _Point:
    """A decision point kept for forking: everything needed to act there again."""

    seen: DecisionPoint
    snapshot: Snapshot | None
    """None in the initial state, which is opened anew."""
    state: StateId
    conversation: Conversation
    admissible: tuple[str, ...] | None
    info: dict[str, Any]
    """What the world last said of itself."""


@dataclass
class _Life:
    """What a trajectory holds of the world, and how to come there again."""

    sandbox: Sandbox
    since: Snapshot | None
    """The last snapshot; None: the initial state, in which ``first`` was seen."""
    first: Fingerprint | None
    retries: int
    played: list[tuple[Action, Fingerprint]] = field(default_factory=list)
    """Actions since then, and what the world answered."""
    earlier: int = 0
    """Steps of the trajectory's own that other sandboxes took."""

    def __post_init__(self) -> None:
        self.start = self.sandbox.env_steps

    @property
    def steps(self) -> int:
        """The trajectory's own steps; those of a try that failed and was made good are not among them."""
        return self.earlier + self.sandbox.env_steps - self.start


@dataclass
class TreeRollout:
    """Rolls one tree of one task. Use once."""

    generate: Generate
    world: World
    executor: Executor
    prompter: Prompter
    branch: Branching
    budget: Budget
    max_prompt_tokens: int
    max_response_tokens: int
    fill: bool = True
    """Whether what branching leaves over goes to further root samples."""
    least_forks: int = 2
    """Fewest forks of one branch point: 2 where the trunk is no sibling to compare a lone one with."""
    digests: bool = False
    """Whether every state's digest is asked for: with it two states are told apart that look alike."""
    retries: int = 0
    """Times that a trajectory whose world failed is brought back to where it was, and goes on."""
    chance: Callable[[str], float] = lambda place: random.random()
    """Place of a decision point -> the number in [0, 1) that selectors which branch at random go by."""

    def __post_init__(self) -> None:
        self.tree = Tree(prompt_ids=[])
        self.counters: Counter[str] = Counter()
        self.points: list[_Point] = []
        """Those that a ranking selector may still choose."""
        self.nesting: dict[int, int] = {}
        self._first = 0
        """Number of the first trajectory that still runs, the only one that may branch now."""
        self._chosen: dict[int, list[_Point]] = defaultdict(list)
        """By trajectory: points to fork once it is the first."""
        self._ended: dict[int, tuple[int, int, int]] = {}
        """By trajectory: what to settle of it once it is the first."""
        self.versions: set[int] = set()
        self._open: set[Sandbox] = set()
        self._snapshots: list[Snapshot] = []
        self._tasks: set[asyncio.Task] = set()
        self._calls: set[Future] = set()
        self._hangs = False
        """Whether a hang has come back when its step was taken again: no further one is waited for twice."""
        self._hang = asyncio.Lock()
        """Held by the one that is waited for again."""

    async def run(self, task: str, seed: int = 0, row: Row | None = None) -> Tree:
        """Roll the tree.

        Args:
            row: the prompt row, for environments that take it.

        Returns:
            The tree; trajectories lost to a sandbox failure, or to a first prompt that is too long, end as ``failed``.
            ``tree.counters`` holds its costs.

        Raises:
            NoTaskCanWork: no tree of this environment, or of this engine, can be rolled; the message says what to do.
            Anything else but a SandboxError: this tree can't be rolled.
        """
        self.task, self.seed, self.row = task, seed, row
        try:
            await self._roots(self._claim(self.branch.root_samples, 0))
            if isinstance(self.branch.selector, Ranking):
                await self._fork_ranked()
            await self._fill()
        finally:
            await self._cleanup()
        self.counters["recoveries"] = self.world.recoveries
        self.counters["replayed_steps"] += self.world.replayed_steps
        self.counters["branch_points"] = len(self.tree.branch_points())
        self.counters["failed"] = sum(t.end == "failed" for t in self.tree.trajectories)
        self.counters["leaves"] = sum(1 for _ in self.tree.usable())
        for reason in (t.info["unjudged"] for t in self.tree.usable() if t.info.get("unjudged")):
            self.counters["unjudged"] += 1
            self.counters[f"unjudged/{reason}"] += 1
        self.tree.counters = dict(self.counters)
        return self.tree

    # --- where to spend ---------------------------------------------------------------------------------------------

    def _claim(self, wanted: int, depth: int) -> int:
        """Reserve up to ``wanted`` trajectories starting after ``depth`` turns; returns how many fit."""
        granted = min(wanted, self.budget.affordable(depth))
        for _ in range(granted):
            self.budget.reserve(depth)
        return granted

    def _group(self, depth: int) -> int:
        """How many forks a point there may have now; 0 where too few fit to be compared."""
        affordable = self.budget.affordable(depth)
        fits, least = min(self.branch.forks, affordable), min(self.least_forks, self.branch.forks)
        if not self.fill and affordable - fits < least:
            fits = affordable  # nothing else could be done with the rest
        return fits if fits >= least else 0

    def _may_fork(self, index: int, depth: int) -> bool:
        """Whether a point of this trajectory may be forked, now or when it is its turn."""
        waits = index != self._first and self.budget.unit != "leaves"  # of which there are never more later
        return waits or self._group(depth) > 0

    def _ends(self, index: int, depth: int, env_steps: int, tokens: int) -> None:
        """A trajectory that was reserved at ``depth`` has ended after this many steps and tokens of its own."""
        self._ended[index] = depth, env_steps, tokens
        self._in_turn()

    def _in_turn(self) -> None:
        """Fork and settle what had to wait for its turn."""
        while True:
            for point in self._chosen.pop(self._first, []):
                self._branch(point)
            if self._first not in self._ended:
                return
            self.budget.settle(*self._ended.pop(self._first))
            self._first += 1

    async def _fork_ranked(self) -> None:
        """Fork the decision points that each round picks, so that nested forks can compete."""
        trajectories, selector = self.tree.trajectories, self.branch.selector
        for number in count() if selector.rounds is None else range(selector.rounds):
            points = {
                p.seen.node: p
                for p in self.points
                if trajectories[p.seen.trajectory].usable and self._group(p.seen.depth)
            }
            seen = [replace(p.seen, success=self.tree.won(trajectories[p.seen.trajectory])) for p in points.values()]
            picked = selector.picked(seen, lambda i, number=number: self.chance(f"{-1 - number}/{i}"))
            if not picked:
                return
            for point in (points[p.node] for p in picked):
                if not selector.FORKS_AGAIN:
                    self.points.remove(point)
                self._branch(point)
            await self._finish()

    async def _fill(self) -> None:
        """What branching left over goes to further root samples."""
        if isinstance(self.branch.selector, NoBranching) and self.budget.unit == "leaves":
            return
        while self.fill and not self.counters["too_long"] and (count := self._claim(self.budget.limit, 0)):
            self.counters["filled_roots"] += count
            before = self.budget.spent
            await self._roots(count)
            if self.budget.spent == before:
                return

    # --- trajectories -----------------------------------------------------------------------------------------------

    async def _roots(self, count: int) -> None:
        """Roll ``count`` trajectories from the initial state, and whatever branches off them."""
        for index in [self.tree.add_trajectory(ROOT) for _ in range(count)]:
            self.nesting[index] = 0
            self._spawn(self._root(index))
        await self._finish()

    async def _root(self, index: int) -> None:
        started, retries = time.perf_counter(), self.retries
        while True:
            try:
                sandbox, observation, state, opened = await self._call(self._open_root)
                break
            except SandboxError as error:
                if retries and self._may_pass(error):
                    retries -= 1
                    self.counters["retries"] += 1
                    continue
                self._lost(index, error)
                self._ends(index, 0, 0, 0)
                return
        self.counters["reset_seconds"] += time.perf_counter() - started
        conversation = self.prompter.first(observation)
        if len(conversation.ids) > self.max_prompt_tokens:
            await self._refuse(
                index,
                sandbox,
                f"the prompt has {len(conversation.ids)} tokens, more than data.max_prompt_length="
                f"{self.max_prompt_tokens}: raise it, or shorten the prompt (bpo.prompt.list_actions, "
                f"bpo.prompt.max_observation_tokens)",
            )
            return
        if not self.tree.prompt_ids:
            self.tree.prompt_ids = list(conversation.ids)
        life = _Life(sandbox, None, opened, retries)
        await self._trajectory(index, life, state, conversation, observation.actions, observation.info, ROOT, 0)

    async def _refuse(self, index: int, sandbox: Sandbox, reason: str) -> None:
        """Leave a task out whose first prompt doesn't fit."""
        self._lost(index, PromptTooLong(f"task {self.task}: {reason}"))
        self.counters["too_long"] = 1
        self._ends(index, 0, 0, 0)
        await self._close(sandbox)

    def _branch(self, point: _Point) -> None:
        """Claim what forks of ``point`` fit and let them start."""
        granted = self._claim(self._group(point.seen.depth), point.seen.depth)
        if granted == 0:
            return
        parent = self.tree.nodes[point.seen.node].parent
        if parent != ROOT:
            self.tree.trunk_fair[parent] = self.branch.state_only
        indices = [self.tree.add_trajectory(parent) for _ in range(granted)]
        for index in indices:
            self.nesting[index] = self.nesting[point.seen.trajectory] + 1
        if point.snapshot is None:
            for index in indices:
                self._spawn(self._root(index))
        else:
            self._spawn(self._fork(point, indices))

    async def _fork(self, point: _Point, indices: list[int]) -> None:
        """Sample an alternative at ``point`` for each of the trajectories ``indices``, and roll them to their ends."""
        parent = self.tree.trajectories[indices[0]].parent
        started = time.perf_counter()
        sandboxes = await self._forks(point, len(indices))
        failed = [i for i, sandbox in enumerate(sandboxes) if isinstance(sandbox, Exception)]
        if failed and self.retries and all(self._may_pass(sandboxes[i]) for i in failed):
            self.counters["retries"] += len(failed)
            for i, sandbox in zip(failed, await self._forks(point, len(failed))):
                sandboxes[i] = sandbox
        self.counters["fork_seconds"] += time.perf_counter() - started
        self.counters["forks"] += len(indices)
        for index, sandbox in zip(indices, sandboxes):
            if isinstance(sandbox, Exception):
                self._lost(index, sandbox)
                self._ends(index, point.seen.depth, 0, 0)
                continue
            life = _Life(sandbox, point.snapshot, None, self.retries - (index in failed))
            self._spawn(
                self._trajectory(
                    index,
                    life,
                    point.state,
                    point.conversation,
                    point.admissible,
                    point.info,
                    parent,
                    point.seen.depth,
                )  # fmt: skip
            )

    async def _forks(self, point: _Point, count: int) -> list[Sandbox | Exception]:
        try:
            return await self._call(self._fork_snapshot, point.snapshot, count)
        except SandboxError as error:
            return [error] * count

    async def _trajectory(
        self,
        index: int,
        life: _Life,
        state: StateId,
        conversation: Conversation,
        admissible: tuple[str, ...] | None,
        info: dict[str, Any],
        parent: int,
        depth: int,
    ) -> None:
        """Turn after turn to the end of the episode."""
        start_depth, tokens, idle = depth, 0, 0
        trajectory = self.tree.trajectories[index]
        try:
            while True:
                room = self._room(conversation)
                most = min(self.budget.max_action_tokens, room)
                sampled = await self.generate(conversation.ids, most, f"{index}/{depth}")
                tokens += len(sampled.token_ids)
                self._count(sampled)
                answer = self.prompter.read(conversation, sampled.token_ids, admissible)
                seen = self._look(index, parent, depth, sampled, conversation, admissible)
                point, chosen = None, False
                # A fork's first turn stands in the state that it was forked at, a root sample's in the initial one.
                initial = depth == 0 == index and getattr(self.branch.selector, "OFFERS_INITIAL", False)
                if (depth > start_depth or initial) and self.nesting[index] < self.branch.depth:
                    chosen = self._chooses(seen) and self._may_fork(index, depth)
                    if initial:
                        point = _Point(seen, None, state, conversation, admissible, info)
                    elif chosen or isinstance(self.branch.selector, Ranking):
                        point = await self._snapshot(life, seen, state, conversation, admissible, info)
                acted_in = state
                if answer.action is None:  # which leaves the world as it was
                    observation = answer.told
                    idle += 1
                else:
                    observation, state, answered = await self._act(life, self._step, answer.action)
                    life.played.append((answer.action, answered))
                    info = observation.info
                self.counters["invalid_actions"] += not answer.valid
                after = self.prompter.observe(conversation, sampled.token_ids, observation, answer.action)
                depth += 1
                full = self._room(after) < 1
                node = self.tree.add_node(
                    Node(
                        parent=parent,
                        trajectory=index,
                        action_ids=list(sampled.token_ids),
                        action_logprobs=list(sampled.logprobs),
                        action_entropy=list(sampled.entropy),
                        prompt_ids=list(conversation.ids) if self.prompter.windowed else None,
                        reward=observation.reward,
                        action_text=answer.text.strip() if answer.action is None else str(answer.action),
                        observation_text=observation.text,
                        actions=admissible,
                        score=seen.entropy,
                        state_value=sampled.state_value,
                        observed=acted_in.observed,
                        digest=acted_in.digest,
                        cached_tokens=sampled.cached_tokens,
                        prefill_tokens=sampled.prefill_tokens,
                        valid_action=answer.valid,
                    )
                )
                if point is not None:
                    point.seen = replace(seen, node=node)
                    if chosen:
                        self._chosen[index].append(point)
                        self._in_turn()
                    else:
                        self.points.append(point)
                parent = node
                if observation.done or depth >= self.budget.max_turns or full:
                    trajectory.end = "terminated" if observation.terminated else "truncated"
                    trajectory.info = dict(info)
                    break
                self.tree.nodes[node].observation_ids = after.added
                conversation, admissible = after, observation.actions
        except NoTaskCanWork:
            raise
        except SandboxError as error:
            self._lost(index, error)
        finally:
            steps = life.steps + idle
            self.counters["env_steps"] += steps
            await self._close(life.sandbox)
        self._ends(index, start_depth, steps, tokens)

    async def _snapshot(self, life: _Life, seen, state, conversation, admissible, info) -> _Point:
        started = time.perf_counter()
        snapshot = await self._act(life, self._take_snapshot)
        life.since, life.played = snapshot, []
        self.counters["snapshot_seconds"] += time.perf_counter() - started
        self.counters["snapshots"] += 1
        return _Point(seen, snapshot, state, conversation, admissible, info)

    # --- tried again ------------------------------------------------------------------------------------------------

    async def _act(self, life: _Life, call: Callable[..., T], *args: Any) -> T:
        """What ``call`` of the life's sandbox gives, or gives at a further try, from the same state.

        The action stays the one that was sampled: another one in its place would make a sample of those that work.

        Raises:
            SandboxError: it failed as often as it may.
        """
        before = life.steps
        try:
            return await self._call(call, life.sandbox, *args)
        except SandboxTimeout as error:
            async with self._hang:
                return await self._again(life, before, error, call, *args)
        except SandboxError as error:
            return await self._again(life, before, error, call, *args)

    async def _again(self, life: _Life, before: int, error: SandboxError, call: Callable[..., T], *args: Any) -> T:
        while life.retries and self._may_pass(error):
            life.retries -= 1
            self.counters["retries"] += 1
            try:
                await self._revive(life, before)
            except NoTaskCanWork:
                raise
            except SandboxError as no_way:
                logger.warning("task %s: not tried again: %s", self.task, no_way)
                break
            try:
                return await self._call(call, life.sandbox, *args)
            except SandboxError as again:
                self._hangs |= isinstance(error, SandboxTimeout) and isinstance(again, SandboxTimeout)
                error = again
        raise error

    def _may_pass(self, error: Exception) -> bool:
        """Whether a second try may fare better."""
        if isinstance(error, NoTaskCanWork | TaskError) or not isinstance(error, SandboxError):
            return False
        return not (isinstance(error, SandboxTimeout) and self._hangs)

    async def _revive(self, life: _Life, steps: int) -> None:
        """Give a trajectory that has taken ``steps`` another sandbox in the state that it was in.

        Raises:
            SandboxError: there is no way back, or the world answered otherwise than before.
        """
        await self._close(life.sandbox)
        if life.since is None:
            sandbox, observation, *_ = await self._call(self._open_root)
            life.first.check(observation, self.world.volatile, f"reset of {self.task}")
        else:
            (sandbox,) = await self._call(self._fork_snapshot, life.since, 1)
            if isinstance(sandbox, Exception):
                raise sandbox
        self.counters["replayed_steps"] += life.steps - steps
        life.sandbox, life.earlier, life.start = sandbox, steps, sandbox.env_steps
        try:
            for number, (action, answer) in enumerate(life.played, 1):
                again = await self._call(sandbox.step, action)
                answer.check(again, self.world.volatile, f"step {number} ({action!r})")
        finally:
            self.counters["replayed_steps"] += sandbox.env_steps - life.start
            life.start = sandbox.env_steps

    # --- small parts ------------------------------------------------------------------------------------------------

    def _look(
        self,
        index: int,
        parent: int,
        depth: int,
        sampled: Generation,
        conversation: Conversation,
        admissible: tuple[str, ...] | None,
    ) -> DecisionPoint:
        """The state after ``parent``, that ``sampled`` was sampled in, as selectors see it."""
        forced = 0
        if self.branch.entropy_tokens == "open":
            forced = self.prompter.forced_tokens(sampled.token_ids, admissible, conversation.tools)
        entropy, chance = self.branch.entropy(sampled.entropy, forced), self.chance(f"{index}/{depth}")
        initial = entropy if parent == ROOT else self.tree.nodes[self.tree.path(parent)[0]].score
        return DecisionPoint(depth, entropy, sampled.state_value, chance, index, initial_entropy=initial)

    def _chooses(self, seen: DecisionPoint) -> bool:
        """Whether to branch at once, where the selector doesn't wait for whole trajectories."""
        if not isinstance(self.branch.selector, Choosing):
            return False
        lesson = self.branch.selector.lesson(seen)
        if lesson is not None:
            self.tree.lessons.append(lesson)
        return self.branch.selector.chooses(seen)

    def _room(self, conversation: Conversation) -> int:
        """Tokens that the row may still take after this conversation."""
        if self.prompter.windowed:
            return self.max_response_tokens if len(conversation.ids) <= self.max_prompt_tokens else 0
        return len(self.tree.prompt_ids) + self.max_response_tokens - len(conversation.ids)

    def _count(self, sampled: Generation) -> None:
        self.counters["generated_tokens"] += len(sampled.token_ids)
        self.counters["cached_tokens"] += sampled.cached_tokens
        self.counters["prefill_tokens"] += sampled.prefill_tokens
        if sampled.weights_version is not None:
            self.versions.add(sampled.weights_version)

    def _lost(self, index: int, error: Exception) -> None:
        self.tree.trajectories[index].end = "failed"
        self.tree.failures.append(Failure.of(error, index))
        logger.warning("task %s: branch %d lost: %s: %s", self.task, index, type(error).__name__, error)

    # These run in a thread, which a cancelled task leaves running: what they open must be known before they return.

    def _open_root(self) -> tuple[Sandbox, Observation, StateId, Fingerprint | None]:
        sandbox, observation = self.world.reset(self.task, self.seed, self.row)
        self._open.add(sandbox)
        return sandbox, observation, self._state(sandbox, observation), self._print(observation)

    def _step(self, sandbox: Sandbox, action: Action) -> tuple[Observation, StateId, Fingerprint | None]:
        observation = sandbox.step(action)
        return observation, self._state(sandbox, observation), self._print(observation)

    def _print(self, observation: Observation) -> Fingerprint | None:
        """What a replay is compared with; nothing where none can come."""
        return Fingerprint.of(observation, self.world.volatile) if self.retries else None

    def _state(self, sandbox: Sandbox, observation: Observation) -> StateId:
        digest = None
        if self.digests and not observation.done:
            digest = sandbox.digest()
            if digest is None:
                raise NoTaskCanWork(
                    "bpo.estimator.states=digest tells states by their digest, and this environment gives none: set "
                    "bpo.estimator.states=observation, or write its digest()"
                )
        return StateId.of(observation.text, self.world.volatile, digest)

    def _fork_snapshot(self, snapshot: Snapshot, count: int) -> list[Sandbox | Exception]:
        sandboxes = snapshot.fork(count)
        self._open.update(s for s in sandboxes if not isinstance(s, Exception))
        return sandboxes

    def _take_snapshot(self, sandbox: Sandbox) -> Snapshot:
        snapshot = sandbox.snapshot()
        self._snapshots.append(snapshot)
        return snapshot

    async def _close(self, sandbox: Sandbox) -> None:
        await self._call(sandbox.close)  # cancelled here, the sandbox stays known and is closed by the clean-up
        self._open.discard(sandbox)

    async def _call(self, function: Callable, *args: Any) -> Any:
        call = self.executor.submit(function, *args)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(call)

    def _spawn(self, job: Coroutine) -> None:
        self._tasks.add(asyncio.ensure_future(job))

    async def _finish(self) -> None:
        """Wait for all that runs, and for what that starts.

        Raises:
            Exception: what the first of them failed with.
        """
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._tasks.discard(task)  # the others stay, so that the clean-up looks at how they ended
                task.result()

    async def _cleanup(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*list(self._tasks), return_exceptions=True)
        await asyncio.to_thread(wait, list(self._calls))
        for thing, give_back in [(s, s.close) for s in self._open] + [(s, s.release) for s in self._snapshots]:
            try:
                await self._call(give_back)
            except SandboxError as error:
                logger.warning("task %s: giving back %s failed: %s", self.task, type(thing).__name__, error)
        self._open.clear()
        self._snapshots.clear()
        self.points.clear()
