"""A tiny random model and plain, unbatched reference computations."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 97
EOS = 1


def tiny_model(config=Qwen2Config, model=Qwen2ForCausalLM, seed: int = 0, **overrides) -> PreTrainedModel:
    """Grouped queries, three layers, weights large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": EOS,
    }
    net = model(config(**{**values, **overrides})).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return net


@torch.no_grad()
def reference(model: PreTrainedModel, prompt: list[int], output: list[int], temperature: float = 1.0):
    """Log-probs of the output's tokens and exact entropies, from one plain forward pass of the whole sequence."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]
    return chosen, torch.special.entr(logprobs.exp()).sum(-1)


def prompts(count: int, shortest: int = 3, longest: int = 60, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
