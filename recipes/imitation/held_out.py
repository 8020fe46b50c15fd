"""How a policy does on held-out tasks: it plays each once in the real environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_bpo.generation.generator import Completion, ContinuousBatcher
from verl_bpo.generation.sampling import SamplingParams
from verl_bpo.sandbox.base import Environment, is_won
from verl_bpo.tree.prompting import Prompter


@dataclass(frozen=True)
class Measurement:
    """What sampled episodes of several tasks came to."""

    success: float
    turns: float
    """Mean turns per episode."""
    action_tokens: float
    """Mean tokens per action."""
    context_tokens: float
    """Mean tokens of a finished conversation."""
    entropy: float
    """Mean true entropy per action token, in nats."""
    valid: float
    """Share of actions that were valid."""


def measure(
    batcher: ContinuousBatcher,
    prompter: Prompter,
    environments: Sequence[Environment],
    tasks: Sequence[str],
    max_turns: int,
    max_action_tokens: int,
) -> Measurement:
    """Play each task once in the real environment, sampling at temperature 1.

    Args:
        batcher: generates from the policy; its seed makes the episodes.
        environments: one a task.
    """
    params = SamplingParams(max_tokens=max_action_tokens, stop_token_ids=(prompter.end_of_turn_id,))
    observations = [environment.reset(task) for environment, task in zip(environments, tasks)]
    conversations = [prompter.first(observation) for observation in observations]
    returns, valid = [0.0] * len(tasks), 0
    sampled: list[Completion] = []
    live = list(range(len(tasks)))
    for _ in range(max_turns):
        completions = batcher.generate([conversations[i].ids for i in live], params)
        sampled += completions
        for i, completion in zip(live, completions):
            text = prompter.decode(completion.token_ids)
            action, is_valid = prompter.parse(text, observations[i].actions)
            if action is None:
                observations[i] = prompter.no_action(text, observations[i].actions)
            else:
                observations[i] = environments[i].step(action)
            returns[i] += observations[i].reward
            valid += is_valid
            conversations[i] = prompter.observe(conversations[i], completion.token_ids, observations[i], action)
        live = [i for i in live if not observations[i].done]
        if not live:
            break
    entropies = [entropy for completion in sampled for entropy in completion.entropies]
    won = [is_won(observation.info, episode) for observation, episode in zip(observations, returns)]
    return Measurement(
        success=sum(won) / len(tasks),
        turns=len(sampled) / len(tasks),
        action_tokens=len(entropies) / len(sampled),
        context_tokens=sum(len(conversation.ids) for conversation in conversations) / len(tasks),
        entropy=sum(entropies) / len(entropies),
        valid=valid / len(sampled),
    )
