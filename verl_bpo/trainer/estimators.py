"""Our names in verl's table of advantage estimators."""

from __future__ import annotations

from typing import Any


def register(core_algos: Any) -> None:
    """Register ``bpo``.

    verl's table holds functions of padded rows; a tree's advantages need its topology, which only the ``bpo_sync``
    trainer reads. So the entry makes the name known, and says so when another trainer calls it.
    """

    @core_algos.register_adv_est("bpo")
    def bpo(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "algorithm.adv_estimator=bpo needs the tree of each row: set trainer.use_v1=True and "
            "trainer.v1.trainer_mode=bpo_sync (python -m verl.trainer.main_ppo does it by itself)"
        )
