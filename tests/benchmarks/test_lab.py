"""The lab of ``benchmarks/lab``: its trees are the real rollout's, its values exact, its runs repeatable."""

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import yaml

from benchmarks.lab import run
from benchmarks.lab.methods import METHODS
from benchmarks.lab.rolling import Roller, forest_of, world_of
from benchmarks.lab.worlds import Family, sample_tasks
from verl_bpo.config.schema import build
from verl_bpo.generation.configured import configured_rollout
from verl_bpo.sandbox.base import Observation, Sandbox, Snapshot
from verl_bpo.tree.budget import Budget
from verl_bpo.tree.draws import drawn
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.prompting import Answer, Conversation
from verl_bpo.tree.rollout import Generation

FAMILIES = {
    "progress": Family(turns=6, right=2, actions=3, tasks=2),
    "traps": Family(turns=6, right=2, actions=3, wrong="trap", tasks=2),
    "back": Family(turns=6, right=2, actions=3, wrong="back", graded=True, tasks=2),
    "distractors": Family(turns=6, right=2, actions=3, period=2, graded=True, tasks=2),
    "fresh": Family(turns=6, right=2, actions=3, fresh=True, tasks=2),
}


def sampled(family, seed=0):
    rng = np.random.default_rng(seed)
    tasks = sample_tasks(family, rng, rng.normal(size=(family.actions, family.features)))
    policy = rng.dirichlet(np.ones(family.actions), size=(family.tasks, family.states))
    return tasks, policy


class LabSandbox(Sandbox):
    """A world of the lab behind the real interface."""

    recoveries = replayed_steps = 0
    volatile: ClassVar = {}

    def __init__(self, world, state=0, depth=0):
        self.world, self.state, self.depth, self.env_steps = world, state, depth, 0

    def reset(self, task, seed=0, row=None):
        return LabSandbox(self.world), Observation("0")

    def step(self, action):
        self.state, self.depth = self.world.following[self.state][int(action)], self.depth + 1
        self.env_steps += 1
        won, over = self.state < 0, self.depth == self.world.turns
        reward = 1.0 if won else self.world.final[self.state] if over else 0.0
        return Observation(str(self.state), reward, terminated=won or over, info={"won": won})

    def snapshot(self):
        return LabSnapshot(self)

    def close(self):
        pass


class LabSnapshot(Snapshot):
    def __init__(self, sandbox):
        self.kept = sandbox.world, sandbox.state, sandbox.depth

    def fork(self, count):
        return [LabSandbox(*self.kept) for _ in range(count)]

    def release(self):
        pass


class LabPrompter:
    """A conversation is the list of states."""

    windowed = False

    def first(self, observation):
        return Conversation([0])

    def observe(self, conversation, action_ids, observation, action=None):
        return Conversation([*conversation.ids, int(observation.text)], [1])

    def read(self, conversation, action_ids, admissible):
        return Answer(str(action_ids[0]), str(action_ids[0]), True)

    def forced_tokens(self, action_ids, admissible, tools):
        return 0


def draw(seed, kind, index, depth):
    return drawn(seed, f"{kind}/{index}/{depth}") / 2**32


def really_rolled(world, config, seed):
    async def generate(prompt, most, place):
        index, depth = map(int, place.split("/"))
        state = prompt[-1]
        for _ in range(random.Random(place).randrange(3)):
            await asyncio.sleep(0)
        action = int(np.searchsorted(world.cumulative[state], draw(seed, "action", index, depth), side="right"))
        return Generation([action], [0.0], [world.entropy[state]], state_value=world.value[depth][state])

    with ThreadPoolExecutor(2) as threads:
        rollout = configured_rollout(
            config, generate=generate, executor=threads, prompter=LabPrompter(), max_prompt_tokens=99,
            max_response_tokens=999, chance=lambda place: draw(seed, "chance", *map(int, place.split("/"))),
        )  # fmt: skip
        rollout.world = LabSandbox(world)
        return asyncio.run(rollout.run("task"))


def shape(forest):
    """Of every trajectory: where it forked, its return, and of its turns what a selector or an estimator sees."""
    order = {}
    depths = []
    for i, (p, t) in enumerate(zip(forest.parent.tolist(), forest.trajectory.tolist())):
        depths.append(0 if p < 0 else depths[p] + 1)
        start = order.setdefault(t, [(int(forest.trajectory[p]), depths[p]) if p >= 0 else None])
        columns = (forest.reward, forest.score, forest.state_value, forest.fair)
        start.append(tuple(float(c[i]) for c in columns))
    return [(order[t], float(r)) for t, r in enumerate(forest.leaf_return)]


