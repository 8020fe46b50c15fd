"""Demonstrations: an environment's expert plays its tasks, and what it saw and did is recorded."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from verl_bpo.sandbox.base import Environment, Observation, is_won
from verl_bpo.tree.prompting import PromptConfig


@dataclass(frozen=True)
class Demonstration:
    """One solved task: ``observations[t]`` is what the expert saw before ``actions[t]``."""

    observations: list[Observation]
    actions: list[str]
    learned: list[bool]
    """Per action: False for a mistake, which is only seen."""


def record_demonstrations(
    environment: Environment,
    tasks: Sequence[str],
    detours: float = 0.0,
    max_turns: int = 1000,
    seed: int = 0,
    repeats: int = 1,
    detour_actions: str = "",
    mistakes: float = 0.0,
) -> list[Demonstration]:
    """Play each task's expert actions; a task that they don't win is left out.

    Args:
        detours: expected share of actions that are harmless detours.
        max_turns: no detours are added beyond this length.
        seed: of the detours.
        repeats: demonstrations of each task, which differ in their detours.
        detour_actions: regular expression that matches the beginning of what may be a detour.
        mistakes: expected share of turns before which an action of an earlier demonstration is played, harmless like detours.

    Raises:
        ValueError: they win none, or detours are asked for where the environment lists no admissible actions.
    """
    rng = random.Random(seed)
    demonstrations = []
    known: list[str] = []  # actions of earlier demonstrations, most of them of other tasks
    # One after the other, while the environment has the task at hand.
    played = [task for task in tasks for _ in range(repeats)]
    for task in tqdm(played, desc="demonstrations", unit="task", leave=False):
        observation = environment.reset(task)
        observations, actions, learned, plan = [observation], [], [], list(environment.expert_actions() or ())
        if detours and observation.actions is None:
            raise ValueError(f"{type(environment).__name__} lists no actions to make --detours of")
        while plan and not observations[-1].done:
            action = slip = None
            room = len(actions) + len(plan) < max_turns
            if rng.random() < detours and room:
                possible = [a for a in observations[-1].actions or () if re.match(detour_actions, a)]
                action = _detour(environment, plan, possible, rng)
            if mistakes and action is None and room and rng.random() < mistakes:
                action = slip = _detour(environment, plan, rng.sample(known, min(3, len(known))), rng)
            learned.append(slip is None)
            actions.append(plan.pop(0) if action is None else action)
            observations.append(environment.step(actions[-1]))
        if is_won(observations[-1].info, sum(o.reward for o in observations)):
            demonstrations.append(Demonstration(observations[:-1], actions, learned))
        if mistakes:
            known += dict.fromkeys(actions)
    if not demonstrations:
        raise ValueError(f"none of {len(tasks)} tasks of {type(environment).__name__} is won by its expert actions")
    return demonstrations


def _detour(environment: Environment, plan: Sequence[str], actions: Sequence[str], rng: random.Random) -> str | None:
    """A random action off the plan after which the plan still wins; None when a few tries find none."""
    others = [action for action in actions if action.lower() != plan[0].lower()]
    for action in rng.sample(others, min(3, len(others))):
        state = environment.save_state()
        rest = []
        for step in (action, *plan):
            rest.append(environment.step(step))
            if rest[-1].done:
                break
        environment.load_state(state)
        if len(rest) == 1 + len(plan) and is_won(rest[-1].info, sum(o.reward for o in rest)):
            return action
    return None


def texts_of(demonstrations: Sequence[Demonstration], prompt: PromptConfig) -> Iterator[str]:
    """Every text that a conversation about these tasks is made of."""
    frame = "<think></think><action></action>" if prompt.template == "think_action" else ""
    yield from (prompt.system_text, "system\n", "user\n", "assistant\n", "\nActions:\n", frame)
    for demonstration in demonstrations:
        yield from demonstration.actions
        for observation in demonstration.observations:
            yield observation.text
            yield "\n".join(observation.actions or ())
