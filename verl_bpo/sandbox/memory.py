"""Branches of one live environment, kept apart by saving and loading its state, or by copies where it has no such."""

from __future__ import annotations

import copy
import enum
import io
import pickle
import threading
from dataclasses import dataclass
from typing import Any

from verl_bpo.sandbox.asynchronous import settled
from verl_bpo.sandbox.base import (
    Backend,
    Environment,
    Observation,
    Row,
    Sandbox,
    SandboxError,
    Snapshot,
    SnapshotUnsupported,
    opened,
)
from verl_bpo.sandbox.loading import EnvironmentMaker
from verl_bpo.sandbox.turns import Action

BACKEND = "MemoryBackend"

_ADVICE = (
    "implement save_state and load_state, or use bpo.env.backend=fork or replay, or do without branches "
    "(bpo.branch.selector=none)"
)


class MemoryBackend(Backend):
    """Each world is one environment."""

    def __init__(self, env: str, env_kwargs: dict[str, Any]) -> None:
        self._make = EnvironmentMaker(env, env_kwargs)
        self.volatile = self._make.volatile

    def sandbox(self) -> MemorySandbox:
        return MemorySandbox(self._make())

    def clear(self) -> None:
        self._make.clear()


class MemorySandbox(Sandbox):
    """A branch of a live environment.

    All branches share the environment under a lock. Where it has its own ``save_state`` and ``load_state``, a branch
    that isn't the live one waits as a saved state and is loaded by its next step; switching between branches costs a
    save and a load. Where it hasn't, the environment is copied, once per snapshot and once per fork, and each branch
    keeps its own copy: pickled by the snapshot and unpickled by a fork's first step, or deep-copied by both where
    something in it can't be pickled or has a ``__deepcopy__`` of its own, by which it may say what is to be shared.

    The environment is closed with its last sandbox and snapshot. (Copies aren't: what couldn't be copied they share.)
    After an exception in ``step`` the branch's state is unknown; it can only be closed or reset.

    Args:
        environment: a fresh environment, owned by the sandbox from here on.
    """

    def __init__(self, environment: Environment) -> None:
        self._join(_Shared(environment))

    @classmethod
    def _at(cls, shared: _Shared, saved: Any) -> MemorySandbox:
        sandbox = cls.__new__(cls)
        sandbox._join(shared)
        sandbox._saved = saved
        return sandbox

    def _join(self, shared: _Shared) -> None:
        self.shared = shared
        self._saved: Any = None
        """State to continue from; None when the environment itself is in it, or before ``reset``."""
        self._lost = "it was never reset"
        self._closed = False
        shared.enter()

    def reset(self, task: str, seed: int = 0, row: Row | None = None) -> Observation:
        shared = self.shared
        with shared.lock:
            self._check_open()
            if shared.users > 1:
                raise SandboxError("a world with other branches or snapshots can't be reset: open a new sandbox")
            shared.live, self._saved = None, None
            observation = settled(opened(shared.environment, task, seed, row))
            shared.live = self
            return observation

    def step(self, action: Action) -> Observation:
        shared = self.shared
        with shared.lock:
            self._wake()
            self._saved, shared.live = None, None  # what an exception leaves behind is nobody's state
            self._lost = "its last step failed"
            self.env_steps += 1
            observation = settled(shared.environment.step(action))
            shared.live = self
            return observation

    def digest(self) -> dict[str, str] | None:
        with self.shared.lock:
            self._wake()
            return self.shared.environment.digest()

    def snapshot(self) -> Snapshot:
        shared = self.shared
        with shared.lock:
            self._check_open()
            if shared.frozen(self._saved):
                return MemorySnapshot(shared, self._saved)
            self._wake()
            saved = shared.save()
            if shared.frozen(saved):
                self._saved = saved
            return MemorySnapshot(shared, saved)

    def close(self) -> None:
        shared = self.shared
        with shared.lock:
            if self._closed:
                return
            self._closed, self._saved = True, None
            if shared.live is self:
                shared.live = None
            shared.leave()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox is closed")

    def _wake(self) -> None:
        """Bring the environment into this branch's state."""
        shared = self.shared
        self._check_open()
        if shared.live is self:
            return
        if self._saved is None:
            raise SandboxError(f"this branch has no state to go on from: {self._lost}")
        if shared.live is not None:
            shared.live._park()
        saved, shared.live = self._saved, None
        shared.load(saved)
        shared.live = self
        if not shared.frozen(saved):
            self._saved = None  # the environment is this branch's own copy now and changes with it

    def _park(self) -> None:
        """Make room for another branch. A failure is this branch's own and shows at its next step."""
        if not self.shared.native:
            self._saved = self.shared.environment
        elif self._saved is None:
            try:
                self._saved = self.shared.save()
            except Exception as error:
                self._lost = f"saving it failed ({type(error).__name__}: {error})"


