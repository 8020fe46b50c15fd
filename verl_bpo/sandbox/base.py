"""The protocol between rollouts and the worlds that agents act in.

Two roles. An :class:`Environment` is what an author writes: one live world in one state, driven by text or tool calls. A
:class:`Sandbox` is what a rollout holds: a handle on one branch of that world, which can be snapshot; a :class:`Snapshot`
forks itself. A :class:`Backend` turns the first into the others, so an author never writes branching code.

Nothing here knows verl, ray or torch.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from verl_bpo.sandbox.line import NEVER, Deadline
from verl_bpo.sandbox.turns import Action, Message

Row = Mapping[str, Any]
"""A row of a prompt file, as plain values."""


class NoTaskCanWork(Exception):
    """What makes every task fail: a run that meets it ends. Any other fault costs the item that it happened to."""


class SandboxError(Exception):
    """Something went wrong in one sandbox. The branch that meets it is lost; its tree goes on."""


class SandboxCrashed(SandboxError):
    """The environment, or the process it lives in, died."""


class SandboxTimeout(SandboxError):
    """The environment did not answer in time and was stopped."""


class SnapshotUnsupported(SandboxError, NoTaskCanWork):
    """The environment's state can't be captured by the chosen backend; the message says what to do."""


class TaskError(SandboxError):
    """The task can't be opened: an unknown id, a missing or broken file."""


class PromptTooLong(TaskError):
    """The task's first prompt is longer than ``data.max_prompt_length``."""


@dataclass(frozen=True)
class Observation:
    """What the world answers to ``reset`` or ``step``.

    ``reward`` is this step's own reward, not a running sum. ``terminated`` means that the task ended by its own rules
    (solved, lost, submitted): the value of what follows is zero. ``truncated`` means that a limit cut the episode: what
    would have followed still has a value, so an estimator with a critic bootstraps there.
    """

    text: str = ""
    """What the policy reads, as one message of the user; with ``messages``, all that they say."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    actions: tuple[str, ...] | None = None
    """Admissible actions in this state, or None when the environment doesn't list them. A word in angle brackets, as in
    ``search[<query>]``, stands for any text."""
    info: dict[str, Any] = field(default_factory=dict)
    """Plain values for logs (text, numbers, flags, None, lists and dicts of them): ``won`` (bool), ``task_type`` (str),
    ``score`` (float) where they exist. At the end also ``unjudged`` (str), a word for why the work couldn't be judged, with
    ``problem`` (str), the same in a sentence, and ``left_out`` (str), the names of what wasn't judged: metrics count the
    first, the tree page shows all."""
    messages: tuple[Message, ...] = ()
    """The answer as messages with roles, in place of ``text``. None: it is ``text``."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Of the first observation: the tools of this task, as schemas in OpenAI's function form."""

    def __post_init__(self) -> None:
        if not all(isinstance(message, Message) for message in self.messages):
            raise TypeError(f"Observation.messages is {shown(self.messages)}: it must be a tuple of Message")
        if self.messages:
            object.__setattr__(self, "text", "\n".join(message.content for message in self.messages))

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


def shown(value: Any) -> str:
    """A value in an error's line."""
    text = " ".join((ascii(value) if isinstance(value, str) else repr(value)).split())
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def is_won(info: Mapping[str, Any], episode_return: float) -> bool:
    """Whether an episode's task was done: what the environment says in its last observation's ``info``; where it doesn't say,
    whether the return is above 0."""
    return bool(info["won"]) if "won" in info else episode_return > 0


