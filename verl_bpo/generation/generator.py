"""Continuous batching of token generation on a transformers model: what verl's rollout needs where no GPU is.

    batcher = ContinuousBatcher(model, eos_token_ids=[2])
    completions = batcher.generate(prompts, SamplingParams(max_tokens=32))

Requests join between two decode steps and leave as soon as they end. The branches of a tree share their prompts'
prefixes, so the keys and values of prefixes are kept and not computed again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_bpo.generation.kv_rows import KVRows, PrefixCache
from verl_bpo.generation.sampling import SamplingParams, sample
from verl_bpo.model.support import GENERATOR, check_length, longest_sequence

logger = logging.getLogger(__name__)


@dataclass
class Completion:
    """What a request got. Lists have one entry per generated token; the token that stopped it is the last."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    """Empty when not asked for, like ``entropies``."""
    entropies: list[float]
    """Exact, nats."""
    stop_reason: str
    """``stop``, ``length`` or ``aborted``."""
    num_cached_tokens: int
    """Prompt tokens whose keys and values were found; with ``num_prefill_tokens`` the whole prompt."""
    num_prefill_tokens: int
    """Prompt tokens that were computed."""
    state_value: float | None = None
    """V of the state that the prompt is, where the batcher has a value head."""


@dataclass(eq=False)
class _Request:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    future: Future
    rng: np.random.Generator
    stops: frozenset[int]
    epoch: int = 0
    """The weights its keys were computed with."""
    keys: list[bytes] = field(default_factory=list)
    cached: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    started: bool = False
    state_value: float | None = None

    @property
    def stored(self) -> int:
        """Tokens whose keys and values are in its row: the last sampled one has not been run."""
        return len(self.prompt) + len(self.output) - 1


class ContinuousBatcher:
    """Generates for many requests at once. Not thread-safe: see :class:`BatcherThread`.

    Args:
        model: any causal language model whose attention is full, on transformers' attention interface; its attention
            implementation is changed, which leaves ordinary calls as they were.
        eos_token_ids: tokens that end a sequence.
        max_num_seqs: sequences generated together; others wait.
        max_batched_tokens: prompt tokens computed in one step (a longer prompt is computed alone, in one go).
        max_model_len: most tokens of a prompt and its completion; None: no limit here. A model with a sliding window, or
            with positions that are scaled beyond a length, needs one within it.
        prefix_cache_tokens: tokens whose keys and values are kept for later prompts; 0 turns it off.
        block_size: tokens of a prefix are kept and found in blocks of this many.
        seed: of requests that bring none.
        tokenizer: only for stop strings.

    Raises:
        UnsupportedModel: the model would be computed wrongly here; the message says why and what to do.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Collection[int] = (),
        *,
        max_num_seqs: int = 64,
        max_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        prefix_cache_tokens: int = 65536,
        block_size: int = 16,
        seed: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        most = longest_sequence(model.config)
        if most is not None:
            check_length(model.config, most + 1 if max_model_len is None else max_model_len, GENERATOR)
        self.model = model.eval()
        self.eos = frozenset(eos_token_ids)
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.max_model_len = max_model_len
        self.seed = seed
        self.tokenizer = tokenizer
        self.rows = KVRows(model)
        self.prefixes = PrefixCache(self.rows, prefix_cache_tokens, block_size)
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        """The request of row i is the i-th."""
        self.value_head: tuple[torch.Tensor, torch.Tensor] | None = None
        """Weight [hidden size] and bias of a value of the final hidden state at a prompt's end: SAPO's state value. It costs
        one dot product a request."""
        self._final: torch.Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._see_final_states)
        self._epoch = 0
        self._numbers = count()

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> Future[Completion]:
        """Queue a request; :meth:`step` works on it.

        Raises:
            ValueError: an empty prompt, no room for a single token, or stop strings without a tokenizer.
        """
        number = next(self._numbers)
        prompt = list(prompt_ids)
        if not prompt:
            raise ValueError("the prompt is empty")
        if self.max_model_len is not None and len(prompt) + params.max_tokens > self.max_model_len:
            raise ValueError(
                f"the prompt's {len(prompt)} tokens and max_tokens={params.max_tokens} are more than the "
                f"{self.max_model_len} tokens that a sequence may have"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {params.stop} need a tokenizer")
        seed = (self.seed, number) if params.seed is None else (params.seed % 2**64,)
        request = _Request(
            request_id=str(number) if request_id is None else request_id,
            prompt=prompt,
            params=params,
            future=Future(),
            rng=np.random.default_rng(seed),
            stops=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos),
        )
        request.future.set_running_or_notify_cancel()  # from here on it gets a result or an error, whoever still waits
        self.waiting.append(request)
        return request.future

    def generate(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Complete all prompts, in order; ``params`` is one for all or one each."""
        prompts = list(prompts)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
        futures = [self.submit(prompt, p) for prompt, p in zip(prompts, each)]
        while self.busy:
            self.step()
        return [future.result() for future in futures]

    @torch.inference_mode()
    def abort(self, request_id: str | None = None) -> list[str]:
        """End one request, or all: their futures get what was generated so far. Returns the ids that were ended."""
        ended = [r for r in (*self.running, *self.waiting) if request_id in (None, r.request_id)]
        for request in ended:
            if request in self.running:
                self._leave(request)
            else:
                self.waiting.remove(request)
            self._finish(request, "aborted")
        return [r.request_id for r in ended]

    def fail(self, error: BaseException) -> None:
        """End all requests with an error."""
        requests, self.running = [*self.running, *self.waiting], []
        self.waiting.clear()
        self.rows.release()
        for request in requests:
            request.future.set_exception(error)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    # --- weights and memory -----------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Forget what was computed with the old weights. Requests in flight go on, on keys of the old weights that
        nobody else will reuse."""
        self._epoch += 1
        self.prefixes.clear()

    def release_memory(self) -> None:
        """Forget all prefixes and, while nothing runs, give the rows' memory back."""
        self.prefixes.clear()
        if not self.running:
            self.rows.release()

    # --- one step ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, run one forward pass and sample one token for every running request."""
        decoding, admitted = self.running, self._admit()
        self.running = requests = decoding + admitted
        if not requests:
            return
        self.rows.reserve([r.stored + 1 for r in requests])
        for row, request in enumerate(admitted, start=len(decoding)):
            self.prefixes.load(self.rows, row, request.keys[: request.cached // self.prefixes.block])
        plan = self.rows.plan([r.stored for r in decoding], [(r.cached, len(r.prompt)) for r in admitted])
        ids = [r.output[-1] for r in decoding]
        for request in admitted:
            ids += request.prompt[request.cached :]
        logits = self.rows.forward(self.model, ids, plan)
        for row, request in enumerate(admitted, start=len(decoding)):
            self.prefixes.store(self.rows, row, request.keys)
        if self.value_head is not None and admitted:
            weight, bias = self.value_head
            values = self._final[0, len(decoding) :].float() @ weight + bias
            for request, value in zip(admitted, values.tolist()):
                request.state_value = value
        drawn = sample(logits, [r.params for r in requests], [r.rng.random() for r in requests])
        for request, token, logprob, entropy in zip(requests, *drawn):
            request.output.append(token)
            if request.params.logprobs:
                request.logprobs.append(logprob)
                request.entropies.append(entropy)
        for request in list(requests):  # those that leave change it
            if reason := self._stop_reason(request):
                self._leave(request)
                self._finish(request, reason)

    def _see_final_states(self, module: torch.nn.Module, args: tuple) -> None:
        if self.value_head is not None:
            self._final = args[0]

    def _admit(self) -> list[_Request]:
        """Take waiting requests, first come first served. One whose next uncached block another one computes in this
        very step waits for the next, where it finds it."""
        admitted, later, budget = [], [], self.max_batched_tokens
        computing: set[bytes] = set()
        while self.waiting and len(self.running) + len(admitted) < self.max_num_seqs:
            request = self.waiting.popleft()
            if not request.keys and self.prefixes.capacity:
                request.keys = self.prefixes.keys(request.prompt, [])
            # The last prompt token is always computed: its logits give the first token.
            usable = request.keys[: (len(request.prompt) - 1) // self.prefixes.block]
            held = self.prefixes.count(usable)
            if held < len(usable) and usable[held] in computing:
                later.append(request)
                continue
            request.cached = held * self.prefixes.block
            tokens = len(request.prompt) - request.cached
            if admitted and tokens > budget:
                later.append(request)
                break
            budget -= tokens
            computing.update(request.keys[held:])
            request.started, request.epoch = True, self._epoch
            admitted.append(request)
        self.waiting.extendleft(reversed(later))
        return admitted

    def _stop_reason(self, request: _Request) -> str | None:
        if request.output[-1] in request.stops or self._ends_with_stop_string(request):
            return "stop"
        return "length" if len(request.output) >= request.params.max_tokens else None

    def _ends_with_stop_string(self, request: _Request) -> bool:
        if not request.params.stop:
            return False
        # A token stands for at least one byte, unless it is special: a few more than the longest string has bytes.
        window = max(len(s.encode()) for s in request.params.stop) + 8
        text = self.tokenizer.decode(request.output[-window:], skip_special_tokens=True)
        before = self.tokenizer.decode(request.output[-window:-1], skip_special_tokens=True)
        return any(s in text and s not in before for s in request.params.stop)

    def _leave(self, request: _Request) -> None:
        """Free the request's row; the last one takes its number. Its keys become a prefix for others."""
        row, last = self.running.index(request), self.running[-1]
        if request.epoch == self._epoch and self.prefixes.capacity:
            known = (request.prompt + request.output)[: request.stored]
            self.prefixes.store(self.rows, row, self.prefixes.keys(known, request.keys))
        self.rows.drop(row)
        self.running[row] = last
        self.running.pop()

    def _finish(self, request: _Request, reason: str) -> None:
        request.future.set_result(
            Completion(
                request_id=request.request_id,
                token_ids=request.output,
                logprobs=request.logprobs,
                entropies=request.entropies,
                stop_reason=reason,
                num_cached_tokens=request.cached,
                num_prefill_tokens=len(request.prompt) - request.cached if request.started else 0,
                state_value=request.state_value,
            )
        )


class BatcherThread:
    """Runs a batcher in a thread of its own. Everything asked of it happens between two steps, in order."""

    def __init__(self, batcher: ContinuousBatcher, threads: int) -> None:
        self.batcher = batcher
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads,), name="generation", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        """Run ``function`` on the batcher's thread, when no step runs. The future gets its result or its error."""
        future: Future = Future()
        self._calls.put((lambda: function(*args, **kwargs), future))
        return future

    def close(self) -> None:
        """Stop after the current step. Requests in flight end as aborted."""
        self._calls.put(None)
        self._thread.join()

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while True:
            while not self.batcher.busy or not self._calls.empty():
                item = self._calls.get()
                if item is None:
                    self.batcher.abort()
                    return
                call, future = item
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(call())
                except BaseException as error:  # the caller must see it, whatever it is
                    future.set_exception(error)
            try:
                self.batcher.step()
            except Exception as error:
                logger.exception("generation failed")
                self.batcher.fail(error)
