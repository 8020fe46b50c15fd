"""Methods of the lab: how to branch and how to judge, both by the project's own objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl_bpo.advantages.estimator import Estimate, Estimator
from verl_bpo.advantages.gigpo import GiGPO
from verl_bpo.advantages.sapo import SAPO
from verl_bpo.advantages.sapo_turns import sapo_targets
from verl_bpo.advantages.state_graph import StateGraph
from verl_bpo.advantages.tree_critic import TreeCritic
from verl_bpo.config.schema import BPOConfig, build
from verl_bpo.tree.forest import Forest


@dataclass(frozen=True)
class Method:
    """``bpo.*`` keys over a preset, and an estimator; None is BPO with what ``bpo.advantage`` says."""

    title: str
    preset: str
    keys: dict[str, Any] = field(default_factory=dict)
    estimator: Estimator | None = None
    critic: bool = False
    """Whether branching or the estimator looks at V."""

    def config(self, turns: int, samples: int) -> BPOConfig:
        """As it is run: a tree may take ``samples`` times ``turns`` environment steps."""
        budget = {"unit": "env_steps", "limit": samples * turns, **self.keys.get("budget", {})}
        user = {**self.keys, "budget": budget, "env": {"max_turns": turns}}
        return build(user, self.preset, self.critic)

    def judge(self, config: BPOConfig, forest: Forest) -> Estimate:
        estimator = self.estimator or config.advantage
        v = forest.state_value
        values, _ = sapo_targets(forest, v, v, estimator if isinstance(estimator, SAPO) else SAPO())
        return estimator(forest, values)


FILL = {"budget": {"fill": "root"}}
ANY = {"trunk_in_siblings": "always", "leaf_return": "tree_mean", "center": False}
OPEN = {"score": "value", "trunk": "any", "top_k": 40, "depth": 40}
ROOTS_AND_FORKS = {"branch": OPEN | {"forks": 1, "root_samples": 6}, "advantage": ANY}
METHODS = {
    "rloo": Method("RLOO", "plain", FILL),
    "grpo": Method("GRPO", "plain", FILL | {"advantage": {"baseline": "mean", "normalize": "sibling_std"}}),
    "gigpo": Method("GiGPO", "plain", FILL, GiGPO()),
    "gigpo_no_std": Method("GiGPO, F_norm = 1", "plain", FILL, GiGPO(norm="none")),
    "state_graph": Method("state graph, plain trajectories", "plain", FILL, StateGraph(states="observation")),
    "state_graph_forks": Method(
        "state graph, 6 roots and forks at highest V(1-V)",
        "guided",
        ROOTS_AND_FORKS,
        StateGraph(states="observation"),
        True,
    ),
    "v_baseline": Method("V baseline, plain trajectories", "plain", FILL, SAPO(lam=1.0, normalise=False), True),
    "gae": Method("PPO: GAE .95, plain trajectories", "plain", FILL, SAPO(bootstrap="v"), True),
    "paper": Method("`paper`", "paper"),
    "paper_threshold": Method("`paper_threshold`", "paper_threshold"),
    "guided": Method("`guided`, success trunk", "guided"),
    "guided_value": Method("`guided`, by value", "guided", critic=True),
    "open": Method(
        "highest V(1-V), siblings, K=3", "guided", {"branch": OPEN | {"forks": 3}, "advantage": ANY}, critic=True
    ),
    "tree_critic": Method(
        "tree critic: highest V(1-V), K=1, 6 roots",
        "guided",
        ROOTS_AND_FORKS,
        TreeCritic(weight_of_v=1, gate="none"),
        True,
    ),
    "tree_critic_gated": Method(
        "the same, gated", "guided", ROOTS_AND_FORKS, TreeCritic(weight_of_v=1, gate="prompt"), True
    ),
    "tree_critic_measured": Method(
        "tree critic, V by its measured error, not gated", "guided", ROOTS_AND_FORKS, TreeCritic(gate="none"), True
    ),
    "tree_critic_default": Method(
        "tree critic, V by its measured error, gate `trust`", "guided", ROOTS_AND_FORKS, TreeCritic(), True
    ),
}
"""By name. ``guided`` keeps the preset's two rounds of forks; the others fork until the budget is spent."""
