"""verl's vLLM server with true entropies and state values in ``extra_fields``. Imports vLLM; ``integration.vllm`` doesn't."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from verl_bpo.integration.vllm import extra_columns, split_extras, topk_logprobs


class EntropyVLLMServer(vLLMHttpServer):
    """Adds to every request that asks for log-probs: ``token_entropy`` (exact, nats, one per token); where the trainer
    sends its value readout ``state_value`` (V of the prompt); with ``VERL_BPO_TOPK_LOGPROBS`` ``topk_logprobs`` (token id
    -> log-prob, one dict per token)."""

    async def run_server(self, args: Any) -> None:
        columns = topk_logprobs() + extra_columns()
        if args.max_logprobs is not None and 0 <= args.max_logprobs < columns:
            args.max_logprobs = columns
        await super().run_server(args)
        engine_generate = self.engine.generate
        self._own: set[str] = set()
        self._completions: dict[str, list] = {}

        # verl's generate() keeps only the sampled token's log-prob, so they are asked for and caught one level below.
        # Requests that reach the engine over HTTP are not this server's own and pass unchanged.
        async def generate(prompt, sampling_params, request_id, **kwargs):
            wanted = sampling_params.logprobs is not None and request_id in self._own
            if wanted:
                sampling_params.logprobs = columns
                sampling_params.detokenize = False  # the extra columns' token ids have no text; verl uses ids only
            output = None
            async for output in engine_generate(prompt, sampling_params, request_id, **kwargs):
                yield output
            if wanted and output is not None and output.outputs and output.outputs[0].logprobs is not None:
                self._completions[request_id] = output.outputs[0].logprobs

        self.engine.generate = generate

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs: Any) -> TokenOutput:
        self._own.add(request_id)
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            self._own.discard(request_id)
            logprobs = self._completions.pop(request_id, None)
        if logprobs is not None:
            entropies, value, others = split_extras(logprobs)
            output.extra_fields["token_entropy"] = entropies
            if value is not None:
                output.extra_fields["state_value"] = value
            if topk_logprobs():
                output.extra_fields["topk_logprobs"] = others
        return output


class EntropyVLLMReplica(vLLMReplica):
    """``rollout.name=vllm`` with :class:`EntropyVLLMServer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(EntropyVLLMServer)
