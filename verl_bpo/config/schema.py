"""Every key of ``bpo.*``: its meaning, its default, its check. The classes of core parts stand in their rooms.

Keys are filled in this order, later ones win: the defaults below, the preset, what the user set.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verl_bpo.advantages.bpo import BPO
from verl_bpo.advantages.estimator import ESTIMATORS, Estimator
from verl_bpo.advantages.sapo import SAPO
from verl_bpo.options import ConfigError, Options, keys, read
from verl_bpo.sandbox.loading import BACKENDS, EnvironmentUnavailable
from verl_bpo.shells.base import SHELLS
from verl_bpo.shells.container import ContainerConfig
from verl_bpo.tree.branching import Branching
from verl_bpo.tree.prompting import PromptConfig
from verl_bpo.tree.selectors import NoBranching, selector_class

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]


class RunError(RuntimeError):
    """What ends a run in one line that says why: data, a policy or an environment that cannot be trained with."""


class BudgetConfig(Options):
    unit: Literal["leaves", "env_steps", "tokens"] = "leaves"
    """What a tree may cost is counted in ``leaves`` (trajectories), ``env_steps`` or generated ``tokens``."""
    limit: Positive = 8
    """The budget of one tree, in that unit. A trajectory starts only if its longest possible course fits."""
    fill: Literal["root", "none"] = "root"
    """What branching left over: ``root`` samples more trajectories from the initial state, ``none`` leaves it."""


class PlacementConfig(Options):
    """Where the processes run that worlds live in."""

    where: Literal["local", "ray"] = "local"
    """``local``: beside the rollout worker. ``ray``: in Ray actors, for which Ray finds nodes by the keys below; sandboxes can
    so have CPU nodes to themselves. Tasks' files must then be at the same paths there."""
    worlds: Positive = 16
    """``ray``: most worlds of one actor. A rollout worker starts actors as its ``bpo.env.workers`` need them."""
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    """``ray``: CPUs that an actor reserves."""
    resources: dict[str, Any] = {}
    """``ray``: custom resources that an actor reserves: ``{sandbox: 1}`` for nodes that offer it (``ray start
    --resources='{"sandbox": 8}'``)."""
    strategy: Literal["SPREAD", "DEFAULT"] = "SPREAD"
    """``ray``: ``SPREAD`` puts actors on different nodes, ``DEFAULT`` fills one after the other."""
    start_timeout: Seconds = 120.0
    """``ray``: seconds to wait for a place. Where none is found the run ends with what was asked for and what there is."""

    @model_validator(mode="after")
    def _check(self) -> PlacementConfig:
        key = "bpo.env.placement"
        if self.num_cpus > 1 and self.num_cpus % 1:  # Ray's own rule
            raise ConfigError(f"{key}.num_cpus={self.num_cpus} must be whole if above 1")
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ConfigError(f"{key}.resources.{name} is no custom resource: CPUs are asked for by {key}.num_cpus")
            number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
            if not number or amount <= 0 or (amount > 1 and amount % 1):
                raise ConfigError(f"{key}.resources.{name}={amount!r} must be a number above 0, and whole if above 1")
        return self

    @property
    def asked(self) -> dict[str, float]:
        """What an actor asks Ray for."""
        return {"CPU": self.num_cpus, **self.resources} if self.num_cpus else dict(self.resources)


class EnvConfig(Options):
    name: str = ""
    """Environment of rows that name none: ``textworld``, ``alfworld``, ``package.module:Class`` or ``file.py:Class``.
    A row's ``extra_info.env`` wins."""
    kwargs: dict[str, Any] = {}
    """Passed to the environment's constructor."""
    max_turns: Positive = 20
    """Turns after which an episode is truncated."""
    max_action_tokens: Positive = 64
    """Longest action in tokens."""
    backend: str = "memory"
    """How a world is snapshot: ``memory`` (its own save/load or a copy), ``fork`` (its process), ``replay`` (its
    actions played again), or an own backend, ``file.py:Class``."""
    isolation: Literal["process", "none"] = "process"
    """``process``: worlds live in child processes that may crash or hang alone. ``none``: in the rollout worker."""
    workers: Positive = 2
    """Worlds open at once in one rollout worker; further trees wait."""
    step_timeout: Seconds = 60.0
    """Seconds an action may take."""
    reset_timeout: Seconds = 300.0
    """Seconds opening a task may take."""
    snapshot_mb: Positive = 4096
    """MiB that one tree's snapshots may take, as far as their size is known. Above it those used least recently are
    forgotten, and played again if a fork needs them."""
    execution: str = "local"
    """Where environments that act by shell commands (``swebench``, ``repair``) run them: ``local``, isolated on this machine,
    ``container``, on Podman or Docker, or in an own kind of shell, ``file.py:Class``, whose options ``kwargs.shell`` holds."""
    container: ContainerConfig = ContainerConfig()
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="after")
    def _check(self) -> EnvConfig:
        for key, registry in (("execution", SHELLS), ("backend", BACKENDS)):
            if not registry.knows(getattr(self, key)):
                raise ConfigError(f"bpo.env.{key}={getattr(self, key)!r} is not one of {registry.describe()}")
        if self.placement.where == "ray" and self.isolation == "none":
            raise ConfigError(
                "bpo.env.isolation=none keeps worlds in the rollout worker, bpo.env.placement.where=ray elsewhere: set "
                "isolation=process"
            )
        return self

    @property
    def shell_options(self) -> dict[str, Any]:
        """Options of the shells that have keys of their own."""
        return self.container.model_dump() if self.execution == "container" else {}


