"""Rolling trees, on named fakes: a counting world, a scripted policy and a prompter of single characters."""

import asyncio
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar

import pytest

from verl_bpo.config.schema import build
from verl_bpo.generation.configured import configured_rollout
from verl_bpo.sandbox.base import (
    NoTaskCanWork,
    Observation,
    Sandbox,
    SandboxCrashed,
    SandboxError,
    SandboxTimeout,
    Snapshot,
    SnapshotUnsupported,
    TaskError,
)
from verl_bpo.tree.budget import Budget
from verl_bpo.tree.draws import drawn
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.metrics import tree_metrics
from verl_bpo.tree.prompting import Answer, Conversation
from verl_bpo.tree.rollout import Generation, TreeRollout
from verl_bpo.tree.rows import tree_rows
from verl_bpo.tree.topology import Tree


class FakeWorld:
    """Sandboxes whose state is the list of actions so far; ``end`` letters end the episode, ``w`` wins it."""

    volatile: ClassVar = {"times": r"\d+ s"}

    def __init__(self, length=5, crash_on=None, no_snapshot=False):
        self.length, self.crash_on, self.no_snapshot = length, crash_on, no_snapshot
        self.live, self.kept, self.lock = set(), set(), threading.Lock()
        self.recoveries, self.replayed_steps = 0, 7

    def reset(self, task, seed=0, row=None):
        return self.sandbox([]), Observation("start", actions=("a", "b"))

    def sandbox(self, actions):
        return FakeSandbox(self, actions)


class FakeSnapshot(Snapshot):
    def __init__(self, world, actions):
        self.world, self.actions = world, list(actions)
        world.kept.add(self)

    def fork(self, count=1):
        return [self.world.sandbox(self.actions) for _ in range(count)]

    def release(self):
        self.world.kept.discard(self)


class FakeSandbox(Sandbox):
    def __init__(self, world, actions):
        self.world, self.actions, self.env_steps = world, list(actions), 0
        with world.lock:
            world.live.add(self)

    def reset(self, task, seed=0, row=None):
        raise NotImplementedError

    def step(self, action):
        if action == self.world.crash_on:
            raise SandboxCrashed("the fake world died")
        self.env_steps += 1
        self.actions.append(action)
        won = action == "w"
        ended = won or len(self.actions) >= self.world.length
        return Observation("".join(self.actions), float(won), terminated=ended, actions=("a", "b"), info={"won": won})

    def snapshot(self):
        if self.world.no_snapshot:
            raise SnapshotUnsupported("the fake world has no snapshot: set bpo.env.backend=replay")
        return FakeSnapshot(self.world, self.actions)

    def close(self):
        with self.world.lock:
            self.world.live.discard(self)


class FakePrompter:
    windowed = False

    def first(self, observation):
        return Conversation([0])

    def observe(self, conversation, action_ids, observation, action=None):
        return Conversation([*conversation.ids, *action_ids, 1], [1])

    def read(self, conversation, action_ids, admissible):
        text = "".join(map(chr, action_ids))
        if text == "?":
            return Answer(text, None, False, Observation("no action", actions=admissible))
        return Answer(text, text, text in "abw")

    def forced_tokens(self, action_ids, admissible, tools):
        return int(action_ids[0] == ord(">"))


class ScriptedPolicy:
    """Samples one letter; records its prompts."""

    def __init__(self, letter, entropy=lambda number: 0.5, value=lambda depth: None):
        self.letter, self.entropy, self.value, self.prompts = letter, entropy, value, []

    async def __call__(self, prompt_ids, max_tokens, place):
        self.prompts.append(list(prompt_ids))
        number = len(self.prompts)
        await asyncio.sleep(0.001)
        letter = self.letter(number) if callable(self.letter) else self.letter
        return Generation(
            [ord(letter)], [-0.7], [self.entropy(number)], cached_tokens=2, prefill_tokens=3,
            state_value=self.value(int(place.split("/")[1])),
        )  # fmt: skip


