"""What of a model is checked before anything starts, and where it is loaded."""

import pytest
import torch
from tiny import prompts, tiny_model
from transformers import (
    BartConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3NextConfig,
)

from verl_bpo.generation.generator import ContinuousBatcher
from verl_bpo.generation.sampling import SamplingParams
from verl_bpo.model.packed_tree import pack_rows, packed_forward
from verl_bpo.model.packed_tree.attach import attach
from verl_bpo.model.support import GENERATOR, PACKED, READOUT, UnsupportedModel, attention_layers, check_config
from verl_bpo.model.value_readout import attach_value_readout

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("use", [PACKED, GENERATOR])
@pytest.mark.parametrize(
    "config, longest, message",
    [
        (LlamaConfig(rope_parameters=DYNAMIC, max_position_embeddings=32), 33, "rope_type=dynamic"),
        (LlamaConfig(rope_parameters=LONG, max_position_embeddings=128), 33, "rope_type=longrope"),
        (LlamaConfig(max_position_embeddings=32, sliding_window=16), 17, "sliding window of 16"),
        (Gemma2Config(), 8, "attn_logit_softcapping"),
        (MixtralConfig(output_router_logits=True), 8, "output_router_logits=True"),
        (Qwen3NextConfig(), 8, "linear_attention"),
        (BartConfig(), 8, "encoder and a decoder"),
    ],
)
def test_a_config_is_refused_with_the_reason_and_what_to_do(config, longest, message, use):
    with pytest.raises(UnsupportedModel, match=message) as refusal:
        check_config(config, use, longest)
    assert "\n" not in str(refusal.value)
    assert use.name in str(refusal.value) and use.instead in str(refusal.value)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(rope_parameters=DYNAMIC, max_position_embeddings=32),
        LlamaConfig(rope_parameters=LONG, max_position_embeddings=128),
        LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
        Phi3Config(sliding_window=32),
        DeepseekV3Config(),
        Qwen2Config(),
    ],
)
def test_a_config_is_taken_within_the_length_that_it_is_right_for(config):
    check_config(config, PACKED, 32)
    check_config(config, GENERATOR, 32)


def test_a_rotary_embedding_that_nobody_knows_is_refused():
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": "spiral"}
    with pytest.raises(UnsupportedModel, match="rope_type=spiral isn't known"):
        check_config(config, PACKED)


def test_what_only_one_use_minds_is_refused_there_only():
    shared = Gemma4TextConfig(num_kv_shared_layers=2)
    with pytest.raises(UnsupportedModel, match="num_kv_shared_layers=2"):
        check_config(shared, GENERATOR)
    check_config(shared, PACKED)
    check_config(Qwen3NextConfig(), READOUT)
    dropping = LlamaConfig(attention_dropout=0.1)
    with pytest.raises(UnsupportedModel, match=r"attention_dropout=0.1.*set it to 0"):
        check_config(dropping, PACKED)
    check_config(dropping, GENERATOR)


@pytest.mark.parametrize("use", [PACKED, GENERATOR])
def test_attention_sinks_are_found_in_a_model_without_weights(use):
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(num_hidden_layers=2))
    with pytest.raises(UnsupportedModel, match="GptOssAttention has attention sinks"):
        attention_layers(model, use)


def test_a_model_without_weights_can_be_tried():
    with torch.device("meta"):
        attach(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2)))


# --- where the length of a call matters


def scaled(rope) -> torch.nn.Module:
    return tiny_model(LlamaConfig, LlamaForCausalLM, rope_parameters=dict(rope), max_position_embeddings=32)


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_a_packed_path_beyond_the_unscaled_positions_is_refused(rope):
    model = scaled(rope)
    packed_forward(model, pack_rows([list(range(32)), list(range(9))]))
    with pytest.raises(
        UnsupportedModel, match="rows of up to 33 tokens exceed llama's 32 tokens of unscaled positions"
    ):
        packed_forward(model, pack_rows([list(range(33)), list(range(9))]))


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_the_generator_takes_no_sequence_that_would_change_its_neighbours(rope):
    with pytest.raises(UnsupportedModel, match="unscaled positions"):
        ContinuousBatcher(scaled(rope))
    with pytest.raises(UnsupportedModel, match="unscaled positions"):
        ContinuousBatcher(scaled(rope), max_model_len=33)
    model = scaled(rope)
    batcher = ContinuousBatcher(model, max_model_len=32)
    with pytest.raises(ValueError, match="32 tokens that a sequence may have"):
        batcher.submit([2] * 30, SamplingParams(max_tokens=3))
    short, *long = prompts(4, shortest=3, longest=5) + prompts(2, shortest=20, longest=24, seed=1)
    params = SamplingParams(max_tokens=8, seed=0, logprobs=True, ignore_eos=True)
    beside = batcher.generate([short, *long], params)[0]
    (alone,) = ContinuousBatcher(scaled(rope), max_model_len=32).generate([short], params)
    assert beside.token_ids == alone.token_ids
    assert beside.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


# --- what a model does beyond its config


class TwoPositions(LlamaForCausalLM):
    """Counts positions by itself."""

    def forward(self, input_ids=None, **kwargs):
        kwargs.pop("position_ids", None)
        return super().forward(input_ids=input_ids, **kwargs)


class NoKeywords(LlamaForCausalLM):
    """Keeps from its layers what it was called with beyond what it knows."""

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, **kwargs):
        return super().forward(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask)


@pytest.mark.parametrize(
    "kind, message", [(TwoPositions, "counts positions by itself"), (NoKeywords, "does more than attend")]
)
def test_a_model_of_another_form_is_refused_where_it_is_loaded_and_left_as_it_was(kind, message):
    model = tiny_model(LlamaConfig, kind)
    ids = torch.tensor([[3, 4, 5]])
    before = model(input_ids=ids).logits
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=message):
            attach(model)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_the_readout_refuses_an_encoder_decoder_by_name():
    model = tiny_model(LlamaConfig, LlamaForCausalLM)
    model.config.is_encoder_decoder = True
    with pytest.raises(UnsupportedModel, match="llama is an encoder and a decoder: use a decoder-only"):
        attach_value_readout(model)
