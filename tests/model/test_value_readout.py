"""SAPO's value readout (Single-rollout Autoregressive Policy Optimization) on plain Hugging Face models."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, T5EncoderModel
from transformers import T5Config as EncoderConfig

from verl_bpo.advantages.sapo import turn_boundaries
from verl_bpo.model.value_readout import (
    ReadPositions,
    UnsupportedModel,
    attach_value_readout,
    boundary_positions,
    load_value_readout,
    save_value_readout,
)

SIZES = dict(
    vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, attn_implementation="sdpa",
)  # fmt: skip
CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
IDS = torch.randint(1, 60, (3, 14), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor(
    [
        [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1],
    ]
)


def tiny(name="qwen2", **kwargs):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name](**{**SIZES, **kwargs}))


def randomise(readout):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in readout.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return readout


def read(model, readout, ids=IDS, mask=MASK, turn_id=None, **inputs):
    turns = turn_boundaries(mask, turn_id)
    at = boundary_positions(turns, torch.arange(len(ids)) * ids.shape[1], tokens=ids.numel())
    with readout.reading(at) as values:
        output = model(input_ids=ids, use_cache=False, **inputs)
    return values.state, values.action, output, turns


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_values_are_linear_in_the_final_hidden_state_before_and_at_the_end_of_each_action(name, tied):
    model = tiny(name, tie_word_embeddings=tied)
    readout = randomise(attach_value_readout(model))
    v, q, _, turns = read(model, readout)
    hidden = model(input_ids=IDS, output_hidden_states=True).hidden_states[-1]
    expected_v = hidden[turns.row, turns.start - 1] @ readout.weight[0] + readout.bias[0]
    expected_q = hidden[turns.row, turns.last] @ readout.weight[1] + readout.bias[1]
    assert len(v) == 8
    torch.testing.assert_close(v, expected_v, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=1e-5)


def test_an_untrained_readout_says_zero_and_leaves_the_logits_as_they_are():
    model = tiny()
    before = model(input_ids=IDS).logits
    v, q, output, _ = read(model, attach_value_readout(model))
    assert not v.any() and not q.any() and torch.equal(output.logits, before)


def test_a_value_depends_on_nothing_after_its_boundary():
    model = tiny()
    readout = randomise(attach_value_readout(model))
    v, q, _, turns = read(model, readout)
    for turn in range(len(v)):
        row, start, last = int(turns.row[turn]), int(turns.start[turn]), int(turns.last[turn])
        for boundary, which, value in ((start - 1, 0, v), (last, 1, q)):
            other = IDS.clone()
            other[row, boundary + 1 :] = (other[row, boundary + 1 :] + 11) % 60
            assert torch.equal(read(model, readout, other)[which][turn], value[turn])


def test_the_state_value_ignores_the_action_and_the_action_value_does_not():
    model = tiny()
    readout = randomise(attach_value_readout(model))
    v, q, _, turns = read(model, readout)
    for turn in range(len(v)):
        row = int(turns.row[turn])
        for position in range(int(turns.start[turn]), int(turns.last[turn]) + 1):
            other = IDS.clone()
            other[row, position] = (other[row, position] + 7) % 60
            v_other, q_other, _, _ = read(model, readout, other)
            assert torch.equal(v_other[turn], v[turn])
            assert q_other[turn] != q[turn]


def test_padded_left_padded_and_packed_rows_read_the_same_values():
    model = tiny()
    readout = randomise(attach_value_readout(model))
    lengths = torch.tensor([12, 9, 14])
    rows = [(IDS[i, :n], MASK[i, :n]) for i, n in enumerate(lengths)]
    single = [read(model, readout, ids[None], mask[None])[:2] for ids, mask in rows]
    expected_v, expected_q = torch.cat([v for v, _ in single]), torch.cat([q for _, q in single])

    mask = torch.nn.utils.rnn.pad_sequence([m for _, m in rows], batch_first=True)
    ids = torch.nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
    attention = (torch.arange(14) < lengths[:, None]).long()
    right = read(model, readout, ids, mask, attention_mask=attention)

    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    turns = turn_boundaries(torch.cat([m for _, m in rows]), offsets=offsets)
    position = torch.cat([torch.arange(n) for n in lengths])
    with readout.reading(boundary_positions(turns, offsets[:-1], tokens=int(offsets[-1]))) as packed:
        model(input_ids=torch.cat([x for x, _ in rows])[None], position_ids=position[None], use_cache=False)

    left_ids, left_mask, left_attention = ids.clone(), mask.clone(), attention.clone()
    for i, n in enumerate(lengths):
        for tensor in (left_ids, left_mask, left_attention):
            tensor[i] = tensor[i].roll(14 - int(n))
    prompt = 1  # the mask may also begin after the prompt
    turns = turn_boundaries(mask[:, prompt:])
    at = boundary_positions(turns, torch.arange(3) * 14 + 14 - lengths, tokens=42, prompt_length=prompt)
    with readout.reading(at) as left:
        model(
            input_ids=left_ids, attention_mask=left_attention,
            position_ids=(left_attention.cumsum(1) - 1).clamp(min=0), use_cache=False,
        )  # fmt: skip
    for v, q in ((right[0], right[1]), (packed.state, packed.action), (left.state, left.action)):
        torch.testing.assert_close(v, expected_v, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(q, expected_q, rtol=1e-4, atol=1e-5)


def test_actions_that_touch_are_two_turns_by_their_turn_id():
    model = tiny()
    readout = randomise(attach_value_readout(model))
    turn_id = torch.ones_like(MASK)
    turn_id[1, 6:] = 2
    v, q, _, turns = read(model, readout, turn_id=turn_id)
    assert len(v) == 9 and turns.start[turns.row == 1].tolist() == [4, 6]
    hidden = model(input_ids=IDS, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(v[turns.row == 1][1], hidden[1, 5] @ readout.weight[0] + readout.bias[0])
    torch.testing.assert_close(q[turns.row == 1][0], hidden[1, 5] @ readout.weight[1] + readout.bias[1])


def test_a_batch_without_a_turn_reads_nothing_and_still_has_a_gradient():
    model = tiny()
    readout = attach_value_readout(model)
    v, q, _, _ = read(model, readout, mask=torch.zeros_like(MASK))
    assert v.shape == q.shape == (0,)
    (v.sum() + q.sum()).backward()
    assert not readout.weight.grad.any()


def test_an_action_without_a_state_before_it_is_an_error():
    turns = turn_boundaries(torch.tensor([[1, 0]]))
    with pytest.raises(ValueError, match="first token of its row"):
        boundary_positions(turns, torch.tensor([0]), tokens=2)


def gradients(scale, checkpointing=False, lora=False):
    model = tiny()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
    readout = randomise(attach_value_readout(model, scale))
    model.train()
    v, q, _, _ = read(model, readout)
    (v.square().mean() + q.square().mean()).backward()
    heads = {id(p) for p in readout.parameters()}
    backbone = {n: p.grad for n, p in model.named_parameters() if id(p) not in heads and p.grad is not None}
    return [p.grad for p in readout.parameters()], backbone


def test_grad_scale_scales_what_reaches_the_backbone_and_never_what_reaches_the_heads():
    (heads, full), (same, half), (probe, none) = gradients(1.0), gradients(0.5), gradients(0.0)
    for a, b, c in zip(heads, same, probe):
        assert torch.equal(a, b) and torch.equal(a, c) and a.any()
    assert not none and full
    for name in full:
        torch.testing.assert_close(half[name], 0.5 * full[name])


def test_gradient_checkpointing_gives_the_same_gradients():
    (heads, plain), (heads_checkpointed, checkpointed) = gradients(1.0), gradients(1.0, checkpointing=True)
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name])
    torch.testing.assert_close(heads_checkpointed, heads)


def test_lora_trains_adapters_and_heads_and_puts_no_adapter_on_the_heads():
    heads, backbone = gradients(1.0, lora=True)
    assert all(g.any() for g in heads)
    assert backbone and all("lora_" in name for name in backbone)
    model = get_peft_model(tiny(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    readout = attach_value_readout(model)
    assert [n for n, _ in model.named_parameters() if "value_readout" in n] == [
        "base_model.model.value_readout.weight",
        "base_model.model.value_readout.bias",
    ]
    assert all(p.requires_grad for p in readout.parameters())


@pytest.mark.parametrize("autocast", [False, True])
def test_heads_compute_in_float32_under_a_bfloat16_backbone(autocast):
    model = tiny() if autocast else tiny().to(torch.bfloat16)
    readout = randomise(attach_value_readout(model))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        v, q, _, turns = read(model, readout)
        hidden = model(input_ids=IDS, output_hidden_states=True).hidden_states[-1].float()
    assert v.dtype == q.dtype == readout.weight.dtype == torch.float32
    torch.testing.assert_close(v, hidden[turns.row, turns.start - 1] @ readout.weight[0] + readout.bias[0])
    (v.sum() + q.sum()).backward()
    assert readout.weight.grad.dtype == torch.float32


def test_heads_cast_to_half_precision_are_an_error():
    model = tiny()
    readout = attach_value_readout(model)
    model.to(torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="attach it after the model was cast"):
        read(model, readout)


def test_gradient_norms_of_both_parts_are_told_apart_at_the_top_of_the_backbone():
    model = tiny()
    readout = randomise(attach_value_readout(model, 0.5))
    readout.measure_gradients = True

    def squares(policy, value):
        model.zero_grad()
        v, q, output, _ = read(model, readout)
        (policy * output.logits.square().mean() + value * (v.square().mean() + q.square().mean())).backward()
        return readout.pop_gradient_squares()

    both, policy, value, doubled = squares(1, 1), squares(1, 0), squares(0, 1), squares(1, 2)
    assert both.min() > 0 and policy[1] == 0 and value[0] == 0
    torch.testing.assert_close(both, policy + value)
    torch.testing.assert_close(doubled, torch.stack([both[0], 4 * both[1]]))


def test_measuring_changes_no_gradient():
    def run(measure):
        model = tiny()
        readout = randomise(attach_value_readout(model))
        readout.measure_gradients = measure
        v, q, output, _ = read(model, readout)
        (output.logits.square().mean() + v.sum() + q.sum()).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    plain, measured = run(False), run(True)
    assert all(torch.equal(plain[n], measured[n]) for n in plain)


def test_an_export_holds_no_heads_and_two_lines_bring_them_back(tmp_path):
    model = tiny()
    readout = randomise(attach_value_readout(model))
    v, q, _, _ = read(model, readout)
    model.save_pretrained(tmp_path)
    save_value_readout(readout, tmp_path)
    assert not [name for name in model.state_dict() if "value_readout" in name]

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="sdpa")
    assert not info["unexpected_keys"] and not info["missing_keys"]
    again = attach_value_readout(loaded)
    load_value_readout(again, tmp_path)
    v_again, q_again, _, _ = read(loaded, again)
    assert torch.equal(v, v_again) and torch.equal(q, q_again)


def test_a_model_without_a_readout_file_and_heads_of_another_size_are_named(tmp_path):
    readout = attach_value_readout(tiny())
    with pytest.raises(FileNotFoundError, match="without SAPO's value readout"):
        load_value_readout(readout, tmp_path)
    save_value_readout(attach_value_readout(tiny(hidden_size=16)), tmp_path)
    with pytest.raises(ValueError, match="hidden size 32"):
        load_value_readout(readout, tmp_path)


def test_a_model_that_the_readout_cannot_serve_is_refused():
    encoder = T5EncoderModel(
        EncoderConfig(vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(UnsupportedModel, match="causal language model"):
        attach_value_readout(encoder)
    with pytest.raises(UnsupportedModel, match="no output embedding"):
        attach_value_readout(torch.nn.Linear(3, 3))
    model = tiny()
    attach_value_readout(model)
    with pytest.raises(UnsupportedModel, match="already"):
        attach_value_readout(model)


def test_a_forward_that_hides_its_hidden_states_is_an_error_and_not_a_wrong_number():
    model = tiny()
    readout = attach_value_readout(model)
    turns = turn_boundaries(MASK)
    at = boundary_positions(turns, torch.arange(3) * 14, tokens=42)
    with pytest.raises(UnsupportedModel, match="use_fused_kernels=False"), readout.reading(at):
        model.model(input_ids=IDS)
    with pytest.raises(UnsupportedModel, match="logits_to_keep"), readout.reading(at):
        model(input_ids=IDS, logits_to_keep=2)
    with pytest.raises(UnsupportedModel, match="twice"), readout.reading(at):
        model(input_ids=IDS)
        model(input_ids=IDS)
    assert model(input_ids=IDS).logits.shape == (3, 14, 60)  # the failures left nothing behind


def test_a_state_that_many_actions_share_gets_their_whole_gradient_in_bfloat16():
    """As on a packed tree, whose forks all read the state of their branch point."""
    model = tiny().to(torch.bfloat16)
    readout = randomise(attach_value_readout(model))
    hidden: list[torch.Tensor] = []

    def keep(module, args):
        args[0].retain_grad()
        hidden.append(args[0])

    handle = model.get_output_embeddings().register_forward_pre_hook(keep, prepend=True)
    ids = torch.tensor([[1, 2, 3, 4]])
    at = ReadPositions(torch.full((1500,), 1), torch.full((700,), 3), 4)
    with readout.reading(at) as values:
        model(input_ids=ids)
    handle.remove()
    assert values.state.shape == (1500,) and values.action.shape == (700,)
    (values.state.sum() + values.action.sum()).backward()
    v, q = readout.weight
    for position, expected in ((1, 1500 * v), (3, 700 * q)):
        torch.testing.assert_close(hidden[0].grad[0, position].float(), expected.detach(), rtol=0.01, atol=0.01)
