"""From a batch of rows to one forest of turns, and back to tokens. Pure data, no verl, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from verl_bpo.advantages.bpo import Forest


@dataclass
class TreeBatch:
    """All trees of a batch, concatenated; ids shifted to be global.

    ``turns`` is what the estimators read. Beside it, tensors with N entries a turn (``score``, ``state_value``, NaN where
    there is none, and ``reward``) or L a trajectory (``truncated``, ``won``, ``depth``); ``offset`` maps a session to the
    shift of its turn ids. ``asked_scores`` are those of the decision points that an online selector was asked about.
    """

    turns: Forest
    truncated: torch.Tensor
    won: torch.Tensor
    depth: torch.Tensor
    score: torch.Tensor
    state_value: torch.Tensor
    reward: torch.Tensor
    offset: dict[str, int]
    tree_sizes: list[int]
    counters: list[dict[str, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    asked_scores: list[float] = field(default_factory=list)


def build_batch(sessions: dict[str, dict[str, Any]], prompts: dict[str, str]) -> TreeBatch:
    """Concatenate trees.

    Args:
        sessions: per session the record that travelled with its first row (``topology``, ``counters``, ``failures``
            and, from a rollout, ``scores``).
        prompts: per session the id of its prompt.
    """
    turns: dict[str, list] = {k: [] for k in ("parent", "trajectory", "exchangeable", "score", "state_value", "reward")}
    leaves: dict[str, list] = {k: [] for k in ("leaf_return", "usable", "truncated", "won", "depth")}
    prompt, offset, sizes, counters, failures, asked = [], {}, [], [], [], []
    numbers: dict[str, int] = {}
    for session, record in sessions.items():
        tree = record["topology"]
        shift, leaf_shift = len(turns["parent"]), len(leaves["leaf_return"])
        offset[session] = shift
        sizes.append(len(tree["parent"]))
        turns["parent"] += [p + shift if p >= 0 else -1 for p in tree["parent"]]
        turns["trajectory"] += [t + leaf_shift for t in tree["trajectory"]]
        for key in ("exchangeable", "reward"):
            turns[key] += tree[key]
        for key in ("score", "state_value"):
            turns[key] += [float("nan") if x is None else x for x in tree[key]]
        for key in leaves:
            leaves[key] += tree[key]
        prompt += [numbers.setdefault(prompts[session], len(numbers))] * len(tree["parent"])
        counters.append(record["counters"])
        failures += record["failures"]
        asked += record.get("scores", [])
    integer, boolean, real = torch.long, torch.bool, torch.float64
    return TreeBatch(
        turns=Forest(
            parent=torch.tensor(turns["parent"], dtype=integer),
            trajectory=torch.tensor(turns["trajectory"], dtype=integer),
            prompt=torch.tensor(prompt, dtype=integer),
            leaf_return=torch.tensor(leaves["leaf_return"], dtype=real),
            usable=torch.tensor(leaves["usable"], dtype=boolean),
            exchangeable=torch.tensor(turns["exchangeable"], dtype=boolean),
        ),
        truncated=torch.tensor(leaves["truncated"], dtype=boolean),
        won=torch.tensor(leaves["won"], dtype=boolean),
        depth=torch.tensor(leaves["depth"], dtype=integer),
        score=torch.tensor(turns["score"], dtype=real),
        state_value=torch.tensor(turns["state_value"], dtype=real),
        reward=torch.tensor(turns["reward"], dtype=real),
        offset=offset,
        tree_sizes=sizes,
        counters=counters,
        failures=failures,
        asked_scores=asked,
    )


def spread(values: torch.Tensor, nodes: list[int], starts: list[int], ends: list[int], length: int) -> torch.Tensor:
    """Per-turn ``values`` on the tokens of one row: [length], value of turn ``nodes[i]`` on ``starts[i]:ends[i]``, 0
    elsewhere."""
    out = torch.zeros(length, dtype=values.dtype)
    if nodes:
        begin = torch.tensor(starts)
        lengths = torch.tensor(ends) - begin
        first = torch.repeat_interleave(begin - (lengths.cumsum(0) - lengths), lengths)
        out[first + torch.arange(int(lengths.sum()))] = torch.repeat_interleave(values[torch.tensor(nodes)], lengths)
    return out
