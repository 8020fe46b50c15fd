"""Snapshot, fork and restore of worlds that agents act in.

What is where::

    rollout
     └ SandboxPool         keeps workers warm for all trees of one environment
        └ World            one tree: hands out its sandboxes, knows how each came to its state, rebuilds lost ones
           ├ Sandbox       a handle on one branch
           └ Snapshot      a handle on a frozen one; forks itself
              :
              :  one call at a time
              :
     Worker                holds one world's branches under numbers
     │  LocalWorker        here (bpo.env.isolation=none)
     │  ProcessWorker      a LocalWorker in a child process (isolation=process, the default)
     │  RayWorker          a ProcessWorker in a Ray actor, which holds several (bpo.env.placement.where=ray)
     └ Backend             makes the environment, saves it and forks it (bpo.env.backend)
        │  memory, replay  in the worker's process
        │  fork            a first process, and one for each branch and snapshot
        └ Environment      one live world
           └ Shell         its files and commands, if it acts by commands (bpo.env.execution)
                local      a keeper process that holds the files, and a bubblewrap for each command
                container  a container, and what its engine starts for each command

The upper half lives in the rollout's process. ``docs/_sandbox_processes.md`` says which processes there are.
"""

from verl_bpo.sandbox.base import (
    Backend,
    Environment,
    NoTaskCanWork,
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
from verl_bpo.sandbox.turns import Action, Message, ToolCall, ToolCalls
from verl_bpo.sandbox.volatile import VOLATILE
from verl_bpo.sandbox.world import World

__all__ = [
    "VOLATILE",
    "Action",
    "Backend",
    "Environment",
    "ForkBackend",
    "MemorySandbox",
    "Message",
    "NoTaskCanWork",
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
    "ToolCall",
    "ToolCalls",
    "World",
]
