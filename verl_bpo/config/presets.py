"""``bpo.preset``: values for the keys that a user doesn't set."""

from __future__ import annotations

from typing import Any

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
    "critic": {
        "branch": {
            "selector": "top_k",
            "score": "value",
            "trunk": "any",
            "forks": 1,
            "top_k": 8,
            "root_samples": 5,
            "depth": 8,
        },
        "budget": {"unit": "leaves", "limit": 8},
    },
}
"""``plain``: no branching, what the baselines use. ``paper``: one backbone and, at its most uncertain states, the other
trajectories of the budget as forks; leaf returns. ``paper_threshold``, what release 0.1 called ``paper``: forks wherever the
entropy reaches a threshold while the backbone runs, first come, first served; what is left becomes root samples.
``guided``: a root group, forks of its successful trajectories, nested, tree-mean returns (which, with the default
``trunk_in_siblings=auto``, are leaf returns wherever the branch point was chosen by outcome). Where rollouts know state
values, ``guided`` forks any trajectory at its states of highest V(1-V) instead. ``critic``, for estimator ``tree_critic``: a
root group and lone forks of any trajectory, forks too, at the states of highest V(1-V)."""
VALUE_GUIDED: dict[str, Any] = {"branch": {"score": "value", "trunk": "any"}}
