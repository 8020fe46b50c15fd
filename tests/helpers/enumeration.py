"""Every outcome of the real tree rollout on a small decision process, with its probability."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import log, prod
from typing import ClassVar

import torch

from verl_bpo.advantages.estimator import Estimate
from verl_bpo.config.schema import BPOConfig
from verl_bpo.generation.configured import configured_rollout
from verl_bpo.sandbox.base import Observation, Sandbox, Snapshot
from verl_bpo.tree.draws import drawn
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.prompting import Answer, Conversation
from verl_bpo.tree.rollout import Generation
from verl_bpo.tree.topology import Tree


@dataclass
class Process:
    """A state is what was done so far, a word over ``a`` and ``b``; the episode ends after ``horizon`` letters."""

    horizon: int
    p_a: dict[str, float] = field(default_factory=dict)
    """Probability of ``a`` in a state."""
    returns: dict[str, float] = field(default_factory=dict)
    """Of whole episodes."""
    v: dict[str, float] = field(default_factory=dict)
    """What the rollout's readout says of a state; empty: there is none."""

    @classmethod
    def drawn(cls, seed: int, horizon: int, graded: bool) -> Process:
        process = cls(horizon)
        words = [""]
        for depth in range(horizon + 1):
            for word in words:
                u = drawn(seed, word) / 2**32
                if depth < horizon:
                    process.p_a[word] = 0.2 + 0.6 * u
                else:
                    process.returns[word] = u if graded else float(u > 0.5)
            words = [word + letter for word in words for letter in "ab"]
        return process

    def probability(self, state: str, letter: str) -> float:
        return self.p_a[state] if letter == "a" else 1 - self.p_a[state]

    def value(self, state: str) -> float:
        if len(state) == self.horizon:
            return self.returns[state]
        return sum(self.probability(state, letter) * self.value(state + letter) for letter in "ab")

    def entropy(self, state: str) -> float:
        return -sum(p * log(p) for p in (self.p_a[state], 1 - self.p_a[state]))


class _Undecided(Exception):
    """An action that no outcome has fixed yet: its place in the tree."""


class _World:
    recoveries = replayed_steps = 0
    volatile: ClassVar = {}

    def __init__(self, process: Process) -> None:
        self.process = process

    def reset(self, task: str, seed: int = 0, row=None) -> tuple[Sandbox, Observation]:
        return _Sandbox(self.process, ""), Observation("")


class _Sandbox(Sandbox):
    def __init__(self, process: Process, state: str) -> None:
        self.process, self.state, self.env_steps = process, state, 0

    def reset(self, task: str, seed: int = 0, row=None) -> Observation:
        raise NotImplementedError

    def step(self, action: str) -> Observation:
        self.state += action
        self.env_steps += 1
        ended = len(self.state) == self.process.horizon
        reward = self.process.returns[self.state] if ended else 0.0
        return Observation(self.state, reward, terminated=ended, info={"won": reward > 0.5})

    def snapshot(self) -> Snapshot:
        return _Snapshot(self.process, self.state)

    def close(self) -> None:
        pass


class _Snapshot(Snapshot):
    def __init__(self, process: Process, state: str) -> None:
        self.process, self.state = process, state

    def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        return [_Sandbox(self.process, self.state) for _ in range(count)]

    def release(self) -> None:
        pass


class _Prompter:
    windowed = True

    def first(self, observation: Observation) -> Conversation:
        return Conversation([0])

    def observe(self, conversation, action_ids, observation, action=None) -> Conversation:
        return Conversation([*conversation.ids, *action_ids])

    def read(self, conversation, action_ids: list[int], admissible) -> Answer:
        text = "".join(map(chr, action_ids))
        return Answer(text, text, True)

    def forced_tokens(self, action_ids, admissible, tools) -> int:
        return 0


def outcomes(process: Process, config: BPOConfig) -> Iterator[tuple[float, Tree]]:
    """Every tree that can be rolled and its probability."""

    def roll(fixed: dict[str, str]) -> Tree:
        async def generate(prompt_ids: list[int], most: int, place: str) -> Generation:
            state = "".join(map(chr, prompt_ids[1:]))
            if place not in fixed:
                raise _Undecided(place)
            letter = fixed[place]
            return Generation(
                [ord(letter)], [log(process.probability(state, letter))], [process.entropy(state)],
                state_value=process.v.get(state),
            )  # fmt: skip

        with ThreadPoolExecutor(1) as threads:
            rollout = configured_rollout(
                config, generate=generate, executor=threads, prompter=_Prompter(), max_prompt_tokens=99,
                max_response_tokens=99, chance=lambda place: drawn(5, place) / 2**32,
            )  # fmt: skip
            rollout.world = _World(process)
            return asyncio.run(rollout.run("task"))

    open_ends: list[dict[str, str]] = [{}]
    while open_ends:
        fixed = open_ends.pop()
        try:
            tree = roll(fixed)
        except _Undecided as undecided:
            open_ends += [{**fixed, str(undecided): letter} for letter in "ab"]
            continue
        yield prod(process.probability(_state(tree, i), n.action_text) for i, n in enumerate(tree.nodes)), tree


def _state(tree: Tree, node: int) -> str:
    """The state in which a turn was taken."""
    return "".join(tree.nodes[i].action_text for i in tree.path(tree.nodes[node].parent))


def expected_gradient(
    process: Process, config: BPOConfig, judge: Callable[[Forest], Estimate] | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Of the logit of ``a`` in every state, the other's being its negative: expected over all trees, and the true direction
    pi (Q - V). ``judge`` None: by ``config.advantage``."""
    found = dict.fromkeys(process.p_a, 0.0)
    total = 0.0
    for probability, tree in outcomes(process, config):
        estimate = (judge or config.advantage)(Forest.of({"p_0": tree}, {"p_0": "p"}))
        total += probability
        for i, (node, a) in enumerate(zip(tree.nodes, (estimate.advantage * estimate.weight).tolist())):
            state = _state(tree, i)
            found[state] += probability * a * (float(node.action_text == "a") - process.p_a[state])
    torch.testing.assert_close(total, 1.0)
    true = {s: p * (process.value(s + "a") - process.value(s)) for s, p in process.p_a.items()}
    return found, true
