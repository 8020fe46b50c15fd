"""From ``bpo.*`` to a tree rollout."""

from __future__ import annotations

from typing import Any

from verl_bpo.config.schema import BPOConfig
from verl_bpo.tree.branching import Branching
from verl_bpo.tree.budget import Budget
from verl_bpo.tree.rollout import TreeRollout
from verl_bpo.tree.selectors import Choosing


def configured_rollout(config: BPOConfig, *, lesson: float | None = None, **parts: Any) -> TreeRollout:
    """One that branches and spends as ``config`` says; its world is opened later.

    Args:
        lesson: what the selector has learnt in past training steps.
        parts: the other fields.
    """
    branch: Branching = config.branch
    if isinstance(branch.selector, Choosing):
        branch = branch.model_copy(update={"selector": branch.selector.knowing(lesson)})
    limits, env = config.budget, config.env
    budget = Budget(limits.unit, limits.limit, env.max_turns, env.max_action_tokens)
    return TreeRollout(
        world=None,
        branch=branch,
        budget=budget,
        fill=limits.fill == "root",
        retries=config.faults.retries,
        least_forks=1 if config.trunk_is_sibling else 2,
        digests=config.asks_for_digests,
        **parts,
    )
