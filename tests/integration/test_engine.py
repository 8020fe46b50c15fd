"""verl's FSDP2 engine with SAPO's value readout, on one and two ranks."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen2Config

pytest.importorskip("verl")

WORKER = Path(__file__).with_name("engine_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=False,
        )
    ).save_pretrained(folder / "model")  # fmt: skip
    return folder


def run(case: str, folder: Path, ranks: int) -> dict:
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    environment.pop("VERL_BPO_SAPO", None)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(WORKER), case,
        str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return torch.load(folder / f"{case}-{ranks}.pt", weights_only=False)


@pytest.fixture(scope="module")
def single(folder) -> dict:
    return run("single", folder, 1)


def assert_close(a: dict, b: dict, atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def moved(before: dict, after: dict) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_without_value_losses_the_update_is_verls_ppo_update_bit_for_bit(single):
    assert single["stock"] and moved(single["stock"], single["no_value_loss"]) == []
    assert moved(single["start"], single["no_value_loss"])


def test_the_heads_have_a_learning_rate_of_their_own_and_no_weight_decay(single):
    (backbone_lr, _, _), (lr, count, decay) = single["lrs"]
    assert backbone_lr == 1e-2 and (lr, count, decay) == (0.1 / 16, 2, 0.0)


def test_large_head_gradients_do_not_hold_the_policy_back(single):
    """Heads at zero send nothing into the backbone, so its first step is the policy's alone, however loud the heads."""
    quiet = {k: v for k, v in single["silent"].items() if not k.startswith("head.")}
    loud = {k: v for k, v in single["shouting"].items() if not k.startswith("head.")}
    assert moved(quiet, loud) == []
    assert single["shouting_metrics"][0]["grad_norm"] == single["silent_metrics"][0]["grad_norm"]
    assert not single["silent"]["head.weight"].any() and single["shouting"]["head.weight"].any()


def test_a_loss_that_is_not_a_number_changes_nothing(single):
    assert moved(single["start"], single["broken"]) == []


def test_warm_up_trains_the_heads_and_nothing_else(single):
    assert moved(single["start"], single["after_warmup"]) == ["head.weight", "head.bias"]
    assert single["backbone_moments"] == 2  # the optimizer has met no other parameter


def test_after_warm_up_everything_trains(single):
    assert set(moved(single["after_warmup"], single["continued"])) == set(single["start"])


def test_gradient_norms_of_both_parts_are_reported(single):
    (first,), (second,) = single["warmup_metrics"], single["metrics"]
    assert first["sapo/gradient_value"] == [0.0]  # heads of zero send nothing down
    assert second["sapo/gradient_value"][0] > 0 and second["sapo/gradient_policy"][0] > 0
    assert second["sapo/v_loss"] > 0 and second["sapo/q_loss"] > 0


def test_a_resumed_engine_makes_the_identical_next_update(single):
    assert moved(single["continued"], single["resumed"]) == []


def test_packed_rows_read_and_train_like_padded_ones(single):
    assert_close(single["packed"], single["continued"], atol=1e-4)
    for key in ("state_values", "action_values"):
        for packed, padded in zip(single["packed_values"][key], single["values"][key]):
            torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)


def test_values_stand_at_the_log_probs_of_the_actions_boundary_tokens_and_nowhere_else(single):
    """Row 3: 2 prompt tokens, actions at response tokens 0-1, 2-3 (touching) and 8-10 of 11. Log-prob of response token j
    stands at 2 + j - 1."""
    state, action = single["values"]["state_values"], single["values"]["action_values"]
    assert state[3].nonzero().flatten().tolist() == [1, 3, 9]
    assert action[3].nonzero().flatten().tolist() == [2, 4, 11]
    assert not state[5].any() and not action[5].any()


def test_the_update_does_not_depend_on_the_micro_batches(single):
    assert_close(single["small_micro"], single["large_micro"], atol=1e-4)