CONFIGS = {name: partial(METHODS[name].config, 6, 5) for name in METHODS} | {
    name: partial(build, user, preset)
    for name, preset, user in (
        ("paper, leaves", "paper", {"env": {"max_turns": 6}}),
        ("threshold, nested", "paper_threshold", {"env": {"max_turns": 6}, "branch": {"depth": 3, "threshold": 0.6}}),
        ("every", "plain", {"env": {"max_turns": 6}, "branch": {"selector": "every"}, "budget": {"limit": 9}}),
        (
            "random, many roots",
            "plain",
            {
                "env": {"max_turns": 6},
                "branch": {"selector": "random", "share": 0.5, "root_samples": 3, "depth": 2, "forks": 2},
                "budget": {"limit": 40, "unit": "env_steps", "fill": "root"},
            },
        ),
        (
            "random nodes",
            "plain",
            {
                "env": {"max_turns": 6},
                "branch": {"selector": "random_nodes", "nodes": 2, "expansions": 3, "forks": 1, "depth": 9},
                "budget": {"limit": 7, "fill": "none"},
            },
        ),
        (
            "entropy rise",
            "plain",
            {
                "env": {"max_turns": 6},
                "branch": {"selector": "entropy_rise", "root_samples": 3, "forks": 1, "depth": 9},
                "budget": {"limit": 9},
            },
        ),
        ("quantile", "plain", {"env": {"max_turns": 6}, "branch": {"selector": "quantile"}, "budget": {"limit": 6}}),
    )
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_draws_give_the_real_rollouts_trees(name):
    config, forked = CONFIGS[name](), 0
    for family in FAMILIES.values():
        tasks, policy = sampled(family)
        for seed in range(3):
            world = world_of(tasks, 0, policy, tasks.values(policy))
            tree = really_rolled(world, config, seed)
            limits = config.budget
            roller = Roller(
                world, config.branch, Budget(limits.unit, limits.limit, 6, 1),
                partial(draw, seed, "action"), partial(draw, seed, "chance"),
                limits.fill == "root", 1 if config.trunk_is_sibling else 2,
            ).run()  # fmt: skip
            expected, (found, _) = Forest.of({"a": tree}, {"a": "a"}), forest_of([roller])
            assert shape(found) == shape(expected)
            assert found.won.tolist() == expected.won.tolist() and found.depth.tolist() == expected.depth.tolist()
            forked += sum(parent >= 0 for parent, _, _ in roller.starts)
    assert (forked > 0) == (config.branch.selector.NAME != "none")


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_values_are_what_rollouts_return(name):
    tasks, policy = sampled(FAMILIES[name], 3)
    values, rng = tasks.values(policy), np.random.default_rng(0)
    config = build({"env": {"max_turns": 6}, "budget": {"limit": 6000, "unit": "leaves"},
                    "branch": {"selector": "none", "root_samples": 6000}}, "plain")  # fmt: skip
    roller = Roller(
        world_of(tasks, 1, policy, values), config.branch, Budget("leaves", 6000, 6, 1),
        lambda i, d: rng.random(), lambda i, d: rng.random(),
    ).run()  # fmt: skip
    forest, turn = forest_of([roller])
    returns = forest.leaf_return[forest.trajectory].numpy()
    for depth, state in ((0, 0), *list(zip(turn["depth"].tolist(), turn["state"].tolist()))[3:6]):
        at = ((turn["depth"] == depth) & (turn["state"] == state)).numpy()
        error = returns[at].std() / at.sum() ** 0.5
        assert abs(returns[at].mean() - values[1, depth, state]) < 4 * error + 1e-9


TINY = {"updates": 3, "until": 0.99, "level": 0.8, "samples": 5, "learning_rate": 0.05, "noise": 0.02}


@pytest.mark.parametrize("family", ["traps", "fresh"])
@pytest.mark.parametrize("method", ["tree_critic_gated", "gae", "paper_threshold"])
def test_a_seed_decides_a_run(family, method):
    first, again, other = (run.train(FAMILIES[family], METHODS[method], TINY, seed) for seed in (0, 0, 1))
    assert first == again and first != other


def test_finished_blocks_are_not_done_again(tmp_path, monkeypatch):
    config = TINY | {"block": 1, "families": {"tiny": {"turns": 4, "right": 1, "actions": 2, "tasks": 2}}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    done, train = [], run.train

    def counted(family, method, training, seed):
        if seed == 1 and "crash" in done:
            done.remove("crash")
            raise KeyboardInterrupt
        done.append(seed)
        return train(family, method, training, seed)

    monkeypatch.setattr(run, "train", counted)
    command = [
        "--families",
        "tiny",
        "--methods",
        "rloo",
        "--seeds",
        "3",
        "--config",
        str(file),
        "--runs",
        str(tmp_path),
    ]
    command += ["--results", str(tmp_path / "results"), "--name", "x"]
    done.append("crash")
    with pytest.raises(KeyboardInterrupt):
        run.main(command)
    assert done == [0]
    run.main(command)
    assert done == [0, 1, 2]
    run.main([*command, "--set", "noise=0.5"])
    assert done == [0, 1, 2, 0, 1, 2], "another setting is another run"
    found = json.loads((tmp_path / "results" / "lab_x.json").read_text())
    assert found["summary"]["tiny"]["rloo"]["seeds"] == 3
    assert (tmp_path / "results" / "lab_x.png").exists()
