"""``tree_agent``: the agent loop that rolls a tree and returns its rows, for every algorithm (selector ``none`` gives the
baselines their plain trajectories)."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf
from ray.exceptions import RayActorError
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from verl_bpo.config.schema import BPOConfig, build
from verl_bpo.generation.configured import configured_rollout
from verl_bpo.generation.play import Play
from verl_bpo.generation.prompts import Task
from verl_bpo.integration import tool_parsers  # which, imported first, is still being loaded here
from verl_bpo.integration.deaths import told
from verl_bpo.integration.ray_workers import PlacedPools
from verl_bpo.options import ConfigError
from verl_bpo.sandbox.base import NoTaskCanWork, SandboxError
from verl_bpo.tree.draws import drawn
from verl_bpo.tree.record import TreeRecord, dump_tree
from verl_bpo.tree.rollout import Generation, TreeRollout
from verl_bpo.tree.rows import BRANCH_LESSON, LOST, Row, RowSpans, tree_rows
from verl_bpo.tree.topology import Failure, Tree

logger = logging.getLogger(__name__)


class _Shared:
    """What all trees of one rollout worker share: sandbox pools and threads."""

    def __init__(self, config: BPOConfig, play: Play) -> None:
        self.config = config
        self.play = play
        """What validation rolls: single trajectories."""
        self.pools = PlacedPools(config.env)
        self.executor = ThreadPoolExecutor(max_workers=4 * config.env.workers + 4, thread_name_prefix="sandbox")
        self.slots = asyncio.Semaphore(config.env.workers)


def _plain_json(config: Any) -> str:
    """What rollouts read of a run's config."""
    policy = config.actor_rollout_ref
    values = {key: OmegaConf.to_container(config[key], resolve=True) for key in ("bpo", "data")}
    values["actor_rollout_ref"] = {
        "rollout": {"val_kwargs": OmegaConf.to_container(policy.rollout.val_kwargs, resolve=True)},
        "model": {"custom_chat_template": policy.model.get("custom_chat_template")},
    }
    return json.dumps(values, sort_keys=True)


@lru_cache(maxsize=4)
def _shared(resolved: str) -> _Shared:
    config = json.loads(resolved)
    return _Shared(build(config["bpo"], "plain"), Play.of_run(config))


def _lost(error: Exception) -> Tree:
    """What a task leaves that could not be played."""
    return Tree(prompt_ids=[], counters={"failed": 1}, failures=[Failure.of(error)])


