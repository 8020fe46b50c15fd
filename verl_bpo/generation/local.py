"""Trees in this process: the rollouts of training without verl and Ray, for evaluation and measurements."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl_bpo.config.schema import BPOConfig
from verl_bpo.generation.configured import configured_rollout
from verl_bpo.generation.generator import BatcherThread, ContinuousBatcher
from verl_bpo.generation.play import FindParser, Play
from verl_bpo.generation.pools import Pools
from verl_bpo.generation.prompts import Task
from verl_bpo.generation.sampling import SamplingParams
from verl_bpo.model.support import longest_sequence
from verl_bpo.sandbox.base import NoTaskCanWork, SandboxError
from verl_bpo.tree.draws import drawn
from verl_bpo.tree.rollout import Generation
from verl_bpo.tree.topology import Failure, Tree

logger = logging.getLogger(__name__)


class LocalRollouts:
    """Rolls trees with a transformers model. Use as a context; :meth:`tree` from one event loop.

    Args:
        model: a causal language model on the CPU.
        tokenizer: its tokenizer.
        config: ``bpo.*``; ``bpo.env.workers`` trees run at once. Sandboxes are local, whatever ``bpo.env.placement`` says.
        play: how they are prompted and sampled; how they branch, ``config`` says.
        seed: of every sampled action; an action depends on it, its tree's ``identity``, its place in the tree and its
            prompt, not on what else runs.
        threads: of PyTorch.
        find_parser: finds what reads tool calls (template ``tools``).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: BPOConfig,
        play: Play,
        *,
        seed: int = 0,
        threads: int = 1,
        find_parser: FindParser | None = None,
    ) -> None:
        self.config, self.play, self.seed = config, play, seed
        self.prompter = play.prompter(tokenizer, model.generation_config, model.config, find_parser=find_parser)
        self.stops = tuple(sorted(self.prompter.stop_ids))
        self.batcher = ContinuousBatcher(
            model, max_num_seqs=max(64, 2 * config.env.workers), max_model_len=longest_sequence(model.config)
        )
        self.generation = BatcherThread(self.batcher, threads)
        self.executor = ThreadPoolExecutor(4 * config.env.workers + 4, thread_name_prefix="sandbox")
        self.pools = Pools(config.env)
        self.slots = asyncio.Semaphore(config.env.workers)

    def __enter__(self) -> LocalRollouts:
        return self

    def __exit__(self, *exc: object) -> None:
        self.generation.close()
        self.pools.close()
        self.executor.shutdown()

    async def tree(self, task: Task, identity: str) -> Tree:
        """Roll one tree as ``bpo.branch`` and ``bpo.budget`` say.

        Args:
            task: what to open.
            identity: names the tree among all trees of this seed.

        Returns:
            The tree; one without trajectories where the world can't be opened, or the tree can't be rolled.

        Raises:
            NoTaskCanWork: no other task would fare better.
        """
        rollout = configured_rollout(
            self.config,
            generate=self._generator(identity),
            executor=self.executor,
            prompter=self.prompter,
            max_prompt_tokens=self.play.max_prompt_tokens,
            max_response_tokens=self.play.max_response_tokens,
            chance=lambda place: drawn(self.seed, f"{identity}/{place}/branch") / 2**32,
        )
        async with self.slots:
            try:
                rollout.world = await self._call(self.pools[task.env].open)
            except SandboxError as error:
                return Tree(prompt_ids=[], failures=[Failure.of(error)])
            try:
                return await rollout.run(task.task, task.seed, task.row)
            except NoTaskCanWork:
                raise
            except Exception as error:
                logger.exception("task %s is left out", task.task)
                return Tree(prompt_ids=[], failures=[Failure.of(error)])
            finally:
                await self._call(rollout.world.close)

    def _generator(self, identity: str):
        async def generate(prompt_ids: list[int], max_tokens: int, place: str) -> Generation:
            params = SamplingParams(
                max_tokens=max_tokens,
                stop_token_ids=self.stops,
                seed=drawn(self.seed, f"{identity}/{place}"),
                **self.play.sampling,
            )
            # The batcher's thread hands out a future of its own, so this waits for two in turn.
            asked = self.generation.call(self.batcher.submit, prompt_ids, params)
            done = await asyncio.wrap_future(await asyncio.wrap_future(asked))
            return Generation(
                token_ids=done.token_ids,
                logprobs=done.logprobs,
                entropy=done.entropies,
                cached_tokens=done.num_cached_tokens,
                prefill_tokens=done.num_prefill_tokens,
                state_value=done.state_value,
            )

        return generate

    async def _call(self, function: Callable, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *args)