PackedBackend = Literal["auto", "sdpa", "flash_attn", "torch_varlen", "flex"]


class PackedTreeConfig(Options):
    """Training on trees in place of their rows. Losses and gradients stay what they were."""

    enable: bool = False
    """Actor and reference compute each token that rows share once. ``ppo_max_token_len_per_gpu`` then counts those."""
    backend: PackedBackend = "auto"
    """Attention: ``auto`` takes ``flash_attn``, else ``torch_varlen``, on a GPU in half precision, and ``sdpa``
    elsewhere. ``flex`` needs a GPU."""
    chunked: bool | Literal["auto"] = "auto"
    """A tree beyond ``ppo_max_token_len_per_gpu``: ``false`` cuts it between branches and computes what the parts share
    again; ``true`` computes it in chunks of that many tokens, with one more forward; ``auto`` takes the cheaper one."""

    @model_validator(mode="before")
    @classmethod
    def _new_names(cls, values: Any) -> Any:
        if isinstance(values, dict) and "frugal" in values:
            raise ConfigError("bpo.packed_tree.frugal is called bpo.packed_tree.chunked now")
        return values


PRESETS: dict[str, dict[str, Any]] = {
    "plain": {"branch": {"selector": "none"}, "budget": {"unit": "leaves", "limit": 1, "fill": "none"}},
    "paper": {
        "branch": {"selector": "most_uncertain", "forks": 2, "root_samples": 1, "depth": 1},
        "budget": {"unit": "leaves", "limit": 8, "fill": "none"},
        "advantage": {"leaf_return": "leaf", "baseline": "loo"},
    },
    "paper_threshold": {
        "branch": {"selector": "threshold", "forks": 2, "root_samples": 1, "depth": 1},
        "budget": {"unit": "leaves", "limit": 8},
        "advantage": {"leaf_return": "leaf", "baseline": "loo"},
    },
    "guided": {
        "branch": {
            "selector": "top_k",
            "forks": 2,
            "top_k": 2,
            "entropy_tokens": "open",
            "trunk": "success",
            "root_samples": 4,
            "depth": 2,
        },
        "budget": {"unit": "leaves", "limit": 8},
        "advantage": {"leaf_return": "tree_mean", "baseline": "loo", "center": True},
    },
}
"""``plain``: no branching, what the baselines use. ``paper``: one backbone and, at its most uncertain states, the other
trajectories of the budget as forks; leaf returns. ``paper_threshold``, what release 0.1 called ``paper``: forks wherever the
entropy reaches a threshold while the backbone runs, first come, first served; what is left becomes root samples.
``guided``: a root group, forks of its successful trajectories, nested, tree-mean returns (which, with the default
``trunk_in_siblings=auto``, are leaf returns wherever the branch point was chosen by outcome). Where rollouts know state
values, ``guided`` forks any trajectory at its states of highest V(1-V) instead."""
VALUE_GUIDED: dict[str, Any] = {"branch": {"score": "value", "trunk": "any"}}