@register("tree_agent")
class TreeAgentLoop(AgentLoopBase):
    """Rolls one tree for one prompt row. The row's ``extra_info`` names ``env`` (optional), ``task`` and ``seed``."""

    version: int = 0
    """Of the weights that this step samples with: verl's metrics want it of a tree, too, of which nothing was sampled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = _shared(_plain_json(self.config))
        self.bpo = self.shared.config

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        sampling_params = dict(sampling_params)
        validate, models = sampling_params.pop("_validate"), sampling_params.pop("_models")
        self.version = max(0, int(row.get("global_steps") or 0) - 1)
        play = self.shared.play
        self.prompter = play.prompter(self.tokenizer, *models, find_parser=tool_parsers.find_parser)
        sampling_params |= play.sampling if validate else {}
        sampling_params["stop_token_ids"] = sorted(self.prompter.stop_ids)
        identity = f"{row.get('global_steps')}/{row.get('index')}/{row.get('session_id')}"
        rollout = configured_rollout(
            play.config if validate else self.bpo,
            lesson=row.get(BRANCH_LESSON),
            generate=self._generator(sampling_params, identity),
            executor=self.shared.executor,
            prompter=self.prompter,
            max_prompt_tokens=play.max_prompt_tokens,
            max_response_tokens=play.max_response_tokens,
            chance=lambda place: self._hash(f"{identity}/{place}/branch") / 2**32,
        )
        try:
            wanted = Task.of(row, self.bpo.env.name)
        except ConfigError as error:
            return self._outputs(rollout, Tree(prompt_ids=[], fatal=f"prompt row {row.get('index')} {error}"))
        env, task = wanted.env, wanted.task
        async with self.shared.slots:
            try:
                world = await self.loop.run_in_executor(self.shared.executor, self.shared.pools[env].open)
            except NoTaskCanWork as error:
                return self._outputs(rollout, Tree(prompt_ids=[], fatal=str(error)))
            except SandboxError as error:
                return self._outputs(rollout, _lost(error))
            rollout.world = world
            try:
                tree = await rollout.run(task, wanted.seed, wanted.row)
            except NoTaskCanWork as error:
                # The trainer stops the run with this line.
                return self._outputs(rollout, Tree(prompt_ids=[], fatal=f"task {task}: {error}"))
            except Exception as error:
                logger.exception("task %s is left out", task)
                return self._outputs(rollout, _lost(error))
            finally:
                await self.loop.run_in_executor(self.shared.executor, world.close)
        self._dump(tree, row, env, task, validate)
        return self._outputs(rollout, tree)

    def _hash(self, place: str) -> int:
        """A number below 2**32: always the same one for a place where ``bpo.seed`` is set, else a random one."""
        return random.getrandbits(32) if self.bpo.seed is None else drawn(self.bpo.seed, place)

    def _generator(self, sampling_params: dict[str, Any], identity: str):
        request_id = uuid4().hex  # one id per tree keeps its branches on one replica, where their prefix is cached

        async def generate(prompt_ids: list[int], max_tokens: int, place: str) -> Generation:
            params = {**sampling_params, "max_tokens": max_tokens, "logprobs": True}
            if self.bpo.seed is not None:
                params["seed"] = self._hash(f"{identity}/{place}")
            engine = self.rollout_config.name
            try:
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=prompt_ids, sampling_params=params
                )
            except RayActorError as error:
                raise NoTaskCanWork(told(error)) from error
            extra = output.extra_fields
            cached = int(extra.get("num_cached_tokens") or 0)
            tokens, logprobs = list(output.token_ids), list(output.log_probs or [])
            entropy = list(extra.get("token_entropy") or [])
            if len(logprobs) != len(tokens):
                raise NoTaskCanWork(
                    f"rollout engine {engine} returned {len(logprobs)} log-probs for {len(tokens)} tokens: it must give "
                    f"one for each sampled token"
                )
            if len(entropy) != len(tokens) and self.bpo.branch.needs_entropy:
                raise NoTaskCanWork(
                    f"bpo.branch.selector={self.bpo.branch.selector.NAME} needs the entropy of each sampled token, and "
                    f"rollout engine {engine} returned {len(entropy)} for {len(tokens)} tokens: use rollout.name=vllm or "
                    f"hf, or a selector that needs none (fixed_interval, random, every)"
                )
            return Generation(
                token_ids=tokens,
                logprobs=logprobs,
                entropy=entropy,
                cached_tokens=cached,
                prefill_tokens=int(extra.get("num_prefill_tokens", len(prompt_ids) - cached)),
                weights_version=extra.get("global_steps"),
                state_value=extra.get("state_value"),
            )

        return generate

    def _outputs(self, rollout: TreeRollout, tree: Tree) -> list[AgentLoopOutput]:
        rows = tree_rows(tree, self.prompter.windowed)
        if not rows:
            rows = [self._empty_row()]
        record = tree.skeleton().to_dict()
        cause, told = next(((f.cause, str(f)) for f in tree.failures), ("other", "nothing was played"))
        versions = sorted(rollout.versions) or [self.version]
        outputs = []
        for i, row in enumerate(rows):
            usable = row.spans.trajectory != LOST
            trajectory = tree.trajectories[row.spans.trajectory] if usable else None
            reward = tree.trajectory_return(trajectory) if usable else 0.0
            info = trajectory.info if usable else {}
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=row.prompt_ids,
                    response_ids=row.response_ids,
                    response_mask=row.response_mask,
                    response_logprobs=row.logprobs,
                    reward_score=reward,
                    num_turns=row.num_turns,
                    metrics=AgentLoopMetrics(),
                    extra_fields={
                        "min_global_steps": versions[0],
                        "max_global_steps": versions[-1],
                        "reward_extra_info": {
                            "success": float(usable and tree.won(trajectory)),
                            "turns": float(row.num_turns),
                            "lost": "" if usable else cause,
                            "lost_to": "" if usable else told,
                            **({"task_type": str(info["task_type"])} if "task_type" in info else {}),
                        },
                        "turn_scores": [],
                        "tool_rewards": [],
                        "row": row.spans.to_dict(),
                        "tree": record if i == 0 else None,
                    },
                )
            )
        return outputs

    def _empty_row(self) -> Row:
        """Stands for a tree all of whose trajectories were lost, so that its costs and its failure are still counted."""
        token = self.tokenizer.eos_token_id
        return Row([token], [token], [0.0], RowSpans.none(1), 0)

    def _dump(self, tree: Tree, row: dict[str, Any], env: str, task: str, validate: bool) -> None:
        if self.bpo.dump_dir is None or validate:
            return
        place = int(row.get("global_steps") or 0), str(row.get("uid")), int(row.get("session_id") or 0)
        dump_tree(self.bpo.dump_dir, TreeRecord(*place, env, task, tree))