def roll(policy, world, preset="paper_threshold", turns=5, response=100, **user):
    config = build({**user, "env": {"max_turns": turns, "max_action_tokens": 4}}, preset)
    with ThreadPoolExecutor(4) as threads:
        rollout = configured_rollout(
            config,
            generate=policy,
            executor=threads,
            prompter=FakePrompter(),
            max_prompt_tokens=50,
            max_response_tokens=response,
            chance=lambda place: drawn(0, place) / 2**32,
        )
        rollout.world = world
        return rollout, asyncio.run(rollout.run("task"))


def test_plain_gives_one_trajectory():
    rollout, tree = roll(ScriptedPolicy("a"), FakeWorld(), "plain")
    assert (len(tree.trajectories), len(tree.nodes)) == (1, 5)
    assert tree.counters["env_steps"] == 5 and "snapshots" not in tree.counters


@pytest.mark.parametrize("preset", ["plain", "paper_threshold"])
def test_an_answer_without_an_action_reaches_no_world_and_takes_a_turn(preset):
    world = FakeWorld()
    rollout, tree = roll(ScriptedPolicy(lambda number: "?" if number % 2 else "a"), world, preset)
    sent = [node.observation_text for node in tree.nodes if node.action_text == "a"]
    idle = [node for node in tree.nodes if node.action_text == "?"]
    assert idle and sent and not any("?" in text for text in sent), "the world saw none of them"
    assert all(node.observation_text == "no action" and not node.valid_action for node in idle)
    assert rollout.counters["invalid_actions"] == len(idle)
    assert rollout.counters["env_steps"] == len(tree.nodes), "each is paid for"
    assert {tree.depth(t.leaf) for t in tree.trajectories} == {5}


def test_reasons_for_which_work_was_not_judged_are_counted():
    class Judge(FakeWorld):
        def reset(self, task, seed=0, row=None):
            sandbox, observation = super().reset(task, seed)
            step = sandbox.step
            sandbox.step = lambda action: replace(step(action), info={"won": False, "unjudged": "timeout"})
            return sandbox, observation

    _, tree = roll(ScriptedPolicy("a"), Judge(), "plain")
    assert tree.counters["unjudged"] == tree.counters["unjudged/timeout"] == 1
    metrics = tree_metrics(Forest.of({"a_0": tree}, {"a_0": "a"}))
    assert metrics["tree/unjudged"] == metrics["tree/unjudged/timeout"] == 1
    _, tree = roll(ScriptedPolicy("a"), FakeWorld(), "plain")
    assert tree_metrics(Forest.of({"a_0": tree}, {"a_0": "a"}))["tree/unjudged"] == 0


def test_what_the_world_said_of_itself_outlives_answers_without_an_action():
    _, tree = roll(ScriptedPolicy(lambda number: "a" if number < 3 else "?"), FakeWorld(), "plain")
    assert tree.trajectories[0].info == {"won": False} and tree.nodes[-1].observation_text == "no action"


def test_a_fork_starts_from_the_state_before_the_trunks_action():
    """Branching at turn 2 of the backbone: forks repeat turn 1 and replace turn 2."""
    policy = ScriptedPolicy("a", lambda number: 2.0 if number == 2 else 0.0)
    _, tree = roll(policy, FakeWorld(), budget={"limit": 3}, branch={"forks": 2})
    assert [t.parent for t in tree.trajectories] == [-1, 0, 0]
    assert [n.observation_text for n in tree.nodes if n.trajectory == 1] == ["aa", "aaa", "aaaa", "aaaaa"]
    assert tree.counters["env_steps"] == 5 + 4 + 4
    assert tree.counters["replayed_steps"] == 7  # what the world says it executed again


@pytest.mark.parametrize("which, points", [("first", 0), ("open", 1), ("all", 1)])
def test_where_all_answers_begin_alike_the_first_open_token_says_where_to_branch(which, points):
    class Marked(ScriptedPolicy):
        async def __call__(self, *args):
            found = await super().__call__(*args)
            return Generation([ord(">"), *found.token_ids], [0.0, *found.logprobs], [0.0, *found.entropy])

    policy = Marked("a", lambda number: 4.0 if number == 2 else 0.0)
    _, tree = roll(policy, FakeWorld(), budget={"fill": "none"}, branch={"forks": 2, "entropy_tokens": which})
    assert tree.counters["branch_points"] == points
    assert tree.nodes[1].score == {"first": 0.0, "open": 4.0, "all": 2.0}[which]


