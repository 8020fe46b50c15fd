"""Per-step numbers: ``compute/*`` for every algorithm, ``tree/*`` about rollouts, ``bpo/*`` about advantages."""

from __future__ import annotations

from typing import Any

import torch

from verl_bpo.trainer.forest import Forest

COMPUTE_COUNTERS = ("env_steps", "generated_tokens", "prefill_tokens", "cached_tokens")
"""Cumulative costs, logged as ``compute/<name>`` (with ``compute/updates``, counted where the update happens)."""


def tree_metrics(forest: Forest) -> dict[str, float]:
    """Shape, cost and failures of this step's trees. Means are over trees; times are seconds in all."""

    def total(key: str) -> float:
        return float(sum(c.get(key, 0) for c in forest.counters))

    trees = max(len(forest.counters), 1)
    usable = forest.usable
    branching = _branching_turns(forest)
    scored = ~forest.score.isnan()
    return {
        "tree/trees": float(len(forest.counters)),
        "tree/leaves": float(usable.sum()) / trees,
        "tree/turns": len(forest.parent) / trees,
        "tree/depth": _mean(forest.depth[usable].double()),
        "tree/branch_points": total("branch_points") / trees,
        "tree/success": _mean((forest.leaf_return[usable] > 0).double()),
        "tree/truncated": _mean(forest.truncated[usable].double()),
        "tree/entropy_at_branch": _mean(forest.score[scored & branching]),
        "tree/entropy_elsewhere": _mean(forest.score[scored & ~branching]),
        "tree/failed_branches": total("failed"),
        "tree/recoveries": total("recoveries"),
        "tree/invalid_actions": total("invalid_actions") / max(len(forest.parent), 1),
        "tree/snapshots": total("snapshots"),
        "tree/forks": total("forks"),
        "tree/filled_roots": total("filled_roots"),
        "tree/snapshot_seconds": total("snapshot_seconds"),
        "tree/fork_seconds": total("fork_seconds"),
        "tree/reset_seconds": total("reset_seconds"),
        "tree/cached_share": total("cached_tokens") / max(total("cached_tokens") + total("prefill_tokens"), 1),
    }


def advantage_metrics(forest: Forest, result: Any) -> dict[str, float]:
    """What the estimator made of the trees."""
    return {
        "bpo/advantage_mean": float(result.advantage_mean),
        "bpo/advantage_std": float(result.advantage_std),
        "bpo/sibling_return_variance": float(result.sibling_return_variance),
        "bpo/prefix_explained_share": float(result.prefix_explained_share),
        "bpo/zero_advantage_groups": float(result.zero_advantage_share),
        "bpo/sibling_groups": float(result.num_groups),
        "bpo/turns_without_siblings": 1.0 - _mean(result.valid.double()),
    }


def _branching_turns(forest: Forest) -> torch.Tensor:
    """[N] whether a turn was taken where its tree branched below the initial state."""
    inner = forest.parent >= 0
    counts = torch.bincount(forest.parent[inner], minlength=max(len(forest.parent), 1))
    return inner & (counts[forest.parent.clamp(min=0)] > 1)


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0
