"""Our names in verl's table of advantage estimators."""

from __future__ import annotations

from functools import partial
from typing import Any

from verl_bpo.advantages.estimator import ESTIMATORS


def register(core_algos: Any) -> None:
    """Register ``bpo`` and ``sapo`` (Single-rollout Autoregressive Policy Optimization, arXiv 2608.19842).

    verl's table holds functions of padded rows; our advantages need the turns of each row's tree, which only our trainer
    modes read. So an entry makes the name known, and says so when another trainer calls it.
    """
    for name in ESTIMATORS.built_in():
        core_algos.register_adv_est(name)(partial(_refuse, name))


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"algorithm.adv_estimator={name} needs the turns of each row: set trainer.use_v1=True and "
        f"trainer.v1.trainer_mode=sync (python -m verl.trainer.main_ppo does the rest by itself)"
    )
