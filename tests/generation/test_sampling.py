import math

import pytest
import torch

from verl_bpo.generation.sampling import SamplingParams, sample

LOGITS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()


def draw(uniform: float, logits: torch.Tensor = LOGITS, **params):
    (token,), (logprob,), (entropy,) = sample(logits[None], [SamplingParams(**params)], [uniform])
    return token, logprob, entropy


def support(**params) -> set[int]:
    return {draw(u, **params)[0] for u in torch.linspace(0, 1 - 1e-9, 401, dtype=torch.float64).tolist()}


def test_draws_follow_the_distribution():
    count = 20000
    uniforms = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).tolist()
    tokens, _, _ = sample(LOGITS.expand(count, -1), [SamplingParams()] * count, uniforms)
    shares = torch.bincount(torch.tensor(tokens), minlength=5) / count
    torch.testing.assert_close(shares, LOGITS.exp(), atol=1e-3, rtol=0)


def test_logprob_and_entropy_are_of_the_tempered_distribution():
    token, logprob, entropy = draw(0.6, temperature=0.7)
    probs = (LOGITS / 0.7).softmax(-1)
    assert logprob == pytest.approx(probs[token].log().item(), abs=1e-6)
    assert entropy == pytest.approx(torch.special.entr(probs).sum().item(), abs=1e-6)


def test_temperature_zero_takes_the_likeliest_token_and_reports_temperature_one():
    token, logprob, entropy = draw(0.99, temperature=0.0, top_k=1)
    assert token == 0
    assert logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert entropy == pytest.approx(torch.special.entr(LOGITS.exp()).sum().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),  # 0.5 is not yet 0.6
        ({"top_p": 0.01}, {0}),  # one token always stays
        ({"min_p": 0.25}, {0, 1, 2}),  # at least 0.25 * 0.5
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),  # top_p works on what top_k left: 0.5 / 0.85 < 0.7
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
    ],
)
def test_cut_distributions_are_normalised_again(params, kept):
    assert support(**params) == kept
    probs = LOGITS.exp()[sorted(kept)]
    probs = probs / probs.sum()
    token, logprob, entropy = draw(0.0, **params)
    assert logprob == pytest.approx(probs[token].log().item(), abs=1e-6)
    assert entropy == pytest.approx(torch.special.entr(probs).sum().item(), abs=1e-6)


def cut_by_full_sort(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """One row by the definition: sort tokens, keep the first of them, stable among equals."""
    ordered, order = logits.sort(descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if p.min_p:
        kept &= ordered >= ordered[0] + math.log(p.min_p)
    if p.top_k > 0:
        kept &= torch.arange(len(ordered)) < p.top_k
    probs = ordered.masked_fill(~kept, float("-inf")).softmax(-1)
    if p.top_p < 1:
        kept &= probs.cumsum(-1) - probs < p.top_p
    kept[0] = True
    return logits.masked_fill(~torch.zeros_like(kept).scatter(0, order, kept), float("-inf"))


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 6.0])
def test_cuts_of_a_large_vocabulary_are_those_of_a_full_sort(spread):
    """With equal logits too: all of them (spread 0), or many at the edge (rounded to sixteenths)."""
    logits = (16 * spread * torch.randn(3, 20000, generator=torch.Generator().manual_seed(1))).round() / 16
    logits[2, ::3] = float("-inf")
    cuts = [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}, {"top_p": 0.5, "top_k": 7, "min_p": 0.01}, {"top_k": 30000}]
    for cut in cuts:
        params = SamplingParams(**cut)
        uniforms = [0.05, 0.5, 0.95]
        _, _, entropies = found = sample(logits, [params] * 3, uniforms)
        expected = torch.stack([cut_by_full_sort(row, params) for row in logits])
        plain = sample(expected, [SamplingParams()] * 3, uniforms)
        assert found[0] == plain[0]
        assert found[1] == pytest.approx(plain[1], abs=1e-5)
        probs = expected.softmax(-1)
        assert entropies == pytest.approx(torch.special.entr(probs).sum(-1).tolist(), abs=1e-3)


def test_rows_do_not_influence_each_other():
    params = [SamplingParams(), SamplingParams(top_k=2), SamplingParams(temperature=0.3), SamplingParams(temperature=0)]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    uniforms = [0.1, 0.7, 0.4, 0.9]
    together = sample(logits, params, uniforms)
    alone = [sample(logits[i : i + 1], params[i : i + 1], uniforms[i : i + 1]) for i in range(4)]
    for all_rows, single in zip(together, zip(*alone)):
        assert all_rows == pytest.approx([x for (x,) in single], abs=1e-6)


def test_verls_parameters_are_understood():
    params = SamplingParams.from_dict(
        {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "stop": "x"}
    )
    assert params == SamplingParams(temperature=0.5, stop=("x",))
    assert not SamplingParams.from_dict({"logprobs": None}).logprobs
    assert SamplingParams.from_dict({"logprobs": 0}).logprobs


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
    ],
)
def test_a_wrong_parameter_is_named(params, name):
    with pytest.raises(ValueError, match=name):
        SamplingParams.from_dict(params)
