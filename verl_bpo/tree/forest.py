"""The turns of a whole batch of trees, as tensors: what estimators and metrics read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from verl_bpo.tree.topology import ROOT, Failure, Tree


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
    fair: Tensor
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
    observed: Tensor | None = None
    """int64 [N]: the state that the turn was taken in, by what was observed there: turns of one prompt with one number were
    taken in one state; -1 where it isn't known. None: nobody told states apart."""
    digest: Tensor | None = None
    """Likewise, by the environment's digest."""
    trees: Mapping[str, Tree] = field(default_factory=dict)
    """By session, in the order of the turns: what it was made of, for what is known of a whole tree."""

    def __post_init__(self) -> None:
        n, size = self.parent.numel(), self.leaf_return.numel()
        whole, real, yes = (torch.int64,), (torch.float32, torch.float64), (torch.bool,)
        for length, fields in (
            (n, {"parent": whole, "trajectory": whole, "prompt": whole, "fair": yes}),
            (n, {"reward": real, "score": real, "state_value": real}),
            (n, {name: whole for name in ("observed", "digest") if getattr(self, name) is not None}),
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

    @cached_property
    def earned_before(self) -> Tensor:
        """[N]: rewards on the way from the initial state to the state that the turn was taken in."""
        total, at = torch.zeros_like(self.reward), self.parent
        while (inner := at != ROOT).any():
            total = torch.where(inner, total + self.reward[at], total)
            at = torch.where(inner, self.parent[at], ROOT)
        return total

    @classmethod
    def of(cls, trees: Mapping[str, Tree], prompts: Mapping[str, str]) -> Forest:
        """The forest of a batch, ids shifted to be global.

        Args:
            trees: by session; skeletons will do.
            prompts: the id of each session's prompt.
        """
        turns: list[tuple] = []
        leaves: list[tuple] = []
        numbers: dict[str, int] = {}
        seen: dict[int | None, int] = {None: -1}
        states: dict[int | None, int] = {None: -1}
        nan = float("nan")
        for session, tree in trees.items():
            shift, leaf_shift = len(turns), len(leaves)
            prompt = numbers.setdefault(prompts[session], len(numbers))
            for node, fair in zip(tree.nodes, tree.fair()):
                turns.append((
                    node.parent + shift if node.parent != ROOT else ROOT, node.trajectory + leaf_shift, prompt, fair,
                    node.reward, nan if node.score is None else node.score,
                    nan if node.state_value is None else node.state_value,
                    seen.setdefault(node.observed, len(seen) - 1), states.setdefault(node.digest, len(states) - 1),
                ))  # fmt: skip
            for t in tree.trajectories:
                found = (tree.trajectory_return(t), tree.won(t), tree.depth(t.leaf)) if t.usable else (0.0, False, 0)
                leaves.append((t.usable, t.end == "truncated", *found))
        parent, trajectory, prompt_id, fair, reward, score, state_value, observed, digest = (
            zip(*turns) if turns else [()] * 9
        )
        usable, truncated, leaf_return, won, depth = zip(*leaves) if leaves else [()] * 5

        def tensor(dtype: torch.dtype, **columns: tuple) -> dict[str, Tensor]:
            return {name: torch.tensor(values, dtype=dtype) for name, values in columns.items()}

        return cls(
            **tensor(torch.int64, parent=parent, trajectory=trajectory, prompt=prompt_id, depth=depth),
            **tensor(torch.int64, observed=observed, digest=digest),
            **tensor(torch.bool, fair=fair, usable=usable, truncated=truncated, won=won),
            **tensor(torch.float64, reward=reward, score=score, state_value=state_value, leaf_return=leaf_return),
            trees=trees,
        )

    @cached_property
    def turns(self) -> dict[str, slice]:
        """Session -> its turns among the N."""
        sizes = [len(tree.nodes) for tree in self.trees.values()]
        return {s: slice(end - size, end) for s, size, end in zip(self.trees, sizes, accumulate(sizes))}

    @property
    def failures(self) -> list[Failure]:
        """Of all trees."""
        return [failure for tree in self.trees.values() for failure in tree.failures]

    @property
    def lessons(self) -> list[float]:
        """Of all trees."""
        return [score for tree in self.trees.values() for score in tree.lessons]
