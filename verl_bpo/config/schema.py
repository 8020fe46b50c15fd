"""Every key of ``bpo.*``: its meaning, its default, its check. The classes of core parts stand in their rooms.

Keys are filled in this order, later ones win: the defaults below, the preset, what the user set.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verl_bpo.advantages.bpo import BPO
from verl_bpo.advantages.estimator import ESTIMATORS, Estimator
from verl_bpo.advantages.sapo import SAPO
from verl_bpo.config.faults import FaultConfig
from verl_bpo.config.presets import PRESETS, VALUE_GUIDED
from verl_bpo.config.worlds import EnvConfig
from verl_bpo.options import ConfigError, Options, keys, read
from verl_bpo.sandbox.loading import EnvironmentUnavailable
from verl_bpo.tree.branching import Branching
from verl_bpo.tree.prompting import PromptConfig
from verl_bpo.tree.selectors import NoBranching, selector_class

Positive = Annotated[int, Field(ge=1)]
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


class BPOConfig(Options):
    preset: Literal["plain", "paper", "paper_threshold", "guided", "critic"] = "paper"
    """``paper``, ``paper_threshold``, ``guided``, ``critic`` or ``plain``: values for the keys that you don't set yourself."""
    branch: Branching = Branching()
    budget: BudgetConfig = BudgetConfig()
    advantage: BPO = BPO()
    sapo: SAPO = SAPO()
    estimator: dict[str, Any] = {}
    """Parameters of an advantage estimator of your own, ``algorithm.adv_estimator=file.py:Class``, or of ``tree_critic``,
    ``gigpo``, ``hgpo``, ``tree_grpo`` or ``state_graph``."""
    env: EnvConfig = EnvConfig()
    faults: FaultConfig = FaultConfig()
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

    @property
    def asks_for_digests(self) -> bool:
        """Whether the estimator tells states by their digests, which rollouts then ask for after every turn."""
        return self.estimator.get("states") == "digest"

    def _check_branching(self) -> None:
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
    given = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    branch = user.get("branch") if isinstance(user.get("branch"), dict) else {}
    if preset == "guided" and (values or branch.get("score") in ("value", "entropy_value")):
        given = merge(given, VALUE_GUIDED)
    if isinstance(branch.get("selector"), str):
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
        ConfigError: it can't be loaded, a parameter is wrong, or the trees leave it nothing to compare.
    """
    kind = estimator_class(name)
    if kind is None:
        return None
    branch = config.branch
    branches = not isinstance(branch.selector, NoBranching)
    if "siblings" in kind.NEEDS and branches and branch.forks == 1 and not config.trunk_is_sibling:
        raise ConfigError(
            f"bpo.branch.forks=1 leaves a fork without a sibling to compare with, since selector {branch.selector.NAME} "
            f"with entropy_tokens={branch.entropy_tokens} keeps the trunk out of the baseline: set bpo.branch.forks=2 or more"
        )
    own = getattr(config, kind.KEYS)
    found = own if isinstance(own, kind) else read(kind, own, f"bpo.{kind.KEYS}")
    if getattr(found, "states", None) == "digest" and not config.asks_for_digests:
        raise ConfigError(
            f"{name} tells states by their digests: set +bpo.estimator.states=digest, so that rollouts ask for them"
        )
    return found


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over``, group by group."""
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if nested else value
    return merged
