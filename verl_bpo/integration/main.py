"""``verl-bpo train``: verl's ``main_ppo`` on a config that lists the ``bpo.*`` keys."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig


@hydra.main(config_path="pkg://verl_bpo.config", config_name="bpo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """The same calls in the same order as ``verl.trainer.main_ppo.main``, for the v1 trainer."""
    import ray
    from ray.exceptions import RayTaskError
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from verl_bpo.config.schema import RunError

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    try:
        run_ppo(config, task_runner_class=TaskRunnerV1)
    except RayTaskError as error:
        if isinstance(error.cause, RunError):
            ray.shutdown()  # what the workers still had to say comes first
            raise SystemExit(f"verl_bpo: {error.cause}") from None
        raise


if __name__ == "__main__":
    main()
