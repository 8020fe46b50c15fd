"""``verl-bpo train``: verl's ``main_ppo`` on a config that lists the ``bpo.*`` keys."""

from __future__ import annotations

import signal
import sys

import hydra
from omegaconf import DictConfig


@hydra.main(config_path="pkg://verl_bpo.config", config_name="bpo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """The same calls in the same order as ``verl.trainer.main_ppo.main``, for the v1 trainer."""
    import ray
    from ray.exceptions import RayError, RayTaskError
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from verl_bpo.config.schema import RunError
    from verl_bpo.integration.ending import Stopped, end_on_signals, leave_soon, told

    end_on_signals("verl_bpo")
    try:
        auto_set_device(config)
        reference, critic = need_reference_policy(config), need_critic(config)
        validate_config(config=config, use_reference_policy=reference, use_critic=critic)
        try:
            run_ppo(config, task_runner_class=TaskRunnerV1)
        except SystemExit as stop:  # Ray takes SIGTERM over while it runs
            if stop.code == signal.SIGTERM:
                leave_soon("verl_bpo", signal.SIGTERM)
                raise Stopped(signal.SIGTERM) from None
            raise
    except Stopped as stop:
        ray.shutdown()
        sys.exit(128 + stop.args[0])
    except RayError as error:
        known = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, RunError) else told(error)
        if known is None:
            raise
        ray.shutdown()  # what the workers still had to say comes first
        raise SystemExit(f"verl_bpo: {known}") from None


if __name__ == "__main__":
    main()