class MemorySnapshot(Snapshot):
    """A saved state (or a copy) of a :class:`MemorySandbox`'s environment."""

    def __init__(self, shared: _Shared, saved: Any) -> None:
        self.shared, self._saved = shared, saved
        self._released = False
        self.nbytes = getattr(saved, "nbytes", None)
        shared.enter()

    def fork(self, count: int = 1) -> list[Sandbox | Exception]:
        with self.shared.lock:
            if self._released:
                raise SandboxError("this snapshot is released")
            forks: list[Sandbox | Exception] = []
            for _ in range(count):
                try:
                    forks.append(MemorySandbox._at(self.shared, self.shared.duplicate(self._saved)))
                except SandboxError as error:
                    forks.append(error)
            return forks

    def release(self) -> None:
        with self.shared.lock:
            if self._released:
                return
            self._released, self._saved = True, None
            self.shared.leave()


class _Shared:
    """One environment, who is in it, and how its states are kept."""

    def __init__(self, environment: Environment) -> None:
        self.original = self.environment = environment
        self.native = all(
            getattr(type(environment), name) is not getattr(Environment, name) for name in ("save_state", "load_state")
        )
        self.pickles: bool | None = None
        """Whether copies can be made by pickling, several times faster than by a deep copy; None: not tried yet."""
        self.lock = threading.RLock()
        self.live: MemorySandbox | None = None
        """The branch whose state the environment is in."""
        self.users = 0
        """Sandboxes and snapshots that are still open."""

    def enter(self) -> None:
        with self.lock:
            self.users += 1

    def leave(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.original.close()

    def save(self) -> Any:
        """The environment's present state, unaffected by what comes."""
        if self.native:
            return self.environment.save_state()
        if self.pickles is not False:
            try:
                saved = _Pickled.of(self.environment)
                if self.pickles is None:
                    saved.load()  # not everything that can be pickled comes back
                self.pickles = True
                return saved
            except MemoryError:  # of this state
                raise
            except Exception:  # whatever an object's own pickling raises
                self.pickles = False
        return self._deepcopy(self.environment)

    def frozen(self, saved: Any) -> bool:
        """Whether a saved state can be continued from more than once. A deep copy is used up by it."""
        return saved is not None and (self.native or isinstance(saved, _Pickled))

    def load(self, saved: Any) -> None:
        """Continue from ``saved``."""
        if self.native:
            self.environment.load_state(saved)
        else:
            self.environment = saved.load() if isinstance(saved, _Pickled) else saved

    def duplicate(self, saved: Any) -> Any:
        """A saved state that one more branch may continue from."""
        return saved if self.frozen(saved) else self._deepcopy(saved)

    @staticmethod
    def _deepcopy(environment: Environment) -> Environment:
        try:
            return copy.deepcopy(environment)
        except MemoryError:
            raise
        except Exception as error:
            raise SnapshotUnsupported(
                f"{type(environment).__name__} has no save_state and can't be deep-copied: {_what_fails(environment)}"
                f"{type(error).__name__}: {error}: {_ADVICE}"
            ) from error


@dataclass(frozen=True)
class _Pickled:
    """A copy of an environment, as bytes."""

    data: memoryview

    @classmethod
    def of(cls, environment: Environment) -> _Pickled:
        """Raises whatever pickling does where that can't stand for a deep copy."""
        stream = io.BytesIO()
        _CopyPickler(stream, protocol=5).dump(environment)
        return cls(stream.getbuffer())

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def load(self) -> Environment:
        return pickle.loads(self.data)


class _CopyPickler(pickle.Pickler):
    """Refuses what asks for a treatment of its own in deep copies, except types known to come out the same."""

    def reducer_override(self, thing: Any) -> Any:
        own_way = getattr(thing, "__deepcopy__", None) is not None and not isinstance(thing, (type, enum.Enum))
        if own_way and type(thing).__module__ not in ("numpy", "re", "decimal", "fractions", "array"):
            raise pickle.PicklingError(f"{type(thing).__name__} has a __deepcopy__")
        return NotImplemented


def _what_fails(environment: Environment) -> str:
    """The attribute that can't be copied, to be named in an error; nothing where none fails by itself."""
    for name, value in vars(environment).items():
        try:
            copy.deepcopy(value)
        except Exception:
            return f"its attribute {name} ({type(value).__name__}) fails with "
    return ""