def test_a_forks_row_repeats_the_prefix_it_was_sampled_after():
    policy = ScriptedPolicy(lambda n: "ab"[n % 2], lambda number: 2.0 if number == 2 else 0.0)
    _, tree = roll(policy, FakeWorld(), budget={"limit": 3}, branch={"forks": 2})
    row = tree_rows(tree)[1]
    sampled_after = [p for p in policy.prompts if p == row.prompt_ids + row.response_ids[: row.spans.starts[0]]]
    assert len(sampled_after) == 3  # the trunk's own action there, and two forks
    assert row.response_mask[: row.spans.starts[0]] == [0] * row.spans.starts[0]


@pytest.mark.parametrize("limit", [1, 2, 5, 8])
@pytest.mark.parametrize("preset", ["paper", "paper_threshold", "guided"])
def test_a_tree_spends_its_leaves_and_no_more(preset, limit):
    policy = ScriptedPolicy(lambda n: "w" if n % 7 == 0 else "a", lambda n: 2.0)
    if (preset, limit) == ("paper", 2):
        with pytest.raises(ValueError, match="bpo.budget.limit=2 leaves no room for 2 forks"):
            roll(policy, FakeWorld(), preset, budget={"limit": limit})
        return
    branch = {"root_samples": min(4, limit)} if preset == "guided" else {}
    _, tree = roll(policy, FakeWorld(), preset, budget={"limit": limit}, branch=branch)
    assert len(tree.trajectories) == limit


class PlacedPolicy:
    """What it samples at a place of the tree, and how sure it is, depend on the place; how long that takes doesn't."""

    def __init__(self, seed: int, letters="ab", entropy=None):
        self.seed, self.letters, self.given = seed, letters, entropy

    async def __call__(self, prompt_ids, max_tokens, place):
        rng = random.Random(f"{self.seed}/{place}")
        letter, entropy = rng.choice(self.letters), 2 * rng.random()
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)
        if self.given is not None:
            entropy = self.given(place)
        return Generation([ord(letter)], [-0.7], [entropy])


def shape(tree):
    """Of every trajectory, where it forked and what it did; numbers of nodes depend on what was sampled first."""
    found = []
    for i, t in enumerate(tree.trajectories):
        at = (tree.nodes[t.parent].trajectory, tree.depth(t.parent)) if t.parent >= 0 else None
        found.append((at, [n.action_text for n in tree.nodes if n.trajectory == i]))
    return found


def test_paper_is_the_backbone_and_all_other_leaves_as_forks_at_its_most_uncertain_states():
    entropies = [0.3, 0.9, 0.1, 0.8, 0.2]
    policy = PlacedPolicy(0, entropy=lambda place: entropies[int(place.split("/")[1])])
    for limit, groups in ((8, {0: 2, 2: 2, -1: 3}), (6, {0: 2, 2: 3}), (5, {0: 2, 2: 2}), (3, {0: 2})):
        _, tree = roll(policy, FakeWorld(), "paper", budget={"limit": limit})
        forked = Counter(t.parent for t in tree.trajectories[1:])
        assert forked == groups and len(tree.trajectories) == limit
        assert tree.counters.get("filled_roots", 0) == 0


def test_paper_leaves_the_budget_unspent_where_no_state_is_uncertain_enough():
    _, tree = roll(PlacedPolicy(0, entropy=lambda place: 0.5), FakeWorld(), "paper", branch={"threshold": 0.6})
    assert len(tree.trajectories) == 1


@pytest.mark.parametrize(
    "branch", [{"selector": "every"}, {"selector": "top_k", "top_k": 6}, {"selector": "most_uncertain"}]
)
def test_a_fork_never_branches_at_the_state_that_it_was_forked_at(branch):
    for seed in range(20):
        branch = {"forks": 2, "depth": 3, **branch}
        _, tree = roll(PlacedPolicy(seed, "aab"), FakeWorld(), "plain", budget={"limit": 14}, branch=branch)
        rounds = Counter(t.parent for t in tree.trajectories if t.parent >= 0)
        assert rounds and max(rounds.values()) <= 3  # a second round at one state would make four


