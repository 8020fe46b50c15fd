"""Per-step numbers: ``compute/*`` for every algorithm, ``tree/*`` about rollouts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from verl_bpo.tree.forest import Forest
from verl_bpo.tree.topology import CAUSES, Tree

COMPUTE_COUNTERS = ("env_steps", "replayed_steps", "generated_tokens", "prefill_tokens", "cached_tokens")
"""Cumulative costs, logged as ``compute/<name>`` (with ``compute/updates``, counted where the update happens)."""

_MEAN = re.compile(r"(?P<section>val-core|val-aux)/(?P<source>.+)/(?P<key>[^/]+)/mean@(?P<n>\d+)")

BLIND = 0.05
"""Nats below which an entropy is next to 0."""


def tree_metrics(forest: Forest) -> dict[str, float]:
    """Shape, cost and failures of this step's trees. Means are over trees; times are seconds in all."""

    def total(key: str) -> float:
        return float(sum(tree.counters.get(key, 0) for tree in forest.trees.values()))

    trees = max(len(forest.trees), 1)
    usable = forest.usable
    branching = _branching_turns(forest)
    scored, valued = ~forest.score.isnan(), ~forest.state_value.isnan()
    found = {
        "tree/trees": float(len(forest.trees)),
        "tree/leaves": float(usable.sum()) / trees,
        "tree/turns": len(forest.parent) / trees,
        "tree/depth": _mean(forest.depth[usable].double()),
        "tree/branch_points": total("branch_points") / trees,
        "tree/success": _mean(forest.won[usable].double()),
        "tree/return": _mean(forest.leaf_return[usable]),
        "tree/truncated": _mean(forest.truncated[usable].double()),
        "tree/entropy_at_branch": _mean(forest.score[scored & branching]),
        "tree/entropy_elsewhere": _mean(forest.score[scored & ~branching]),
        "tree/failed_branches": total("failed"),
        "tree/lost_trees": float(sum(not any(tree.usable()) for tree in forest.trees.values())),
        **_lost_metrics(lost_shares(forest.trees.values())),
        "tree/retries": total("retries"),
        "tree/prompts_too_long": total("too_long"),
        "tree/recoveries": total("recoveries"),
        "tree/replayed_steps": total("replayed_steps"),
        "tree/unjudged": total("unjudged"),
        "tree/invalid_actions": total("invalid_actions") / max(len(forest.parent), 1),
        "tree/snapshots": total("snapshots"),
        "tree/forks": total("forks"),
        "tree/filled_roots": total("filled_roots"),
        "tree/snapshot_seconds": total("snapshot_seconds"),
        "tree/fork_seconds": total("fork_seconds"),
        "tree/reset_seconds": total("reset_seconds"),
        "tree/cached_share": total("cached_tokens") / max(total("cached_tokens") + total("prefill_tokens"), 1),
    }
    reasons = {key for tree in forest.trees.values() for key in tree.counters if key.startswith("unjudged/")}
    found |= {f"tree/{key}": total(key) for key in sorted(reasons)}
    if bool(valued.any()):
        found["tree/value_at_branch"] = _mean(forest.state_value[valued & branching])
        found["tree/value_elsewhere"] = _mean(forest.state_value[valued & ~branching])
    return found


def lost_shares(trees: Collection[Tree]) -> dict[str, float]:
    """Share of trajectories that were lost to their environment, by cause, the likeliest first; a mean over trees."""
    lost: Counter[str] = Counter()
    for tree in trees:
        lost.update(tree.lost())
    return {cause: share / len(trees) for cause, share in lost.most_common()}


def _lost_metrics(shares: Mapping[str, float]) -> dict[str, float]:
    by_cause = {f"tree/lost_share/{cause}": shares.get(cause, 0.0) for cause in (*CAUSES.values(), "other")}
    return {"tree/lost_share": sum(shares.values()), **by_cause}


def blind_entropy(score: torch.Tensor) -> bool:
    """Whether entropies of decision points (nats, NaN where there is none) are next to 0 in 19 of 20, and so can't tell where
    to branch."""
    found = score[~score.isnan()]
    return bool(len(found)) and float(found.quantile(0.95)) < BLIND


def success_by_type(data_sources: Sequence[str], infos: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Share of validation episodes won, and their number, for each type of task of each data source.

    Args:
        data_sources: one an episode.
        infos: verl's ``reward_extra_info`` by key, one value an episode, None where an episode lacks it.
    """
    won: dict[str, list[float]] = defaultdict(list)
    for source, kind, success in zip(data_sources, infos.get("task_type", ()), infos.get("success", ())):
        if kind is not None and success is not None:
            won[f"val-type/{source}/{kind}"].append(float(success))
    metrics = {f"{key}/success": sum(values) / len(values) for key, values in won.items()}
    return metrics | {f"{key}/episodes": float(len(values)) for key, values in won.items()}


def without_lost(
    metrics: Mapping[str, float],
    data_sources: Sequence[str],
    uids: Sequence[str],
    infos: Mapping[str, Sequence[Any]],
    episodes: int,
) -> dict[str, float]:
    """A validation's metrics, in which each mean is one over all prompts of which an episode was played to an end.

    verl names the mean over a prompt's k episodes ``mean@k``: of prompts that lost one it would stand under a name of its own,
    and the usual name would hold those prompts alone that lost none.

    Args:
        metrics: verl's, of the episodes below.
        data_sources, uids: one an episode, those lost left out.
        infos: verl's ``reward_extra_info`` by key, likewise.
        episodes: of each prompt, those lost included.
    """
    prompts: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, values in infos.items():
        for source, uid, value in zip(data_sources, uids, values):
            if value is not None and not isinstance(value, str):
                prompts[source, key][uid].append(float(value))
    named = [match for name in metrics if (match := _MEAN.fullmatch(name))]
    core = {(match["source"], match["key"]) for match in named if match["section"] == "val-core"}
    kept = {name: value for name, value in metrics.items() if not _MEAN.fullmatch(name)}
    for (source, key), played in prompts.items():
        section = "val-core" if (source, key) in core else "val-aux"
        means = [sum(values) / len(values) for values in played.values()]
        kept[f"{section}/{source}/{key}/mean@{episodes}"] = sum(means) / len(means)
    return kept


def _branching_turns(forest: Forest) -> torch.Tensor:
    """[N] whether a turn was taken where its tree branched below the initial state."""
    inner = forest.parent >= 0
    counts = torch.bincount(forest.parent[inner], minlength=max(len(forest.parent), 1))
    return inner & (counts[forest.parent.clamp(min=0)] > 1)


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0
