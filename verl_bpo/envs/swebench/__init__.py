"""SWE-bench (https://www.swebench.com): repair a real repository so that its hidden tests pass."""

from verl_bpo.envs.swebench.environment import SwebenchEnvironment

__all__ = ["SwebenchEnvironment"]