@pytest.mark.parametrize("unit, limit", [("leaves", 9), ("env_steps", 33), ("tokens", 33)])
@pytest.mark.parametrize("fill", ["root", "none"])
@pytest.mark.parametrize(
    "branch", [{"selector": "every"}, {"selector": "random", "share": 0.5}, {"selector": "threshold"}]
)
def test_a_tree_does_not_depend_on_what_runs_faster_and_never_overspends(unit, limit, fill, branch):
    branch = {"forks": 2, "depth": 2, "root_samples": 2, "entropy_tokens": "all", **branch}
    for seed in range(4):
        shapes = []
        for _ in range(5):
            budget = {"unit": unit, "limit": limit, "fill": fill}
            _, tree = roll(PlacedPolicy(seed, "aaabw"), FakeWorld(), "plain", budget=budget, branch=branch)
            cost = {"leaves": "leaves", "env_steps": "env_steps", "tokens": "generated_tokens"}[unit]
            assert tree.counters[cost] <= limit
            groups = Counter(t.parent for t in tree.trajectories if t.parent >= 0)
            if branch["selector"] == "threshold":  # the trunk is no sibling
                assert 1 not in groups.values()
            shapes.append(shape(tree))
        assert all(found == shapes[0] for found in shapes)


@pytest.mark.parametrize("unit,limit", [("env_steps", 23), ("tokens", 61)])
def test_a_tree_never_exceeds_a_budget_of_steps_or_tokens(unit, limit):
    _, tree = roll(ScriptedPolicy("a", lambda n: 2.0), FakeWorld(), budget={"unit": unit, "limit": limit})
    cost = tree.counters["env_steps" if unit == "env_steps" else "generated_tokens"]
    assert cost <= limit and tree.counters["leaves"] >= 2


@pytest.mark.parametrize(
    "preset,branch",
    [("guided", {}), ("guided", {"top_k": 3, "trunk": "any"}), ("paper", {}), ("paper_threshold", {"threshold": 1.0})],
)
def test_a_tree_is_the_same_whatever_ends_first(preset, branch):
    """Guided trees look at finished trajectories, many of them in equal states: only scores and places may count."""
    trees = []
    for run in range(6):
        waits = random.Random(run)

        async def policy(prompt_ids, max_tokens, place, waits=waits):
            await asyncio.sleep(waits.random() / 200)
            draw = random.Random(place).random()
            # A score as a batch computes it: a function of the state, and rounding that depends on what else ran.
            score = random.Random(bytes(prompt_ids)).choice([0.5, 1.0, 1.5]) + waits.random() * 1e-6
            return Generation([ord("w" if draw < 0.2 else "ab"[draw < 0.6])], [-0.7], [score])

        _, tree = roll(policy, FakeWorld(), preset, branch=branch)
        trees.append([(row.prompt_ids, row.response_ids) for row in tree_rows(tree)])
    assert all(tree == trees[0] for tree in trees[1:])


def test_unspent_budget_goes_to_root_samples():
    _, tree = roll(ScriptedPolicy("a", lambda n: 0.0), FakeWorld(), budget={"limit": 4})
    assert [t.parent for t in tree.trajectories] == [-1] * 4
    _, tree = roll(ScriptedPolicy("a", lambda n: 0.0), FakeWorld(), budget={"limit": 4, "fill": "none"})
    assert len(tree.trajectories) == 1


def test_forks_nest_to_the_depth_limit_only():
    deep = {"selector": "every", "forks": 2, "depth": 2}
    _, tree = roll(ScriptedPolicy("a"), FakeWorld(), budget={"limit": 60, "fill": "none"}, branch=deep)
    generation = []
    for trajectory in tree.trajectories:
        parent = trajectory.parent
        generation.append(0 if parent < 0 else generation[tree.nodes[parent].trajectory] + 1)
    # A fork of a fork's first turn hangs below the trunk's node, so generations are counted by the rollout itself.
    assert max(generation) >= 1 and len(tree.trajectories) > 9


