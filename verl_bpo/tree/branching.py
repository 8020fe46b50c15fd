"""How a tree branches: where, how often, and what counts as the entropy of a decision point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from verl_bpo.options import ConfigError, Options, keys, read
from verl_bpo.tree.selectors import SELECTORS, NoBranching, Selector, selector_class

Positive = Annotated[int, Field(ge=1)]


class Branching(Options):
    """``bpo.branch``. The parameters of the selector stand among these keys."""

    selector: Selector = NoBranching()
    """Where to branch: ``threshold``, ``quantile``, ``entropy_rise``, ``fixed_interval``, ``random``, ``every`` decide while a
    trajectory runs; ``most_uncertain`` ranks the decision points of the finished backbone, ``top_k`` those of all finished
    trajectories, ``random_nodes`` draws among them; ``none`` gives plain trajectories; ``file.py:Class`` is one of your
    own."""
    forks: Positive = 2
    """K: alternative actions sampled at a branch point, beside the trajectory that runs through it."""
    root_samples: Positive = 1
    """Trajectories rolled from the initial state. 1 is the paper's single backbone; more make the initial state a branch
    point."""
    depth: Positive = 1
    """Nesting: 1 forks root samples only, 2 forks their forks too, and so on."""
    entropy_tokens: Literal["first", "open", "first_m", "all"] = "first"
    """Entropy of a decision point: true entropy of the ``first`` action token (depends on the state alone); of the first
    that the form of an answer leaves ``open``, beyond ``<think>`` or what all admissible actions begin with, as ``click[``;
    mean over the ``first_m``, or over ``all`` action tokens (these depend on the sampled action)."""
    entropy_m: Positive = 4
    """m of ``first_m``."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        """The selector from its name and those of the keys that are its parameters."""
        if not isinstance(values, dict) or isinstance(values.get("selector"), Selector):
            return values
        name = values.get("selector", NoBranching.NAME)
        kind = selector_class(name)
        for key in values.keys() - keys(kind).keys() - keys(cls).keys():
            owners = [other for other, known in SELECTORS.items() if key in keys(known)]
            if owners:
                raise ConfigError(
                    f"bpo.branch.{key} is for selector {' or '.join(owners)}, and bpo.branch.selector={name}"
                )
        own = {key: value for key, value in values.items() if key in keys(kind)}
        rest = {key: value for key, value in values.items() if key not in own}
        return rest | {"selector": read(kind, own, "bpo.branch")}

    @model_serializer
    def _spread(self) -> dict[str, Any]:
        plain = {key: getattr(self, key) for key in keys(type(self))}
        return plain | self.selector.model_dump() | {"selector": self.selector.NAME}

    @property
    def state_only(self) -> bool:
        """Whether a branch point is chosen from its state alone, so that the trunk's action there is a fair draw."""
        return self.selector.state_only(self.entropy_tokens == "first")

    @property
    def needs_entropy(self) -> bool:
        """Whether branching looks at the policy's entropy."""
        return "entropy" in self.selector.needs

    @property
    def needs_value(self) -> bool:
        """Whether branching looks at the state's value."""
        return "value" in self.selector.needs

    def entropy(self, entropy: Sequence[float], forced: int = 0) -> float:
        """Entropy signal of a decision point, nats.

        Args:
            entropy: true entropy of the distribution that each action token was sampled from.
            forced: how many of the tokens the form of an answer dictates; ``open`` is the next one.
        """
        if not entropy:
            return 0.0
        at = min(forced, len(entropy) - 1)  # a sample may be cut inside the form
        which = {"first": slice(1), "open": slice(at, at + 1), "first_m": slice(self.entropy_m), "all": slice(None)}
        used = entropy[which[self.entropy_tokens]]
        return float(sum(used) / len(used))
