"""``verl-bpo train``: verl's ``main_ppo`` on a config that lists the ``bpo.*`` keys."""

from __future__ import annotations

import signal
import sys

import hydra
from omegaconf import DictConfig

from verl_bpo.ending import Stopped, ends_on_signals, leave_soon


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
    from verl_bpo.integration.deaths import told

    try:
        with ends_on_signals("verl_bpo"):
            auto_set_device(config)
            reference, critic = need_reference_policy(config), need_critic(config)
            validate_config(config=config, use_reference_policy=reference, use_critic=critic)
            run_ppo(config, task_runner_class=TaskRunnerV1)
    except Stopped as stop:
        ray.shutdown()
        sys.exit(128 + stop.args[0])
    except SystemExit as stop:
        if stop.code == signal.SIGTERM:  # Ray takes it over while it runs
            leave_soon("verl_bpo", signal.SIGTERM)
            ray.shutdown()
            sys.exit(128 + signal.SIGTERM)
        raise
    except RayError as error:
        known = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, RunError) else told(error)
        if known is None:
            raise
        ray.shutdown()  # what the workers still had to say comes first
        raise SystemExit(f"verl_bpo: {known}") from None


if __name__ == "__main__":
    main()