def test_guided_forks_only_successful_trajectories():
    policy = ScriptedPolicy(lambda n: "w" if n == 9 else "a")
    _, tree = roll(policy, FakeWorld(), "guided", budget={"limit": 6}, branch={"root_samples": 4, "depth": 1})
    winner = next(i for i, t in enumerate(tree.trajectories) if t.info.get("won"))
    forks = [t for t in tree.trajectories if t.parent >= 0]
    assert forks and {tree.nodes[t.parent].trajectory for t in forks} == {winner}
    fair = tree.fair()
    continuation = [
        i for i, n in enumerate(tree.nodes) if n.trajectory == winner and n.parent in {t.parent for t in forks}
    ]
    assert [fair[i] for i in continuation] == [False] * len(continuation)


def test_guided_without_a_success_samples_more_roots():
    _, tree = roll(ScriptedPolicy("a"), FakeWorld(), "guided", budget={"limit": 8})
    assert [t.parent for t in tree.trajectories] == [-1] * 8


def test_a_crash_loses_its_branch_only():
    policy = ScriptedPolicy(lambda n: "x" if n == 8 else "a", lambda n: 2.0 if n == 2 else 0.0)
    rollout, tree = roll(policy, FakeWorld(crash_on="x"), budget={"limit": 5}, branch={"forks": 4})
    assert tree.counters["failed"] == 1 and tree.counters["leaves"] == 4
    assert [str(f) for f in rollout.tree.failures] == ["SandboxCrashed: the fake world died"]
    assert len(tree_rows(tree)) == 4


class FlakyWorld(FakeWorld):
    """Of the steps that take action ``x``, those whose numbers are in ``fails`` fail with ``error``."""

    def __init__(self, fails, error=SandboxCrashed, answers=None, **kwargs):
        super().__init__(**kwargs)
        self.fails, self.error, self.answers, self.taken, self.resets, self.steps = set(fails), error, answers, 0, 0, 0

    def reset(self, task, seed=0, row=None):
        self.resets += 1
        return super().reset(task, seed)

    def sandbox(self, actions):
        return FlakySandbox(self, actions)


class FlakySandbox(FakeSandbox):
    def step(self, action):
        self.world.steps += 1
        if action == "x":
            self.world.taken += 1
            if self.world.taken in self.world.fails:
                self.env_steps += 1
                raise self.world.error("this time")
        observation = super().step(action)
        return replace(observation, text=f"{self.world.resets}") if self.world.answers == "others" else observation


def test_a_crash_that_passes_costs_a_replay_and_no_trajectory():
    """Without retries (0) the trajectory is lost, and with it the whole tree of a baseline."""
    policy = ScriptedPolicy(lambda n: "x" if n == 3 else "a")
    world = FlakyWorld(fails=[1])
    _, tree = roll(policy, world, "plain")
    (trajectory,) = tree.usable()
    assert [node.action_text for node in tree.nodes] == ["a", "a", "x", "a", "a"]
    assert [node.observation_text for node in tree.nodes][-1] == "aaxaa"
    assert (tree.counters["retries"], tree.counters["env_steps"], tree.counters["failed"]) == (1, 5, 0)
    assert tree.counters["replayed_steps"] == 7 + 3  # the world's own; the failed step and the two before it
    assert world.resets == 2 and world.steps == 5 + 3 and not world.live
    _, tree = roll(
        ScriptedPolicy(lambda n: "x" if n == 3 else "a"), FlakyWorld(fails=[1]), "plain", faults={"retries": 0}
    )
    assert tree.counters["failed"] == 1 and tree.counters["leaves"] == 0


def test_a_fault_that_comes_back_loses_its_trajectory_after_one_more_try():
    _, tree = roll(ScriptedPolicy(lambda n: "x" if n == 3 else "a"), world := FlakyWorld(fails=[1, 2]), "plain")
    assert (tree.counters["retries"], tree.counters["failed"], world.taken) == (1, 1, 2)
    assert not world.live and not world.kept


