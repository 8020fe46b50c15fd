"""Instances as container images: the benchmark's own, each with one commit on top that changes are measured against."""

from __future__ import annotations

import hashlib
import platform
import shlex
from dataclasses import dataclass, field
from typing import Any

from verl_bpo.envs.swebench.patches import SETTINGS
from verl_bpo.envs.swebench.scoring import TESTBED
from verl_bpo.sandbox.base import SandboxError
from verl_bpo.shells.base import Limits
from verl_bpo.shells.container import ContainerConfig, ContainerShell, find_engine, has_image, pull_image

_OF_EVERY_SHELL = ("PWD", "OLDPWD", "SHLVL", "_", "PS1")
# What a build left untracked is in the commit too: else it would count as the agent's. The history stays.
_GIT = f"git {shlex.join(SETTINGS)}"
_COMMIT = (
    f"find . -name __pycache__ -prune -exec rm -rf {{}} + && {_GIT} add -A -f . && "
    f"{_GIT} -c user.name=SWE-bench -c user.email=swebench@localhost commit --quiet --allow-empty --no-verify -m base && "
    f"{_GIT} rev-parse HEAD"
)
SET_UP_LIMITS = Limits(processes=512, memory=4 << 30, disk=4 << 30, file_size=4 << 30, seconds=1800, output=16 << 20)


@dataclass(frozen=True)
class Images:
    """Where images come from, and the engine that has them."""

    container: ContainerConfig = field(default_factory=ContainerConfig)
    registry: str = ""
    """Host that names start with; empty: where the engine looks by itself (Podman: what its ``registries.conf`` lists)."""
    namespace: str = "swebench"
    """``none``: images that the benchmark's package built on this machine; ``registry`` then doesn't count."""

    @property
    def engine(self) -> tuple[str, ...]:
        """Its command line.

        Raises:
            SandboxError: none answers.
        """
        return find_engine(self.container.engine)

    def name(self, row: dict[str, Any]) -> str:
        """The image of an instance, as the swebench package calls it."""
        from swebench.harness.constants import MAP_REPO_TO_EXT
        from swebench.harness.test_spec.test_spec import TestSpec

        # Made directly: the package's own way reads requirement files from the network, which the name doesn't need.
        spec = TestSpec(
            instance_id=row["instance_id"],
            repo=row["repo"],
            version=str(row["version"]),
            repo_script_list=[],
            eval_script_list=[],
            env_script_list=[],
            arch="arm64" if platform.machine() in ("aarch64", "arm64") else "x86_64",
            FAIL_TO_PASS=[],
            PASS_TO_PASS=[],
            language=MAP_REPO_TO_EXT[row["repo"]],
            docker_specs={},
            namespace=None if self.namespace == "none" else self.namespace,
        )
        prefix = f"{self.registry}/" if spec.is_remote_image and self.registry else ""
        return prefix + spec.instance_image_key

    def make_ready(self, row: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        """Get the instance's image, pulled if it isn't there, and make the one that episodes begin in.

        Returns:
            What an instance records: ``image`` and ``ready_image`` (names), ``env`` (variables of the activated
            environment), ``base`` (the commit).

        Raises:
            SandboxError: it can't be had, or isn't as the benchmark's images are.
        """
        image = self.name(row)
        if not has_image(self.engine, image):
            try:
                pull_image(self.engine, image)
            except SandboxError as error:
                asked = f"--registry {self.registry or 'not given'}, --namespace {self.namespace}"
                raise SandboxError(f"{error} (is there a network? are these right: {asked}?)") from error
        digest = hashlib.sha256(image.encode()).hexdigest()[:8]
        ready = f"localhost/verl-bpo-{row['instance_id'].lower()}:{digest}"
        with self._shell(image) as shell:
            variables = _activated(shell, row, spec)
        with self._shell(image, variables) as shell:
            done = shell.execute(_COMMIT)
            if done.returncode != 0:
                raise SandboxError(f"{image} has no repository in {TESTBED} to commit: {done.output.strip()[-200:]}")
            shell.keep(ready)
        return {"image": image, "ready_image": ready, "env": variables, "base": done.output.split()[-1]}

    def _shell(self, image: str, env: dict[str, str] | None = None) -> ContainerShell:
        # No agent acts here, so a disk without a limit is no danger.
        options = {"engine": self.container.engine, "run_options": self.container.run_options}
        return ContainerShell(image, TESTBED, env, SET_UP_LIMITS, allow_unsafe=True, **options)


def _activated(shell: ContainerShell, row: dict[str, Any], spec: dict[str, Any]) -> dict[str, str]:
    """What the benchmark's evaluation sets before it enters the repository, so that a command needn't do it again. An image
    without the environment that is activated there is taken as it is."""
    from swebench.harness.test_spec.create_scripts import make_eval_script_list

    script = make_eval_script_list(row, spec, "testbed", TESTBED, row["base_commit"], row["test_patch"])
    lines = script[: next((number for number, line in enumerate(script) if line.startswith("cd ")), 0)]
    words = shlex.split(lines[0]) if lines else []
    if not words or words[0] != "source" or shell.execute(f"[ -e {shlex.quote(words[1])} ]").returncode != 0:
        return {}
    activate = " && ".join(lines)
    before, after = shell.execute("env -0"), shell.execute(f"{{ {activate}; }} >/dev/null 2>&1 && env -0")
    if after.returncode != 0:
        said = shell.execute(activate).output.strip()[-200:]
        raise SandboxError(f"the image's environment can't be activated: {said}")
    plain, active = (_variables(done.data.decode("utf-8", "surrogateescape")) for done in (before, after))
    return {name: value for name, value in active.items() if plain.get(name) != value and name not in _OF_EVERY_SHELL}


def _variables(text: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
