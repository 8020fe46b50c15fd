"""Snapshot, fork and restore of worlds that agents act in."""

from verl_bpo.sandbox.base import (
    Capabilities,
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
from verl_bpo.sandbox.fork import ForkSandbox, Nursery
from verl_bpo.sandbox.memory import MemorySandbox
from verl_bpo.sandbox.process import SandboxHost, SandboxPool
from verl_bpo.sandbox.replay import ReplaySandbox
from verl_bpo.sandbox.volatile import VOLATILE

__all__ = [
    "VOLATILE",
    "Capabilities",
    "Environment",
    "ForkSandbox",
    "MemorySandbox",
    "Nursery",
    "Observation",
    "ReplaySandbox",
    "Sandbox",
    "SandboxCrashed",
    "SandboxError",
    "SandboxHost",
    "SandboxPool",
    "SandboxTimeout",
    "Snapshot",
    "SnapshotUnsupported",
    "TaskError",
]