def test_a_world_that_answers_otherwise_when_played_again_is_not_gone_on_with():
    world = FlakyWorld(fails=[1], answers="others")
    _, tree = roll(ScriptedPolicy(lambda n: "x" if n == 3 else "a"), world, "plain")
    assert [str(failure) for failure in tree.failures] == ["SandboxCrashed: this time"]
    assert world.taken == 1 and not world.live


@pytest.mark.parametrize("error, tries", [(TaskError, 1), (SnapshotUnsupported, None), (SandboxError, 2)])
def test_only_what_may_pass_is_tried_again(error, tries):
    world = FlakyWorld(fails=range(1, 9), error=error)
    if tries is None:
        with pytest.raises(SnapshotUnsupported):
            roll(ScriptedPolicy("x"), world, "plain")
    else:
        roll(ScriptedPolicy("x"), world, "plain")
        assert world.taken == tries


def test_a_hang_that_comes_back_is_waited_for_once_more_in_a_tree():
    """Each wait is a whole ``bpo.env.step_timeout``: 8 trajectories wait 9 times, not 16."""
    world = FlakyWorld(fails=range(1, 99), error=SandboxTimeout)
    _, tree = roll(ScriptedPolicy("x"), world, "paper", branch={"root_samples": 8}, budget={"limit": 8})
    assert tree.counters["failed"] == 8 and tree.lost() == {"hang": 1.0}
    assert world.taken == 9


def test_a_retry_starts_from_the_last_snapshot():
    policy = ScriptedPolicy(lambda n: "x" if n == 4 else "a", lambda n: 2.0 if n == 2 else 0.0)
    world = FlakyWorld(fails=[1])
    _, tree = roll(policy, world, budget={"limit": 3}, branch={"forks": 2})
    assert tree.counters["retries"] == 1 and tree.counters["failed"] == 0
    assert world.resets == 1, "nothing is reset where there is a snapshot"


def test_a_reset_and_a_fork_that_fail_once_are_tried_again(monkeypatch):
    class Shy(FakeWorld):
        """Whose first reset fails, and the first fork of each snapshot."""

        resets = 0

        def reset(self, task, seed=0, row=None):
            self.resets += 1
            if self.resets == 1:
                raise SandboxCrashed("not now")
            return super().reset(task, seed)

    class ShySnapshot(FakeSnapshot):
        asked = 0

        def fork(self, count=1):
            self.asked += 1
            return super().fork(count) if self.asked > 1 else [SandboxCrashed("not now")] * count

    world = Shy()
    policy = ScriptedPolicy("a", lambda n: 2.0 if n == 2 else 0.0)
    monkeypatch.setattr(FakeSandbox, "snapshot", lambda self: ShySnapshot(self.world, self.actions))
    _, tree = roll(policy, world, budget={"limit": 3}, branch={"forks": 2})
    assert tree.counters["failed"] == 0 and tree.counters["leaves"] == 3 and tree.counters["retries"] == 3


def test_a_world_without_snapshot_fails_with_its_own_advice():
    world = FakeWorld(no_snapshot=True)
    with pytest.raises(SnapshotUnsupported, match="set bpo.env.backend=replay"):
        roll(ScriptedPolicy("a", lambda n: 2.0), world, budget={"limit": 3})
    assert world.live == set()


def test_everything_is_given_back():
    world = FakeWorld(crash_on="x")
    roll(ScriptedPolicy(lambda n: "x" if n % 5 == 0 else "a", lambda n: 2.0), world, budget={"limit": 20})
    assert (world.live, world.kept) == (set(), set())


def test_everything_is_given_back_when_the_engine_fails():
    policy = ScriptedPolicy("a", lambda n: 2.0)

    async def broken(prompt_ids, max_tokens, place):
        if len(policy.prompts) == 6:
            raise RuntimeError("engine gone")
        return await policy(prompt_ids, max_tokens, place)

    world = FakeWorld()
    with pytest.raises(RuntimeError, match="engine gone"):
        roll(broken, world, budget={"limit": 8})
    assert (world.live, world.kept) == (set(), set())


