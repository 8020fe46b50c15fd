"""The estimates' parts that can be checked without a GPU."""

import pytest

from verl_bpo.commands.estimate import KNOWN, ModelShape, model_shape

torch = pytest.importorskip("torch")


def config_of(shape: ModelShape):
    from transformers import LlamaConfig, Qwen2Config

    return (Qwen2Config if shape.attention_bias else LlamaConfig)(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
    )


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_of_the_real_architecture(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(KNOWN[name]))
    assert KNOWN[name].parameters == sum(p.numel() for p in model.parameters())


def test_published_sizes():
    """As stated on the models' pages: 1.54B, 3.09B, 7.61B and 8.03B."""
    assert [round(shape.parameters / 1e9, 2) for shape in KNOWN.values()] == [1.54, 3.09, 7.62, 8.03]


def test_the_shape_of_a_folder_is_read_from_its_config(tmp_path):
    shape = ModelShape(64, 2, 4, 2, 128, 300, True, True)
    config_of(shape).save_pretrained(tmp_path)
    assert model_shape(str(tmp_path)) == shape
    assert model_shape("Qwen/Qwen2.5-7B-Instruct") == KNOWN["Qwen2.5-7B"]
    assert model_shape("someone/else") is None