class BPOConfig(Options):
    preset: Literal["plain", "paper", "paper_threshold", "guided"] = "paper"
    """``paper``, ``paper_threshold``, ``guided`` or ``plain``: values for the keys below that you don't set yourself."""
    branch: Branching = Branching()
    budget: BudgetConfig = BudgetConfig()
    advantage: BPO = BPO()
    sapo: SAPO = SAPO()
    estimator: dict[str, Any] = {}
    """Parameters of an advantage estimator of your own, ``algorithm.adv_estimator=file.py:Class``."""
    env: EnvConfig = EnvConfig()
    prompt: PromptConfig = PromptConfig()
    packed_tree: PackedTreeConfig = PackedTreeConfig()
    updates_per_step: Positive | None = None
    """Optimizer steps a training step, whatever the number of rows. None: ``data.train_batch_size`` over
    ``actor.ppo_mini_batch_size``, as for every other estimator in verl."""
    max_env_steps: Positive | None = None
    """Training ends (with a last validation) once its rollouts have taken about this many environment steps: the matched
    compute of comparisons. None: by ``trainer.total_training_steps`` alone."""
    seed: int | None = None
    """Seed of every sampling request. None: not seeded."""
    dump_dir: str | None = None
    """Folder for one JSONL record a tree (``trees/``) and its advantages (``advantages/``). None: nothing is written."""
    poll_interval: Annotated[float, Field(ge=0.001)] = 0.05
    """Seconds between two looks into the replay buffer (verl waits 2.0, which dominates short steps)."""

    @model_validator(mode="after")
    def _check(self) -> BPOConfig:
        if not isinstance(self.branch.selector, NoBranching):
            self._check_branching()
        longest = {
            "leaves": 1,
            "env_steps": self.env.max_turns,
            "tokens": self.env.max_turns * self.env.max_action_tokens,
        }
        if self.budget.limit < longest[self.budget.unit]:
            raise ConfigError(
                f"bpo.budget.limit={self.budget.limit} {self.budget.unit} is less than one trajectory can cost "
                f"({longest[self.budget.unit]}): raise it, or lower bpo.env.max_turns or bpo.env.max_action_tokens"
            )
        return self

    @property
    def trunk_is_sibling(self) -> bool:
        """Whether a trunk's return stands in its forks' baselines."""
        return {"always": True, "auto": self.branch.state_only, "never": False}[self.advantage.trunk_in_siblings]

    def _check_branching(self) -> None:
        if self.branch.forks == 1 and not self.trunk_is_sibling:
            raise ConfigError(
                f"bpo.branch.forks=1 leaves a fork without a sibling to compare with, since selector "
                f"{self.branch.selector.NAME} with entropy_tokens={self.branch.entropy_tokens} keeps the trunk out of the "
                f"baseline: set bpo.branch.forks=2 or more"
            )
        if self.budget.unit == "leaves" and self.budget.limit < self.branch.root_samples:
            raise ConfigError(
                f"bpo.budget.limit={self.budget.limit} leaves is less than bpo.branch.root_samples="
                f"{self.branch.root_samples}"
            )
        if self.advantage.weighting == "path_probability" and self.budget.fill == "root":
            raise ConfigError(
                "bpo.advantage.weighting=path_probability needs a number of root samples that branching doesn't change: set "
                "bpo.budget.fill=none"
            )
        left = self.budget.limit - self.branch.root_samples
        if self.budget.unit == "leaves" and self.budget.fill == "none" and 0 < left < min(2, self.branch.forks):
            raise ConfigError(
                f"bpo.budget.limit={self.budget.limit} leaves no room for 2 forks beside bpo.branch.root_samples="
                f"{self.branch.root_samples}, and bpo.budget.fill=none nothing else to do with it"
            )
        forks = self.budget.unit != "leaves" or left > 0
        if forks and getattr(self.branch.selector, "trunk", "any") == "success" and self.branch.root_samples < 2:
            raise ConfigError(
                "bpo.branch.trunk=success chooses a trunk by its outcome, so that it can't be compared with its forks: "
                "set bpo.branch.root_samples=2 or more"
            )


def build(user: dict[str, Any] | None, default_preset: str, values: bool = False) -> BPOConfig:
    """The whole config from the keys that a user set.

    Args:
        values: whether rollouts know the values of states, which preset ``guided`` then goes by.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, or keys that contradict each other.
    """
    user = user or {}
    preset = user.get("preset") or default_preset
    given = PRESETS.get(preset, {})
    branch = user.get("branch")
    if preset == "guided" and (values or (branch or {}).get("score") in ("value", "entropy_value")):
        given = merge(given, VALUE_GUIDED)
    if isinstance(branch, dict) and isinstance(branch.get("selector"), str):
        # A preset's parameters of another selector mean nothing to this one.
        known = keys(Branching) | keys(selector_class(branch["selector"]))
        given = given | {"branch": {k: v for k, v in given.get("branch", {}).items() if k in known}}
    return read(BPOConfig, merge(given, user) | {"preset": preset}, "bpo")


def estimator_class(name: str) -> type[Estimator] | None:
    """The class that ``algorithm.adv_estimator`` names; None where the estimator is verl's.

    Raises:
        ConfigError: an own class that can't be loaded.
    """
    if not ESTIMATORS.knows(name):
        return None
    try:
        return ESTIMATORS.load(name)
    except EnvironmentUnavailable as error:
        raise ConfigError(f"algorithm.adv_estimator: {error}") from None


def find_estimator(config: BPOConfig, name: str) -> Estimator | None:
    """The estimator that ``algorithm.adv_estimator`` names, with its parameters; None where it is verl's.

    Raises:
        ConfigError: it can't be loaded, or a parameter is wrong.
    """
    kind = estimator_class(name)
    if kind is None:
        return None
    own = getattr(config, kind.KEYS)
    return own if isinstance(own, kind) else read(kind, own, f"bpo.{kind.KEYS}")


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over``, group by group."""
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if nested else value
    return merged