def test_heads_stay_float32_under_bfloat16_mixed_precision(single):
    assert single["bf16_dtypes"] == ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert single["bf16_metrics"][0]["sapo/v_loss"] == pytest.approx(
        single["warmup_metrics"][0]["sapo/v_loss"], rel=1e-5
    )


def test_lora_moves_adapters_and_heads_only(single):
    names = single["lora_moved"]
    assert {"head.weight", "head.bias"} < set(names)
    assert all("lora_" in name for name in names if not name.startswith("head."))


def test_the_rollout_engine_is_sent_exactly_what_verl_sends(single):
    assert single["sync_names"] == single["stock_sync_names"]
    assert single["lora_sync_names"] and not [n for n in single["lora_sync_names"] if "readout" in n]


def test_the_exported_model_loads_without_the_heads_which_lie_beside_it(single, folder):
    export = folder / "checkpoint" / "huggingface"
    _, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    with safe_open(export / "value_readout.safetensors", "pt") as file:
        assert file.get_tensor("weight").shape == (2, 16) and file.get_tensor("weight").any()


def test_two_ranks_make_the_update_of_one(folder):
    one, two = run("ranks", folder, 1), run("ranks", folder, 2)
    assert_close(two["parameters"], one["parameters"], atol=1e-4)
    for result in (one, two):
        heads = {k: v for k, v in result["parameters"].items() if k.startswith("head.")}
        assert heads and all(torch.equal(v, result["resumed"][k]) for k, v in heads.items())
        assert result["lost"] and "value_readout.safetensors is not there" in result["lost"]
    for key, (value,) in one["gradients"].items():
        assert value > 0 and two["gradients"][key] == [pytest.approx(value, rel=1e-4)]


def test_solved_heads_are_the_ridge_regression_of_the_turns_on_one_rank_and_on_two(folder):
    one, two = run("ridge", folder, 1), run("ridge", folder, 2)
    assert one["backbone_stood"]
    state, action, returns = (x.double() for x in one["hidden"])
    for i, x in enumerate((state, action)):
        centred = x - x.mean(0)
        strength = 0.1 * (centred**2).sum(0).mean()
        square = centred.T @ centred + strength * torch.eye(x.shape[1])
        weights = torch.linalg.solve(square, centred.T @ (returns - returns.mean()))
        torch.testing.assert_close(one["one_step"]["head.weight"][i].double(), weights, rtol=1e-4, atol=1e-5)
        bias = returns.mean() - weights @ x.mean(0)
        torch.testing.assert_close(one["one_step"]["head.bias"][i].double(), bias, rtol=1e-4, atol=1e-4)
    for name in ("one_step", "continued", "moving"):
        assert_close(two[name], one[name], atol=1e-4)
    assert moved(one["one_step"], one["continued"]) == ["head.weight", "head.bias"]
    for result in (one, two):
        assert moved(result["continued"], result["resumed"]) == []
    assert one["metrics"]["sapo/head_ridge_v"] == [0.1]


@pytest.mark.parametrize(
    "model, engine, message",
    [
        ({}, {"strategy": "fsdp"}, "strategy=fsdp2"),
        ({}, {"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size=1"),
        ({}, {"mixed_precision": {"param_dtype": "fp16"}}, "mixed_precision.param_dtype=bf16"),
        ({"use_fused_kernels": True}, {}, "model.use_fused_kernels=True"),
        ({"enable_activation_offload": True}, {}, "model.enable_activation_offload=True"),
    ],
)
def test_settings_that_would_give_wrong_values_are_refused(model, engine, message):
    from verl_bpo.integration.value_engine import refuse_unsupported

    plain = {"use_fused_kernels": False, "enable_activation_offload": False}
    fsdp = {"strategy": "fsdp2", "ulysses_sequence_parallel_size": 1, "mixed_precision": {"param_dtype": "bf16"}}
    refuse_unsupported(SimpleNamespace(**plain), SimpleNamespace(**fsdp))
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(SimpleNamespace(**{**plain, **model}), SimpleNamespace(**{**fsdp, **engine}))