def test_a_trajectory_is_cut_where_its_row_is_full():
    _, tree = roll(ScriptedPolicy("a"), FakeWorld(length=50), "plain", turns=40, response=7)
    row = tree_rows(tree)[0]
    assert tree.trajectories[0].end == "truncated" and len(row.response_ids) <= 7


def test_a_prompt_longer_than_the_limit_loses_its_task_and_names_the_key():
    class Talkative(FakePrompter):
        def first(self, observation):
            return Conversation([0] * 51)

    config = build({"env": {"max_turns": 5, "max_action_tokens": 4}}, "plain")
    with ThreadPoolExecutor(1) as threads:
        rollout = TreeRollout(
            ScriptedPolicy("a"),
            world := FakeWorld(),
            threads,
            Talkative(),
            config.branch,
            Budget("leaves", 1, 5, 4),
            50,
            99,
        )
        tree = asyncio.run(rollout.run("task"))
    (failure,) = tree.failures
    assert "task task: the prompt has 51 tokens, more than data.max_prompt_length=50" in failure.message
    assert (tree.counters["too_long"], tree.counters["failed"], tree.nodes) == (1, 1, [])
    assert not world.live


def test_by_value_a_tree_forks_where_the_outcome_is_most_open():
    values = [0.9, 0.95, 0.6, 0.2, 0.0]
    policy = ScriptedPolicy("a", entropy=lambda number: number, value=values.__getitem__)
    branch = {"score": "value", "depth": 1, "top_k": 1}
    _, tree = roll(policy, FakeWorld(), "guided", budget={"limit": 6}, branch=branch)
    forks = [t for t in tree.trajectories if t.parent >= 0]
    assert len(forks) == 2 and {tree.depth(t.parent) for t in forks} == {2}  # no success was needed
    assert {node.state_value for node in tree.nodes} == set(values)


# --- in which state a turn was taken ----------------------------------------------------------------------------------


class ForgetfulSandbox(FakeSandbox):
    """Shows its last action alone, and how long it took; its digest is all of them."""

    def step(self, action):
        observation = super().step(action)
        return replace(observation, text=f"{action}, in {len(self.actions)} s")

    def digest(self):
        return {"actions": "".join(self.actions)}


class ForgetfulWorld(FakeWorld):
    def reset(self, task, seed=0, row=None):
        return ForgetfulSandbox(self, []), Observation("start")


def done_before(tree, node):
    return "".join(tree.nodes[i].action_text for i in tree.path(tree.nodes[node].parent) if tree.nodes[i].valid_action)


@pytest.mark.parametrize("states", ["observation", "digest"])
def test_equal_ids_are_equal_states_in_all_trees_of_a_task_forks_and_idle_turns_among_them(states, monkeypatch):
    def fork(self, count=1):
        return [ForgetfulSandbox(self.world, self.actions) for _ in range(count)]

    monkeypatch.setattr(FakeSnapshot, "fork", fork)
    seen, forked = {}, 0
    for seed in range(3):
        rng = random.Random(seed)
        policy = ScriptedPolicy(lambda number, rng=rng: rng.choice("ab?"))
        _, rolled = roll(
            policy, ForgetfulWorld(), branch={"depth": 3, "threshold": 0.0}, estimator={"states": states}, budget={"limit": 9}
        )  # fmt: skip
        tree = Tree.from_dict(rolled.skeleton().to_dict())
        forked += sum(t.parent >= 0 for t in tree.trajectories)
        forest = Forest.of({"p_0": tree}, {"p_0": "p"})
        assert (forest.digest >= 0).all() == (states == "digest") and (forest.observed >= 0).all()
        for i, node in enumerate(tree.nodes):
            done = done_before(rolled, i)
            for kind, state, number in (("seen", done[-1:], node.observed), ("digest", done, node.digest)):
                if number is not None:
                    assert seen.setdefault((kind, state), number) == number, "one state has one number"
    assert forked > 6
    assert len(set(seen.values())) == len(seen) >= 3, "two states have two"
    assert sum(kind == "digest" for kind, _ in seen) > 3 or states == "observation"


def test_an_environment_without_a_digest_ends_a_run_that_tells_states_by_it():
    with pytest.raises(NoTaskCanWork, match="states=digest .* this environment gives none: set .*states=observation"):
        roll(ScriptedPolicy("a"), FakeWorld(), "plain", estimator={"states": "digest"})


