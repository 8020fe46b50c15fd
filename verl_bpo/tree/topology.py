"""A rollout tree as data.

A node is one *turn*: the action that the model sampled and the observation that followed it. It stores only the tokens
it adds. A trajectory is one uninterrupted rollout: the backbone, a further root sample, or a fork; it ends in a leaf. The
path of a leaf runs through the nodes of its own trajectory and, above the branch point, through those of its ancestors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from verl_bpo.sandbox.base import is_won
from verl_bpo.tree.plain import read

ROOT = -1
"""Parent of a node whose action was taken in the initial state."""

End = Literal["terminated", "truncated", "failed"]


@dataclass
class Node:
    """One turn. ``action_*`` lists have one entry per sampled token."""

    parent: int
    trajectory: int
    action_ids: list[int]
    action_logprobs: list[float]
    action_entropy: list[float]
    """True entropy in nats of the distribution that each token was sampled from."""
    observation_ids: list[int] = field(default_factory=list)
    """Everything between this action and the next one in the conversation: template glue, observation, generation
    prompt. Empty at a leaf. In ``window`` context the next prompt is in ``prompt_ids`` instead."""
    prompt_ids: list[int] | None = None
    """``window`` context: the whole prompt that this action was sampled from. None in ``full`` context."""
    reward: float = 0.0
    action_text: str = ""
    observation_text: str = ""
    actions: tuple[str, ...] | None = None
    """Admissible actions in the state where this action was taken."""
    score: float | None = None
    """Entropy signal (nats) of the state in which this action was taken."""
    state_value: float | None = None
    """V of that state by SAPO's value readout, where the rollout engine gives it."""
    observed: int | None = None
    """Identity of that state by what was observed in it, see :class:`verl_bpo.tree.states.StateId`; None in older dumps."""
    digest: int | None = None
    """Its identity by the environment's digest, where rollouts ask for it."""
    cached_tokens: int = 0
    prefill_tokens: int = 0
    valid_action: bool = True
    """Whether the model's text held an action, and an admissible one where the environment lists them."""


@dataclass
class Trajectory:
    """One rollout from ``start`` (its first node) to its leaf.

    ``parent`` is the node after which it was forked, ROOT for root samples. ``fair`` says whether its first
    action is a fair draw from the policy given the state that it starts in; the continuation of a trunk that was forked
    has no trajectory of its own, see :attr:`Tree.trunk_fair`.
    """

    parent: int = ROOT
    start: int = -1
    leaf: int = -1
    end: End | None = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether it reached an end of its own (was not lost to a failure)."""
        return self.leaf >= 0 and self.end in ("terminated", "truncated")


CAUSES = {
    "SandboxCrashed": "crash",
    "SandboxTimeout": "hang",
    "SandboxError": "bad_answer",
    "TaskError": "task",
    "PromptTooLong": "prompt_too_long",
}
"""Name of an error's class -> the cause that its losses are counted under; any other counts as ``other``."""