class Environment(ABC):
    """One live world, in one state. Subclass this to bring an own environment.

    The contract: after the same ``reset(task, seed)`` the same actions give the same observations; ``load_state(s)``
    brings back exactly the state that ``save_state()`` returned ``s`` from, any number of times, in any order, until
    the next ``reset``. An instance is used by one thread at a time.
    """

    volatile: ClassVar[Mapping[str, str]] = {}
    """What observations may differ in all the same: name -> regular expression, see :mod:`verl_bpo.sandbox.volatile`."""

    runs_commands: ClassVar[bool] = False
    """Whether it acts by shell commands, so that ``bpo.env.execution`` says where they run."""

    @abstractmethod
    def reset(self, task: str, seed: int = 0) -> Observation:
        """Open ``task`` (an id or a path that this environment understands).

        One that has a further parameter ``row`` is given the prompt row, a dict of plain values, or None where there is
        none. It may be ``async``, as ``step`` may.

        Raises:
            TaskError: the task doesn't exist or can't be read.
        """

    @abstractmethod
    def step(self, action: Action) -> Observation:
        """Act: by a text, or by tool calls where the first observation named tools. An action that the world doesn't
        understand is an ordinary step with the world's own answer."""

    def save_state(self) -> Any:
        """The whole mutable state as an object that later steps don't change.

        Leave it out when the state can be copied: the ``memory`` backend then pickles or deep-copies the environment.
        What copies are to share, a large table that never changes say, has a ``__deepcopy__`` that returns itself.
        """
        raise SnapshotUnsupported(f"{type(self).__name__} has no save_state")

    def load_state(self, state: Any) -> None:
        """Go back to ``state``, which stays valid afterwards."""
        raise SnapshotUnsupported(f"{type(self).__name__} has no load_state")

    def expert_actions(self) -> list[str] | None:
        """A sequence of actions that solves the task as it was reset, or None when none is known."""
        return None

    def digest(self) -> dict[str, str] | None:
        """The parts of the state that observations needn't show (files, say) and a hash of each, for ``check-env``.

        None: there are none, or nobody looks.
        """
        return None

    def close(self) -> None:
        """Free everything. Called once; nothing is called afterwards."""

    @classmethod
    def tasks(cls, split: str = "train", **kwargs: Any) -> list[str]:
        """Task ids of a split in a fixed order (used to write prompt files)."""
        raise SandboxError(
            f"{cls.__name__} lists no tasks: write its tasks(split), a class method that returns their ids"
        )

    @classmethod
    def data_source(cls, task: str, split: str) -> str | None:
        """Under which name metrics are to count this task; None: the environment's."""
        return None

    @classmethod
    def task_file(cls, task: str) -> Path | None:
        """The file that holds the task, if it is one."""
        path = Path(task).expanduser()
        return path if path.is_file() else None

    @classmethod
    def check_task(cls, task: str, **kwargs: Any) -> None:
        """Look, without loading it, whether the task's data is there. ``kwargs``: the constructor's.

        Raises:
            TaskError: it isn't; the message says where to get it.
        """
        cls.task_file(task)

    @classmethod
    def task_content(cls, task: str, **kwargs: Any) -> bytes:
        """What a prompt file's checksum covers of the task beside its name. ``kwargs``: as ``tasks`` took them."""
        path = cls.task_file(task)
        return path.read_bytes() if path else b""


def opened(environment: Environment, task: str, seed: int, row: Row | None) -> Any:
    """What ``reset`` answers, given the prompt row if it takes one; to be awaited where it is ``async``."""
    takes_row = "row" in inspect.signature(environment.reset).parameters
    return environment.reset(task, seed, **({"row": row} if takes_row else {}))


class Snapshot(ABC):
    """A frozen state of one sandbox's world. Fork from it as often as needed; release it when done."""

    nbytes: int | None = None
    """Size in bytes where it is known."""
    replayed_steps: int = 0
    """Steps that were executed again to make its forks, those that failed included."""

    @abstractmethod
    def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        """``count`` new sandboxes in this state, whether or not the one it was taken of is still open. One that fails is
        returned as its exception.

        Raises:
            SandboxError: it is released.
        """

    @abstractmethod
    def release(self) -> None:
        """Give its memory back. Forks made from it live on. Safe to call twice."""


class Sandbox(ABC):
    """One branch of a world.

    A sandbox may be used from any thread, by one call at a time; different sandboxes of one world may be used at once.
    """

    env_steps: int = 0
    """Steps executed through this handle (its own, not its ancestors'), those that crashed or timed out included: the cost
    counted by budgets."""
    replayed_steps: int = 0
    """Steps that were executed again to get this branch into its state; not in ``env_steps``."""

    @abstractmethod
    def reset(self, task: str, seed: int = 0, row: Row | None = None) -> Observation: ...

    @abstractmethod
    def step(self, action: Action) -> Observation: ...

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Freeze the present state.

        Raises:
            SnapshotUnsupported: this world can't; the message says which setting would.
        """

    def digest(self) -> dict[str, str] | None:
        """:meth:`Environment.digest` of the present state; None also where the backend can't ask for it."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give this branch back. Snapshots and forks made from it stay usable. Safe to call twice."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Backend(ABC):
    """How the worlds of one environment are snapshot. To add one, write a module of this package that names its class in
    ``BACKEND``, or a file of your own: ``bpo.env.backend=path/to/file.py:Class``.

    Args:
        env: name of the environment, see :mod:`verl_bpo.sandbox.loading`.
        env_kwargs: arguments of its constructor.

    Raises:
        EnvironmentUnavailable: there is no such environment, or it doesn't take these arguments.
    """

    replays: ClassVar[bool] = False
    """Whether a fork plays the snapshot's actions again: it may then take as long as they, and no initial state is kept."""
    keeps_deadlines: ClassVar[bool] = False
    """Whether a call that takes longer than :attr:`deadline` is ended by the backend, at the cost of one branch. Where it
    isn't, the worker's process is ended, and its other branches are rebuilt."""
    deadline: Deadline = NEVER
    """By when the present operation must have answered."""
    processes: frozenset[int] = frozenset()
    """Numbers of processes that it keeps from tree to tree."""
    volatile: Mapping[str, str]
    """What the environment declares as such."""

    @abstractmethod
    def __init__(self, env: str, env_kwargs: dict[str, Any]) -> None: ...

    @abstractmethod
    def sandbox(self) -> Sandbox:
        """The first sandbox of a new world; reset it before anything else."""

    def clear(self) -> None:
        """A tree is done and all that was made is closed: keep nothing of it for the next one."""

    def close(self) -> None:
        """End everything. Safe to call twice."""
