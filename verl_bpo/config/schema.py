"""Every key of ``bpo.*``: its meaning, its default, its check. Read nowhere else, declared nowhere else.

Keys are filled in this order, later ones win: the defaults below, the preset, what the user set.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from verl_bpo.sandbox.loading import BACKENDS
from verl_bpo.shells.base import SHELLS
from verl_bpo.shells.container import ContainerConfig
from verl_bpo.tree.prompting import PromptConfig


class ConfigError(ValueError):
    """A key the user can mend. The message names the key, the value given and what would be right."""


class RunError(RuntimeError):
    """What ends a run in one line that says why: data, a policy or an environment that cannot be trained with."""


def _one_of(key: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value!r} is not one of {', '.join(map(str, allowed))}")


def _at_least(key: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{key}={value} must be at least {least}")


@dataclass
class BranchConfig:
    selector: str = "none"
    """Where to branch: ``threshold``, ``quantile``, ``fixed_interval``, ``random``, ``every`` decide while a trajectory
    runs; ``top_k`` ranks the decision points of finished trajectories; ``none`` gives plain trajectories."""
    forks: int = 2
    """K: alternative actions sampled at a branch point, beside the trajectory that runs through it."""
    score: str = "entropy"
    """What makes a decision point worth branching: ``entropy`` of the policy (nats); ``value``, V(1-V) of SAPO's value
    readout for returns in [0, 1], highest where the outcome is still open; ``entropy_value``, their product."""
    threshold: float = 1.0
    """``threshold``: branch where the score is at least this."""
    share: float = 0.25
    """``quantile``: target share of decision points that branch, by the scores of past steps. ``random``: probability."""
    interval: int = 3
    """``fixed_interval``: branch at every this many turns."""
    top_k: int = 2
    """``top_k``: at most this many branch points a tree."""
    trunk: str = "any"
    """``top_k``: fork trajectories of ``any`` outcome, or only those that ended in ``success`` (return above 0): below a
    prefix that has already failed forks are wasted."""
    entropy_tokens: str = "first"
    """Entropy of a decision point: true entropy of the ``first`` action token (depends on the state alone); of the first
    that the form of an answer leaves ``open``, beyond ``<think>`` or what all admissible actions begin with, as ``click[``;
    mean over the ``first_m``, or over ``all`` action tokens (these depend on the sampled action)."""
    entropy_m: int = 4
    """m of ``first_m``."""
    root_samples: int = 1
    """Trajectories rolled from the initial state. 1 is the paper's single backbone; more make the initial state a branch
    point."""
    depth: int = 1
    """Nesting: 1 forks root samples only, 2 forks their forks too, and so on."""

    def __post_init__(self) -> None:
        _one_of("bpo.branch.selector", self.selector, SELECTORS)
        _one_of("bpo.branch.score", self.score, SCORES)
        _one_of("bpo.branch.entropy_tokens", self.entropy_tokens, ENTROPY_TOKENS)
        _one_of("bpo.branch.trunk", self.trunk, ("any", "success"))
        for key in ("forks", "interval", "top_k", "entropy_m", "root_samples", "depth"):
            _at_least(f"bpo.branch.{key}", getattr(self, key), 1)
        if not 0 < self.share <= 1:
            raise ConfigError(f"bpo.branch.share={self.share} must lie in (0, 1]")
        if self.trunk == "success" and self.selector != "top_k":
            raise ConfigError(
                f"bpo.branch.trunk=success needs finished trajectories: set bpo.branch.selector=top_k (is {self.selector})"
            )

    @property
    def state_only(self) -> bool:
        """Whether a branch point is chosen from its state alone, so that the trunk's action there is a fair draw."""
        if self.selector in ("fixed_interval", "random", "every"):
            return True
        return self.selector in ("threshold", "quantile") and (self.score == "value" or self.entropy_tokens == "first")

    @property
    def needs_entropy(self) -> bool:
        """Whether branching looks at the policy's entropy."""
        return self.selector in SCORE_SELECTORS and self.score != "value"

    @property
    def needs_value(self) -> bool:
        """Whether branching looks at the state's value."""
        return self.selector in SCORE_SELECTORS and self.score != "entropy"


SCORES = ("entropy", "value", "entropy_value")
ENTROPY_TOKENS = ("first", "open", "first_m", "all")
SCORE_SELECTORS = ("threshold", "quantile", "top_k")
SELECTORS = (*SCORE_SELECTORS, "fixed_interval", "random", "every", "none")


@dataclass
class BudgetConfig:
    unit: str = "leaves"
    """What a tree may cost is counted in ``leaves`` (trajectories), ``env_steps`` or generated ``tokens``."""
    limit: int = 8
    """The budget of one tree, in that unit. A trajectory starts only if its longest possible course fits."""
    fill: str = "root"
    """What branching left over: ``root`` samples more trajectories from the initial state, ``none`` leaves it."""

    def __post_init__(self) -> None:
        _one_of("bpo.budget.unit", self.unit, ("leaves", "env_steps", "tokens"))
        _one_of("bpo.budget.fill", self.fill, ("root", "none"))
        _at_least("bpo.budget.limit", self.limit, 1)


@dataclass
class AdvantageConfig:
    baseline: str = "loo"
    """Siblings' baseline: ``loo`` leaves the sibling itself out (unbiased); ``mean`` shrinks by (n-1)/n.
    ``shrunk``: ``loo`` drawn towards the baseline above the branch point, the more the less prefixes explain of the return.
    ``trajectory``, for comparison: the prompt's other rollouts, wherever they forked."""
    normalize: str = "none"
    """``none``, divide by the ``sibling_std`` of each group, or by the ``batch_std`` over all turns."""
    center: bool = False
    """Subtract the mean over the batch's turns. Where failures are longer than successes, most advantages are negative, and
    learning then mostly pushes down whatever was sampled."""
    leaf_return: str = "leaf"
    """Return of a sibling: its own trajectory's ``leaf``, or ``tree_mean``, the mean over its children, recursively."""
    weighting: str = "uniform"
    """``uniform``: every tree token weighs the same. ``path_probability``: a turn weighs the product of 1/siblings on
    its path, which alone makes the policy gradient unbiased, at a higher variance."""
    trunk_in_siblings: str = "auto"
    """May a trunk's own return stand in its forks' baselines: ``always``, ``never``, or ``auto``: only where the branch
    point was chosen from the state alone."""

    def __post_init__(self) -> None:
        _one_of("bpo.advantage.baseline", self.baseline, ("loo", "mean", "shrunk", "trajectory"))
        _one_of("bpo.advantage.normalize", self.normalize, ("none", "sibling_std", "batch_std"))
        _one_of("bpo.advantage.leaf_return", self.leaf_return, ("leaf", "tree_mean"))
        _one_of("bpo.advantage.weighting", self.weighting, ("uniform", "path_probability"))
        _one_of("bpo.advantage.trunk_in_siblings", self.trunk_in_siblings, ("auto", "always", "never"))


@dataclass
class PlacementConfig:
    """Where the processes run that worlds live in."""

    where: str = "local"
    """``local``: beside the rollout worker. ``ray``: in Ray actors, for which Ray finds nodes by the keys below; sandboxes can
    so have CPU nodes to themselves. Tasks' files must then be at the same paths there."""
    worlds: int = 16
    """``ray``: most worlds of one actor. A rollout worker starts actors as its ``bpo.env.workers`` need them."""
    num_cpus: float = 1.0
    """``ray``: CPUs that an actor reserves."""
    resources: dict[str, Any] = field(default_factory=dict)
    """``ray``: custom resources that an actor reserves: ``{sandbox: 1}`` for nodes that offer it (``ray start
    --resources='{"sandbox": 8}'``)."""
    strategy: str = "SPREAD"
    """``ray``: ``SPREAD`` puts actors on different nodes, ``DEFAULT`` fills one after the other."""
    start_timeout: float = 120.0
    """``ray``: seconds to wait for a place. Where none is found the run ends with what was asked for and what there is."""

    def __post_init__(self) -> None:
        key = "bpo.env.placement"
        _one_of(f"{key}.where", self.where, ("local", "ray"))
        _one_of(f"{key}.strategy", self.strategy, ("SPREAD", "DEFAULT"))
        _at_least(f"{key}.worlds", self.worlds, 1)
        _at_least(f"{key}.num_cpus", self.num_cpus, 0)
        if self.num_cpus > 1 and self.num_cpus % 1:  # Ray's own rule
            raise ConfigError(f"{key}.num_cpus={self.num_cpus} must be whole if above 1")
        if self.start_timeout <= 0:
            raise ConfigError(f"{key}.start_timeout={self.start_timeout} must be above 0")
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ConfigError(f"{key}.resources.{name} is no custom resource: CPUs are asked for by {key}.num_cpus")
            number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
            if not number or amount <= 0 or (amount > 1 and amount % 1):
                raise ConfigError(f"{key}.resources.{name}={amount!r} must be a number above 0, and whole if above 1")

    @property
    def asked(self) -> dict[str, float]:
        """What an actor asks Ray for."""
        return {"CPU": self.num_cpus, **self.resources} if self.num_cpus else dict(self.resources)


@dataclass
class EnvConfig:
    name: str = ""
    """Environment of rows that name none: ``textworld``, ``alfworld``, ``package.module:Class`` or ``file.py:Class``.
    A row's ``extra_info.env`` wins."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the environment's constructor."""
    max_turns: int = 20
    """Turns after which an episode is truncated."""
    max_action_tokens: int = 64
    """Longest action in tokens."""
    backend: str = "memory"
    """How a world is snapshot: ``memory`` (its own save/load or a copy), ``fork`` (its process), ``replay`` (its
    actions played again), or an own backend, ``file.py:Class``."""
    isolation: str = "process"
    """``process``: worlds live in child processes that may crash or hang alone. ``none``: in the rollout worker."""
    workers: int = 2
    """Worlds open at once in one rollout worker; further trees wait."""
    step_timeout: float = 60.0
    """Seconds an action may take."""
    reset_timeout: float = 300.0
    """Seconds opening a task may take."""
    snapshot_mb: int = 4096
    """MiB that one tree's snapshots may take, as far as their size is known. Above it those used least recently are
    forgotten, and played again if a fork needs them."""
    execution: str = "local"
    """Where environments that act by shell commands (``swebench``, ``repair``) run them: ``local``, isolated on this machine,
    ``container``, on Podman or Docker, or in an own kind of shell, ``file.py:Class``, whose options ``kwargs.shell`` holds."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)

    def __post_init__(self) -> None:
        for key, registry in (("execution", SHELLS), ("backend", BACKENDS)):
            if not registry.knows(getattr(self, key)):
                raise ConfigError(f"bpo.env.{key}={getattr(self, key)!r} is not one of {registry.describe()}")
        _one_of("bpo.env.isolation", self.isolation, ("process", "none"))
        for key in ("max_turns", "max_action_tokens", "workers", "snapshot_mb"):
            _at_least(f"bpo.env.{key}", getattr(self, key), 1)
        if self.placement.where == "ray" and self.isolation == "none":
            raise ConfigError(
                "bpo.env.isolation=none keeps worlds in the rollout worker, bpo.env.placement.where=ray elsewhere: set "
                "isolation=process"
            )

    @property
    def shell_options(self) -> dict[str, Any]:
        """Options of the shells that have keys of their own."""
        return asdict(self.container) if self.execution == "container" else {}


@dataclass
class SAPOConfig:
    """``algorithm.adv_estimator=sapo``: Single-rollout Autoregressive Policy Optimization (arXiv 2608.19842). Not verl's
    policy loss of the same name."""

    gamma: float = 1.0
    """Discount of a turn."""
    lam: float = 0.95
    """lambda of the returns G that advantages and the state values' targets are made of."""
    bootstrap: str = "sarsa"
    """What stands in G for the rest after the next turn began: ``sarsa``, its action value Q, or ``v``, its state value."""
    sarsa_lambda: float = 0.0
    """lambda of the action values' targets: 0 is SARSA's one step."""
    truncation: str = "terminal"
    """A trajectory cut by a limit: ``terminal`` counts nothing after it, so running out of turns is a failure, as it is for
    every other estimator here. ``bootstrap`` takes the last turn's action value Q for its return, and that turn teaches Q
    nothing: for limits that are no part of the task. Where episodes fail only by running out, it leaves nothing that holds
    the values down."""
    normalise: bool = True
    """Advantages to mean 0 and standard deviation 1 over all turns of the batch."""
    v_coef: float = 0.5
    """c_v: weight of the state values' loss beside the policy's."""
    q_coef: float = 0.5
    """c_q: weight of the action values' loss beside the policy's."""
    value_clip: float | None = 0.5
    """How far a value may move from what it was when the batch was sampled before its loss is clipped. None: any."""
    value_grad_scale: float = 1.0
    """Factor on the value losses' gradient into the backbone: 1 shares it (the paper), 0 leaves the heads a probe."""
    head_lr: float | None = None
    """Learning rate of the heads. None: 0.1 over the hidden size, so that one step of Adam moves a value by about 0.1 at
    most, whatever the model's width."""
    warmup_steps: int = 0
    """Training steps in which only the heads learn, before the policy starts to."""

    def __post_init__(self) -> None:
        _one_of("bpo.sapo.bootstrap", self.bootstrap, ("sarsa", "v"))
        _one_of("bpo.sapo.truncation", self.truncation, ("bootstrap", "terminal"))
        for key in ("gamma", "lam", "sarsa_lambda"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"bpo.sapo.{key}={getattr(self, key)} must lie in [0, 1]")
        for key in ("v_coef", "q_coef", "value_grad_scale", "warmup_steps"):
            _at_least(f"bpo.sapo.{key}", getattr(self, key), 0)
        for key in ("value_clip", "head_lr"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ConfigError(f"bpo.sapo.{key}={value} must be above 0")


PACKED_BACKENDS = ("auto", "sdpa", "flash_attn", "torch_varlen", "flex")


@dataclass
class PackedTreeConfig:
    """Training on trees in place of their rows. Losses and gradients stay what they were."""

    enable: bool = False
    """Actor and reference compute each token that rows share once. ``ppo_max_token_len_per_gpu`` then counts those."""
    backend: str = "auto"
    """Attention: ``auto`` takes ``flash_attn``, else ``torch_varlen``, on a GPU in half precision, and ``sdpa``
    elsewhere. ``flex`` needs a GPU."""
    frugal: bool | str = "auto"
    """A tree beyond ``ppo_max_token_len_per_gpu``: ``false`` cuts it between branches and computes what the parts share
    again; ``true`` computes it in chunks of that many tokens, with one more forward; ``auto`` takes the cheaper one."""

    def __post_init__(self) -> None:
        _one_of("bpo.packed_tree.backend", self.backend, PACKED_BACKENDS)
        _one_of("bpo.packed_tree.frugal", self.frugal, (True, False, "auto"))


PRESETS: dict[str, dict[str, Any]] = {
    "plain": {"branch": {"selector": "none"}, "budget": {"unit": "leaves", "limit": 1, "fill": "none"}},
    "paper": {
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
"""``plain``: no branching, what the baselines use. ``paper``: one backbone, entropy threshold, leaf returns.
``guided``: a root group, forks of its successful trajectories, nested, tree-mean returns (which, with the default
``trunk_in_siblings=auto``, are leaf returns wherever the branch point was chosen by outcome). Where rollouts know state
values, ``guided`` forks any trajectory at its states of highest V(1-V) instead."""
VALUE_GUIDED: dict[str, Any] = {"branch": {"score": "value", "trunk": "any"}}


@dataclass
class BPOConfig:
    preset: str = "paper"
    """``paper``, ``guided`` or ``plain``: values for the keys below that you don't set yourself."""
    branch: BranchConfig = field(default_factory=BranchConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    sapo: SAPOConfig = field(default_factory=SAPOConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    packed_tree: PackedTreeConfig = field(default_factory=PackedTreeConfig)
    updates_per_step: int | None = None
    """Optimizer steps a training step, whatever the number of rows. None: ``data.train_batch_size`` over
    ``actor.ppo_mini_batch_size``, as for every other estimator in verl."""
    max_env_steps: int | None = None
    """Training ends (with a last validation) once its rollouts have taken about this many environment steps: the matched
    compute of comparisons. None: by ``trainer.total_training_steps`` alone."""
    seed: int | None = None
    """Seed of every sampling request. None: not seeded."""
    dump_dir: str | None = None
    """Folder for one JSONL record a tree (``trees/``) and its advantages (``advantages/``). None: nothing is written."""
    poll_interval: float = 0.05
    """Seconds between two looks into the replay buffer (verl waits 2.0, which dominates short steps)."""

    def __post_init__(self) -> None:
        _one_of("bpo.preset", self.preset, tuple(PRESETS))
        _at_least("bpo.poll_interval", self.poll_interval, 0.001)
        for key in ("updates_per_step", "max_env_steps"):
            if getattr(self, key) is not None:
                _at_least(f"bpo.{key}", getattr(self, key), 1)
        if self.branch.selector != "none":
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

    def _check_branching(self) -> None:
        mixes_trunk = self.advantage.trunk_in_siblings == "always" or (
            self.advantage.trunk_in_siblings == "auto" and self.branch.state_only
        )
        if self.branch.forks == 1 and not mixes_trunk:
            raise ConfigError(
                f"bpo.branch.forks=1 leaves a fork without a sibling to compare with, since selector "
                f"{self.branch.selector} with entropy_tokens={self.branch.entropy_tokens} keeps the trunk out of the "
                f"baseline: set bpo.branch.forks=2 or more"
            )
        if self.budget.unit == "leaves" and self.budget.limit < self.branch.root_samples:
            raise ConfigError(
                f"bpo.budget.limit={self.budget.limit} leaves is less than bpo.branch.root_samples="
                f"{self.branch.root_samples}"
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
    _one_of("bpo.preset", preset, tuple(PRESETS))
    merged = _merge({}, PRESETS[preset])
    if preset == "guided" and (values or (user.get("branch") or {}).get("score") in ("value", "entropy_value")):
        merged = _merge(merged, VALUE_GUIDED)
    merged = _merge(merged, user)
    merged["preset"] = preset
    return _construct(BPOConfig, merged, "bpo")


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key, {}), dict) and key != "kwargs"
        merged[key] = _merge(merged.get(key, {}), value) if nested else value
    return merged


def _construct(cls: type, values: dict[str, Any], prefix: str) -> Any:
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown key {prefix}.{unknown[0]}; known here: {', '.join(sorted(known))}")
    hints = get_type_hints(cls)
    built = {}
    for key, value in values.items():
        hint = hints[key]
        if is_dataclass(hint):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{prefix}.{key}={value!r} must hold keys, such as {prefix}.{key}.{fields(hint)[0].name}"
                )
            value = _construct(hint, value, f"{prefix}.{key}")
        else:
            value = _checked(hint, value, f"{prefix}.{key}")
        built[key] = value
    try:
        return cls(**built)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _checked(hint: Any, value: Any, key: str) -> Any:
    """``value`` as the type that the field declares; yaml gives ints where floats are meant."""
    options = getattr(hint, "__args__", None) if not hasattr(hint, "__origin__") or "Union" in str(hint) else None
    allowed = tuple(options or (hint,))
    if value is None and type(None) in allowed:
        return None
    for option in allowed:
        plain = getattr(option, "__origin__", option)
        if plain is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(plain, type) and isinstance(value, plain) and not (plain is int and isinstance(value, bool)):
            return value
    names = " or ".join(getattr(o, "__name__", str(o)) for o in allowed)
    raise ConfigError(f"{key}={value!r} must be {names}")
