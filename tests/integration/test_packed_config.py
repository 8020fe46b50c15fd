"""What packed trees can't be combined with is said before anything starts; what they need reaches the workers."""

import os

import hydra
import pytest
from omegaconf import OmegaConf
from transformers import (
    BartConfig,
    FalconConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3NextConfig,
    StableLmConfig,
)

pytest.importorskip("verl")

from verl_bpo.integration.packed_engine import CHUNKED_COST, VENDOR
from verl_bpo.integration.prepare import PACKED_VENDOR, prepare
from verl_bpo.options import ConfigError

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


@pytest.fixture
def environment(monkeypatch):
    for name in ("VERL_ENGINE_VENDOR", "VERL_BPO_PACKED_BACKEND", "VERL_BPO_PACKED_CHUNKED", "VERL_BPO_ENTROPY"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def config(*overrides):
    with hydra.initialize_config_module("verl_bpo.config", version_base=None):
        return hydra.compose(
            "bpo_trainer",
            ["bpo.env.name=textworld", "data.train_batch_size=8", "actor_rollout_ref.rollout.name=hf", *overrides],
        )


def test_one_key_selects_the_engines_of_all_workers(environment, capsys):
    prepared = config("bpo.packed_tree.enable=true", f"{ACTOR}.use_dynamic_bsz=true")
    prepare(prepared)
    sent = prepared.ray_kwargs.ray_init.runtime_env.env_vars
    assert sent.VERL_ENGINE_VENDOR == PACKED_VENDOR == VENDOR == os.environ["VERL_ENGINE_VENDOR"]
    assert (sent.VERL_BPO_PACKED_BACKEND, sent.VERL_BPO_PACKED_CHUNKED) == ("auto", "auto")
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.parametrize(("value", "expected"), [("true", "true"), ("false", "false"), ("auto", "auto")])
def test_the_engines_know_the_mode_that_is_sent_to_them(environment, value, expected):
    prepared = config("bpo.packed_tree.enable=true", f"bpo.packed_tree.chunked={value}")
    prepare(prepared)
    sent = prepared.ray_kwargs.ray_init.runtime_env.env_vars
    assert sent["VERL_BPO_PACKED_CHUNKED"] == expected
    assert expected in CHUNKED_COST


def test_without_it_nothing_is_selected(environment):
    prepared = config()
    prepare(prepared)
    assert "VERL_ENGINE_VENDOR" not in os.environ
    assert OmegaConf.select(prepared, "ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR") is None


def test_settings_that_share_less_are_warned_about(environment, capsys):
    prepare(config("bpo.packed_tree.enable=true", f"{ACTOR}.shuffle=true"))
    printed = capsys.readouterr().out
    assert "use_dynamic_bsz=True" in printed and "shuffle=True scatters" in printed


@pytest.mark.parametrize(
    "override, message",
    [
        ("bpo.packed_tree.backend=xformers", "bpo.packed_tree.backend='xformers' is not one of auto, sdpa"),
        ("bpo.packed_tree.chunked=maybe", "bpo.packed_tree.chunked='maybe' is not one of True, False, auto"),
        ("bpo.packed_tree.backend=flash_attn", "backend=flash_attn trains on a GPU only"),
        (f"{ACTOR}.strategy=megatron", "actor.strategy=megatron has no engine for packed trees"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2", "ulysses_sequence_parallel_size=2 splits"),
        (
            "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=2",
            "ulysses_sequence_parallel_size=2 splits",
        ),
        (f"{MODEL}.use_fused_kernels=true", "use_fused_kernels=True can't be combined with bpo.packed_tree.enable"),
        (f"{MODEL}.enable_activation_offload=true", "enable_activation_offload=True can't be combined"),
        (f"{ACTOR}.calculate_sum_pi_squared=true", "calculate_sum_pi_squared=True can't be combined"),
    ],
)
def test_an_unsupported_setting_is_named(environment, override, message):
    with pytest.raises(ConfigError, match=message):
        prepare(config("bpo.packed_tree.enable=true", override))


def test_another_vendors_engines_are_not_replaced_silently(environment, monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "metax")
    with pytest.raises(ConfigError, match="VERL_ENGINE_VENDOR=metax"):
        prepare(config("bpo.packed_tree.enable=true"))


def test_a_model_whose_window_the_rows_exceed_is_refused(environment, tmp_path):
    MistralConfig(sliding_window=600).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="rows of up to 1024 tokens exceed mistral's sliding window of 600"):
        prepare(config("bpo.packed_tree.enable=true", f"{MODEL}.path={tmp_path}"))


SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize("packed", ["true", "false"])
@pytest.mark.parametrize(
    "model, message",
    [
        (LlamaConfig(rope_parameters=DYNAMIC, max_position_embeddings=512), "rope_type=dynamic"),
        (Gemma2Config(), "attn_logit_softcapping"),
        (GptOssConfig(num_hidden_layers=2, sliding_window=4096), "attention sinks"),
        (MixtralConfig(output_router_logits=True), "output_router_logits=True"),
        (Qwen3NextConfig(), "linear_attention"),
        (FalconConfig(), "0 modules of causal self-attention"),
        (BartConfig(), "an encoder and a decoder"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused_in_one_line(environment, tmp_path, model, message, packed):
    """By packed trees if they are on, else by the generator: neither computes these."""
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message) as refusal:
        prepare(config(f"bpo.packed_tree.enable={packed}", f"{MODEL}.path={tmp_path}"))
    assert "\n" not in str(refusal.value)
    assert ("packed trees" if packed == "true" else "the generator of rollout.name=hf") in str(refusal.value)


def test_a_model_whose_layers_hide_the_tree_is_refused_before_its_weights_are_there(environment, tmp_path):
    StableLmConfig(**SMALL, num_key_value_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="StableLmAttention does more than attend"):
        prepare(config("bpo.packed_tree.enable=true", f"{MODEL}.path={tmp_path}"))


def test_the_readout_is_checked_too(environment, tmp_path):
    BartConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="bart is an encoder and a decoder"):
        prepare(config("algorithm.adv_estimator=sapo", f"{MODEL}.path={tmp_path}"))


def test_the_config_is_checked_as_verl_will_change_it(environment, tmp_path):
    LlamaConfig(**SMALL, attention_dropout=0.1).save_pretrained(tmp_path)
    packed = ("bpo.packed_tree.enable=true", f"{MODEL}.path={tmp_path}")
    with pytest.raises(ConfigError, match="attention_dropout=0.1"):
        prepare(config(*packed))
    prepare(config(*packed, f"+{MODEL}.override_config.attention_dropout=0"))
