"""Snapshot, fork and restore of worlds that agents act in."""

from verl_bpo.sandbox.base import (
    Backend,
    Environment,
    Observation,
    Sandbox,
    SandboxCrashed,
    SandboxError,
    SandboxTimeout,
    Snapshot,
    SnapshotUnsupported,
    TaskError,
)
from verl_bpo.sandbox.fork import ForkBackend
from verl_bpo.sandbox.memory import MemorySandbox
from verl_bpo.sandbox.pool import SandboxPool
from verl_bpo.sandbox.replay import ReplaySandbox
from verl_bpo.sandbox.volatile import VOLATILE
from verl_bpo.sandbox.world import World

__all__ = [
    "VOLATILE",
    "Backend",
    "Environment",
    "ForkBackend",
    "MemorySandbox",
    "Observation",
    "ReplaySandbox",
    "Sandbox",
    "SandboxCrashed",
    "SandboxError",
    "SandboxPool",
    "SandboxTimeout",
    "Snapshot",
    "SnapshotUnsupported",
    "TaskError",
    "World",
]
