"""A made-up run for report tests: random trees of a household world, and the advantages the trainer would dump."""

from __future__ import annotations

import json
import random
from pathlib import Path

from verl_bpo.advantages.bpo import BPO
from verl_bpo.advantages.estimator import Estimator
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.record import TreeRecord, dump_advantages
from verl_bpo.tree.topology import ROOT, Node, Tree

PLACES = ["fridge 1", "cabinet 3", "sink basin", "desk 1", "garbage can", "drawer 2", "microwave"]
VERBS = ["go to", "open", "take mug from", "put mug in", "look at", "close"]
OPTIONS = {
    "baseline": "loo", "normalize": "none", "leaf_return": "leaf", "weighting": "uniform", "trunk_in_siblings": "auto",
}  # fmt: skip


class FakeRollout:
    """Grows one random tree with the library's own Tree. Success depends on a few turns, so returns differ below them."""

    def __init__(
        self, seed: int, leaves: int = 8, turns: int = 10, roots: int = 1, nesting: int = 1, skill: float = 0.8
    ):
        self.rng = random.Random(seed)
        self.turns, self.skill = turns, skill
        self.tree = Tree(prompt_ids=[1, 2, 3])
        self.luck: dict[int, float] = {ROOT: 1.0}
        self.level: dict[int, int] = {}
        for _ in range(roots):
            self._roll(ROOT, 0)
        while len(self.tree.trajectories) < leaves:
            self._branch(leaves, nesting)
        self.tree.counters = {
            "env_steps": float(len(self.tree.nodes)),
            "generated_tokens": float(sum(len(n.action_ids) for n in self.tree.nodes)),
            "leaves": float(leaves),
        }

    def _branch(self, leaves: int, nesting: int) -> None:
        room = leaves - len(self.tree.trajectories)
        inner = [
            i for i, n in enumerate(self.tree.nodes)
            if self.level[n.trajectory] < nesting and self.tree.trajectories[n.trajectory].leaf != i
            and self.luck[i] > 0
        ]  # fmt: skip
        inner = inner or [0]
        point = self.rng.choice(inner)
        self.tree.trunk_fair[point] = self.rng.random() < 0.7
        level = self.level[self.tree.nodes[point].trajectory] + 1
        for child in self.tree.children(point):
            self.tree.nodes[child].score = self.rng.uniform(1.2, 2.4)
        for _ in range(min(room, self.rng.choice([1, 2, 3]))):
            self._roll(point, level)

    def _roll(self, parent: int, level: int) -> None:
        rng, tree = self.rng, self.tree
        index = tree.add_trajectory(parent)
        self.level[index] = level
        depth = 0 if parent == ROOT else tree.depth(parent)
        end = max(depth + 1, self.turns - rng.randrange(4))
        luck, score = self.luck[parent], rng.uniform(1.2, 2.4) if parent != ROOT else rng.uniform(0, 0.8)
        while depth < end:
            depth += 1
            tokens = rng.randrange(4, 22)
            luck *= rng.random() < self.skill ** (0.5 if depth % 3 else 1.5)
            won = depth == end and luck > 0
            place = rng.choice(PLACES)
            parent = tree.add_node(
                Node(
                    parent=parent,
                    trajectory=index,
                    action_ids=[rng.randrange(1000) for _ in range(tokens)],
                    action_logprobs=[-rng.random() for _ in range(tokens)],
                    action_entropy=[score] + [rng.expovariate(2.5) for _ in range(tokens - 1)],
                    observation_ids=[4, 5, 6],
                    reward=float(won),
                    action_text=f"{rng.choice(VERBS)} {place}",
                    observation_text=f"You arrive at {place}. On it you see mug {rng.randrange(3)}. <b>Bold?</b></script>",
                    actions=tuple(f"{v} {p}" for v in VERBS for p in PLACES[: rng.randrange(2, 7)]),
                    score=score,
                    cached_tokens=40 * depth,
                    prefill_tokens=30,
                    valid_action=rng.random() < 0.95,
                )
            )
            self.luck[parent] = luck
            score = rng.uniform(0, 1.1)
        trajectory = tree.trajectories[index]
        trajectory.end = (
            "failed" if rng.random() < 0.03 else "terminated" if luck or rng.random() < 0.7 else "truncated"
        )
        trajectory.info = {"won": won}


def write_dump(
    folder: Path, steps: dict[int, list[list[Tree]]], judge: Estimator | None = None, name: str = "bpo", **options: str
) -> Path:
    """Write what a run dumps. ``steps``: training step -> prompts -> trees of one prompt; ``judge`` None: BPO."""
    judge = judge or BPO(**OPTIONS | options)
    options = judge.model_dump()
    for kind in ("trees", "advantages"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for step, prompts in steps.items():
        records = [
            TreeRecord(step, f"uid-{step}-{p}", s, "fake", f"games/train/task-{p}.z8", tree)
            for p, trees in enumerate(prompts) for s, tree in enumerate(trees)
        ]  # fmt: skip
        names = [f"{r.uid}_{r.session}" for r in records]
        batch = Forest.of({n: r.tree for n, r in zip(names, records)}, {n: r.uid for n, r in zip(names, records)})
        result = judge(batch)
        with open(folder / "trees" / f"{step:06d}-17.jsonl", "w") as file:
            file.writelines(json.dumps(r.to_dict()) + "\n" for r in records)
        made = [result.record(batch.turns[n], step, r.uid, r.session, options, name) for n, r in zip(names, records)]
        dump_advantages(folder, step, made)
    return folder


def as_release_0_1(folder: Path) -> None:
    """Leave of a dump what 0.1 wrote."""
    for kind, drop in (("advantages", lambda r: r.pop("comparison")), ("trees", _forget)):
        for path in (folder / kind).glob("*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                drop(line)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _forget(record: dict) -> None:
    for name in ("failures", "lessons", "fatal"):
        del record["tree"][name]
    record["tree"]["trunk_exchangeable"] = record["tree"].pop("trunk_fair")


def small_steps(seed: int = 0, count: int = 3) -> dict[int, list[list[Tree]]]:
    """A few steps of three prompts: two trees, one tree with a root group and nested forks, one lone backbone tree."""
    return {
        step: [
            [FakeRollout(seed + 10 * step + i, leaves=6).tree for i in range(2)],
            [FakeRollout(seed + 10 * step + 2, leaves=12, roots=3, nesting=2).tree],
            [FakeRollout(seed + 10 * step + 3, leaves=8).tree],
        ]
        for step in range(1, count + 1)
    }
