"""From a batch of rows to one forest of turns, and back to tokens. Pure data, no verl, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_bpo.tree.topology import ROOT


@dataclass(frozen=True)
class Forest:
    """The N turns and L trajectories of all trees of a global batch, trees concatenated, parents before children.

    A turn lost with a failed trajectory stays in the forest: forks may hang below it.

    Raises:
        ValueError: shapes, dtypes or ids don't fit, or a trajectory's turns are not one chain.
    """

    parent: Tensor
    """int64 [N]: the turn before, -1 for a turn taken in the initial state."""
    trajectory: Tensor
    """int64 [N]: the rollout that the turn belongs to, 0..L-1. Its first turn's parent is the branch point or -1."""
    prompt: Tensor
    """int64 [N]: the task. All turns with parent -1 of one prompt are siblings, whichever tree they stand in."""
    exchangeable: Tensor
    """bool [N]: False where the action was not a fair draw from the policy given its state, as the trunk's at a branch
    point that was chosen by looking at what the trunk did there."""
    reward: Tensor
    """float32 or float64 [N]: what the turn itself earned."""
    score: Tensor
    """Likewise: entropy signal (nats) of the state that the turn was taken in; NaN where there is none."""
    state_value: Tensor
    """Likewise: V of that state by the rollout engine's value readout; NaN where there is none."""
    leaf_return: Tensor
    """float32 or float64 [L]: rewards summed from the initial state to the trajectory's leaf. Ignored if not usable."""
    usable: Tensor
    """bool [L]: False for a trajectory lost to a failure. Its turns get no advantage and stand in no baseline."""
    truncated: Tensor
    """bool [L]: a limit ended the trajectory, not its environment."""
    won: Tensor
    """bool [L]: it did the task."""
    depth: Tensor
    """int64 [L]: turns from the initial state to its leaf; 0 if not usable."""
    offset: dict[str, int] = field(default_factory=dict)
    """Session -> shift of its turns' ids."""
    tree_sizes: list[int] = field(default_factory=list)
    """Turns of each tree."""
    counters: list[dict[str, float]] = field(default_factory=list)
    """What each tree cost."""
    failures: list[str] = field(default_factory=list)
    asked_scores: list[float] = field(default_factory=list)
    """Scores of the decision points that an online selector was asked about."""

    def __post_init__(self) -> None:
        n, size = self.parent.numel(), self.leaf_return.numel()
        whole, real, yes = (torch.int64,), (torch.float32, torch.float64), (torch.bool,)
        for length, fields in (
            (n, {"parent": whole, "trajectory": whole, "prompt": whole, "exchangeable": yes}),
            (n, {"reward": real, "score": real, "state_value": real}),
            (size, {"leaf_return": real, "usable": yes, "truncated": yes, "won": yes, "depth": whole}),
        ):
            for name, dtypes in fields.items():
                x = getattr(self, name)
                if x.shape != (length,) or x.dtype not in dtypes:
                    wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
                    raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, must be {wanted} ({length},)")
        if not self.leaf_return[self.usable].isfinite().all():
            raise ValueError("leaf_return of a usable trajectory is not finite")
        if n == 0:
            return
        if self.parent.min() < ROOT or (self.parent >= torch.arange(n, device=self.parent.device)).any():
            raise ValueError("parent must be -1 or an earlier turn: parents stand before their children")
        if self.trajectory.min() < 0 or self.trajectory.max() >= size:
            raise ValueError(f"trajectory must lie in 0..{size - 1}, the trajectories that leaf_return lists")
        starts = self.trajectory[~self.trunk]
        continued = self.parent[self.trunk]
        if starts.unique().numel() < starts.numel() or continued.unique().numel() < continued.numel():
            raise ValueError("the turns of one trajectory must form one chain")

    @property
    def trunk(self) -> Tensor:
        """bool [N]: the turn continues its parent's trajectory."""
        return (self.parent != ROOT) & (self.trajectory[self.parent] == self.trajectory)


def build_batch(sessions: dict[str, dict[str, Any]], prompts: dict[str, str]) -> Forest:
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
    return Forest(
        parent=torch.tensor(turns["parent"], dtype=integer),
        trajectory=torch.tensor(turns["trajectory"], dtype=integer),
        prompt=torch.tensor(prompt, dtype=integer),
        exchangeable=torch.tensor(turns["exchangeable"], dtype=boolean),
        reward=torch.tensor(turns["reward"], dtype=real),
        score=torch.tensor(turns["score"], dtype=real),
        state_value=torch.tensor(turns["state_value"], dtype=real),
        leaf_return=torch.tensor(leaves["leaf_return"], dtype=real),
        usable=torch.tensor(leaves["usable"], dtype=boolean),
        truncated=torch.tensor(leaves["truncated"], dtype=boolean),
        won=torch.tensor(leaves["won"], dtype=boolean),
        depth=torch.tensor(leaves["depth"], dtype=integer),
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
