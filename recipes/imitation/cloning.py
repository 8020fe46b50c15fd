"""Behaviour cloning: supervised learning of the demonstrations' actions, token by token.

The conversations are those of :mod:`verl_bpo.tree.prompting`: the policy meets in rollouts what it was trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from recipes.imitation.demonstrations import Demonstration
from recipes.imitation.held_out import Measurement, measure
from recipes.imitation.options import ImitationOptions
from verl_bpo.generation.generator import ContinuousBatcher
from verl_bpo.sandbox.base import Environment
from verl_bpo.tree.prompting import Prompter


@dataclass(frozen=True)
class Example:
    """A demonstration in tokens. ``mask`` is True on action tokens, which alone are learned."""

    ids: list[int]
    mask: list[bool]


def encode(prompter: Prompter, demonstration: Demonstration) -> list[Example]:
    """A demonstration exactly as a rollout would have produced it: one example, or in ``window`` context one a turn."""
    conversation = prompter.first(demonstration.observations[0])
    examples, mask = [], [False] * len(conversation.ids)
    for turn, action in enumerate(demonstration.actions):
        action_ids = prompter.action_ids(action)
        mask += [demonstration.learned[turn]] * len(action_ids)
        last = turn + 1 == len(demonstration.actions)
        if (last or prompter.windowed) and any(mask):
            examples.append(Example([*conversation.ids, *action_ids], mask))
        if not last:
            conversation = prompter.observe(conversation, action_ids, demonstration.observations[turn + 1], action)
            mask = [False] * len(conversation.ids) if prompter.windowed else mask + [False] * len(conversation.added)
    return examples


def batches(examples: Sequence[Example], batch_size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Endless shuffled batches of examples of like length, so that little is padded."""
    while True:
        order = sorted(examples, key=lambda example: len(example.ids) * rng.uniform(0.9, 1.1))
        groups = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        rng.shuffle(groups)
        yield from groups


def cloning_loss(model: Any, batch: Sequence[Example]) -> torch.Tensor:
    """Mean negative log-likelihood of the action tokens, in nats."""
    width = max(len(example.ids) for example in batch)
    ids = torch.tensor([example.ids + [0] * (width - len(example.ids)) for example in batch], device=model.device)
    mask = torch.tensor(
        [example.mask + [False] * (width - len(example.mask)) for example in batch], device=model.device
    )
    # Padding stands on the right, where a causal model's real tokens can't see it: no attention mask is needed. Only
    # the states that predict an action token go through the output layer.
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(states[:, :-1][mask[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][mask[:, 1:]])


def clone(
    model: Any,
    prompter: Prompter,
    examples: Sequence[Example],
    environments: Sequence[Environment],
    held_out: Sequence[str],
    options: ImitationOptions,
) -> dict[str, Any]:
    """Supervised fine-tuning of ``model``, in place, until it wins often enough or the steps are spent.

    Returns:
        ``steps``, ``loss`` (mean over the last ``check_every`` steps), ``measured`` (the last one).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    lost = (1 - options.decay) / options.steps  # a step
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0) * (1 - lost * step))
    source = batches(examples, options.batch_size, random.Random(options.seed))
    batcher = ContinuousBatcher(model, seed=options.seed)
    losses: list[float] = []
    measured: Measurement | None = None
    with tqdm(total=options.steps, desc="behaviour cloning", unit="step") as bar:
        for step in range(1, options.steps + 1):
            model.train()
            loss = cloning_loss(model, next(source))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if step % options.check_every == 0 or step == options.steps:
                model.eval()
                batcher.weights_changed()
                measured = measure(
                    batcher, prompter, environments, held_out, options.max_turns, options.max_action_tokens
                )
            recent = losses[-options.check_every :]
            mean_loss = sum(recent) / len(recent)
            bar.set_postfix(loss=f"{mean_loss:.3f}", **({"success": f"{measured.success:.0%}"} if measured else {}))
            bar.update()
            if step % options.check_every == 0 and measured.success >= options.until_success:
                break
    return {"steps": step, "loss": mean_loss, "measured": measured}