@dataclass(frozen=True)
class Failure:
    """What a branch, or the whole tree, was lost to."""

    kind: str
    """Name of the error's class."""
    message: str
    trajectory: int | None = None
    """The branch; None where no world could be opened."""

    @classmethod
    def of(cls, error: Exception, trajectory: int | None = None) -> Failure:
        return cls(type(error).__name__, str(error), trajectory)

    @property
    def cause(self) -> str:
        return CAUSES.get(self.kind, "other")

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass
class Tree:
    """All turns sampled for one task, in the order they were sampled (a parent always precedes its children).

    The one form of a tree from the rollout to the report; a :meth:`skeleton` of it travels to the trainer.
    """

    prompt_ids: list[int]
    nodes: list[Node] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    trunk_fair: dict[int, bool] = field(default_factory=dict)
    """Per branch point (the node after which it lies, or ROOT): may the trunk's own continuation stand among the siblings?
    True only when the point was chosen from the state alone."""
    counters: dict[str, float] = field(default_factory=dict)
    """What the tree cost."""
    failures: list[Failure] = field(default_factory=list)
    lessons: list[float] = field(default_factory=list)
    """What the selector's memory is to keep."""
    fatal: str | None = None
    """Why no other rollout of this run would fare better: the run has to stop."""

    def add_trajectory(self, parent: int = ROOT) -> int:
        self.trajectories.append(Trajectory(parent=parent))
        return len(self.trajectories) - 1

    def add_node(self, node: Node) -> int:
        """Append a turn to its trajectory; returns its id."""
        trajectory = self.trajectories[node.trajectory]
        expected = trajectory.parent if trajectory.leaf < 0 else trajectory.leaf
        if node.parent != expected:
            raise ValueError(f"node's parent is {node.parent}, but its trajectory continues after {expected}")
        self.nodes.append(node)
        index = len(self.nodes) - 1
        if trajectory.start < 0:
            trajectory.start = index
        trajectory.leaf = index
        return index

    def path(self, node: int) -> list[int]:
        """Node ids from the initial state down to ``node``, both ends included; empty for ROOT."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def children(self, node: int) -> list[int]:
        return [i for i, other in enumerate(self.nodes) if other.parent == node]

    def depth(self, node: int) -> int:
        """Number of turns on the path to ``node``; 0 for ROOT."""
        return len(self.path(node))

    def branch_points(self) -> list[int]:
        """Nodes (or ROOT) after which more than one usable action was taken."""
        starts = {t.start for t in self.trajectories}
        counts: Counter[int] = Counter(t.parent for t in self.usable())
        continued = {
            node.parent
            for i, node in enumerate(self.nodes)
            if i not in starts and self.trajectories[node.trajectory].usable
        }
        return sorted(p for p, n in counts.items() if n + (p in continued) > 1)

    def usable(self) -> Iterator[Trajectory]:
        """Trajectories that reached an end of their own (not lost to a failure)."""
        return (t for t in self.trajectories if t.usable)

    def lost(self) -> dict[str, float]:
        """Share of its trajectories that were lost, by cause; a tree that has none was lost as a whole."""
        count = max(len(self.trajectories), 1)
        return {cause: n / count for cause, n in Counter(failure.cause for failure in self.failures).items()}

    def trajectory_return(self, trajectory: Trajectory) -> float:
        """Sum of rewards from the initial state to the trajectory's leaf."""
        return sum(self.nodes[i].reward for i in self.path(trajectory.leaf))

    def won(self, trajectory: Trajectory) -> bool:
        """Whether the task was done; see :func:`verl_bpo.sandbox.base.is_won`."""
        return is_won(trajectory.info, self.trajectory_return(trajectory))

    def fair(self) -> list[bool]:
        """Per turn: was its action a fair draw from the policy given its state? A trunk's at a branch point may not be."""
        starts = {t.start for t in self.trajectories}
        return [i in starts or self.trunk_fair.get(node.parent, True) for i, node in enumerate(self.nodes)]

    def skeleton(self) -> Tree:
        """The same tree without tokens and texts: all that estimators and metrics need, small enough to travel with a row."""
        bare = {
            "action_ids": [], "action_logprobs": [], "action_entropy": [], "observation_ids": [], "prompt_ids": None,
            "action_text": "", "observation_text": "", "actions": None,
        }  # fmt: skip
        return replace(
            self,
            prompt_ids=[],
            nodes=[replace(node, **bare) for node in self.nodes],
            trajectories=[replace(t, info={"won": self.won(t)} if t.usable else {}) for t in self.trajectories],
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON. Inverse of :meth:`from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Tree:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: ``data`` is no tree: a field is missing or unknown, or ids don't make one. One line that says which.
        """
        if isinstance(data, dict) and "trunk_exchangeable" in data:  # as release 0.1 dumped it
            data = {"trunk_fair" if key == "trunk_exchangeable" else key: value for key, value in data.items()}
        tree = read(cls, data, "a tree", needed=("nodes", "trajectories", "trunk_fair", "counters"))
        nodes = [read(Node, node, f"turn {i} of a tree") for i, node in enumerate(tree.nodes)]
        trajectories = [read(Trajectory, t, f"trajectory {i} of a tree") for i, t in enumerate(tree.trajectories)]
        tree.failures = [read(Failure, failure, "a failure of a tree") for failure in tree.failures]
        tree.trunk_fair = {int(point): yes for point, yes in tree.trunk_fair.items()}
        tree.nodes, tree.trajectories = [], [replace(t, start=-1, leaf=-1) for t in trajectories]
        for i, node in enumerate(nodes):
            if not 0 <= node.trajectory < len(trajectories) or not ROOT <= node.parent < i:
                raise ValueError(f"turn {i} of a tree has trajectory {node.trajectory} and parent {node.parent}")
            node.actions = tuple(node.actions) if node.actions else None
            tree.add_node(node)
        if tree.trajectories != trajectories:
            raise ValueError("the trajectories of a tree don't start and end where its turns say")
        return tree