def test_trees_of_older_dumps_are_read_and_say_nothing_of_states():
    _, tree = roll(ScriptedPolicy("a"), FakeWorld(), "plain")
    old = tree.to_dict()
    for node in old["nodes"]:
        del node["observed"], node["digest"]
    forest = Forest.of({"p_0": Tree.from_dict(old)}, {"p_0": "p"})
    assert (forest.observed == -1).all() and (forest.digest == -1).all()


# --- other people's branching -----------------------------------------------------------------------------------------


def test_random_nodes_expand_states_of_the_whole_tree_uniformly_and_some_of_them_twice():
    """Tree-GRPO: 1 + N L leaves; each draw is of all states that the rounds before left, the initial one among them."""
    places, twice, initial, of_forks = [], 0, 0, 0
    for seed in range(60):
        rng = random.Random(seed)
        policy = ScriptedPolicy(lambda number, rng=rng: rng.choice("ab"))
        keys = {"selector": "random_nodes", "nodes": 3, "expansions": 2, "forks": 1, "depth": 9}
        config = build(
            {"branch": keys, "budget": {"limit": 7, "fill": "none"}, "env": {"max_turns": 4, "max_action_tokens": 4}}, "plain"
        )  # fmt: skip
        with ThreadPoolExecutor(4) as threads:
            rollout = configured_rollout(
                config, generate=policy, executor=threads, prompter=FakePrompter(), max_prompt_tokens=50,
                max_response_tokens=100, chance=lambda place, seed=seed: drawn(seed, place) / 2**32,
            )  # fmt: skip
            rollout.world = FakeWorld(length=4)
            tree = asyncio.run(rollout.run("task"))
        assert len(tree.trajectories) == 7
        parents = [t.parent for t in tree.trajectories[1:]]
        twice += len(set(parents)) < len(parents)
        initial += parents[:3].count(-1)
        places += [tree.depth(p) for p in parents[:3]]
        of_forks += sum(p >= 0 and tree.nodes[p].trajectory > 0 for p in parents[3:])
    # The backbone has four states, of depths 0 to 3; 180 draws of the first rounds.
    assert {depth: places.count(depth) / 180 for depth in range(4)} == pytest.approx(
        dict.fromkeys(range(4), 0.25), abs=0.1
    )
    assert initial == places.count(0) and twice > 20 and of_forks > 20


@pytest.mark.parametrize("rise, share", [(0.0, 0.5), (1.0, 0.7), (-1.0, 0.3), (3.0, 1.0), (-3.0, 0.0)])
def test_entropy_rise_branches_the_more_often_the_more_the_entropy_has_risen_since_the_initial_state(rise, share):
    """ARPO: with probability share + weight (H_t - H_0); forks of forks too, with the initial state's H_0."""
    branched = visited = 0
    for seed in range(25):
        keys = {"selector": "entropy_rise", "weight": 0.2, "forks": 1, "depth": 9}
        config = build(
            {"branch": keys, "budget": {"limit": 500}, "env": {"max_turns": 3, "max_action_tokens": 4}}, "plain"
        )
        entropies = {0: 4.0}

        async def generate(prompt, most, place, entropies=entropies):
            depth = int(place.split("/")[1])
            return Generation([ord("a")], [-0.7], [entropies.get(depth, 4.0 + rise)])

        with ThreadPoolExecutor(4) as threads:
            rollout = configured_rollout(
                config, generate=generate, executor=threads, prompter=FakePrompter(), max_prompt_tokens=50,
                max_response_tokens=100, chance=lambda place, seed=seed: drawn(seed, place) / 2**32,
            )  # fmt: skip
            rollout.world = FakeWorld(length=3)
            tree = asyncio.run(rollout.run("task"))
        starts = {t.start for t in tree.trajectories}
        visited += sum(i not in starts for i in range(len(tree.nodes)))
        branched += sum(t.parent >= 0 for t in tree.trajectories)
    assert visited >= 50 and branched / visited == pytest.approx(share, abs=0.12)
