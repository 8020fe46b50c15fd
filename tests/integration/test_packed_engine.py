"""verl's FSDP2 engine on packed trees against verl's own, on one and two ranks."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

pytest.importorskip("verl")

WORKER = Path(__file__).with_name("packed_engine_worker.py")


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def found(request, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("packed")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=False,
        )
    ).save_pretrained(folder / "model")  # fmt: skip
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={request.param}", str(WORKER),
        str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return torch.load(folder / f"packed-{request.param}.pt", weights_only=False)


def assert_same(ours: dict, theirs: dict, tolerance: float) -> None:
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=tolerance)
    for key in ("log_probs", "entropy"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=tolerance)
    assert ours["grads"].keys() == theirs["grads"].keys()
    for name, grad in theirs["grads"].items():
        torch.testing.assert_close(ours["grads"][name], grad, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("budget", [100_000, 120], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_packed_engine_equals_verls(found, checkpointing, budget):
    theirs, ours = found["stock", checkpointing, budget], found["packed_tree", checkpointing, budget]
    assert (theirs["engine"], ours["engine"]) == ("FSDPEngineWithLMHead", "PackedTreeEngine")
    assert (ours["micro_batches"] == 1) == (budget == 100_000)
    assert_same(ours, theirs, 1e-5)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_an_engine_that_computes_trees_in_chunks_equals_verls(found, checkpointing):
    """Budget 24: every tree is larger, and so are most rows; several micro-batches of several chunks each."""
    ours = found["chunked", checkpointing]
    assert ours["micro_batches"] > 1
    chunked, unique = (ours["metrics"][f"packed/{k}_tokens"].aggregate() for k in ("chunked", "unique"))
    assert 0.9 * unique < chunked <= unique
    assert_same(ours, found["stock", checkpointing, 100_000], 1e-5)


@pytest.mark.parametrize("mode", ["packed_tree", "chunked"])
def test_adapters_get_the_gradients_that_verls_engine_gives_them(found, mode):
    ours, theirs = found["lora", mode], found["lora", "stock"]
    assert len(theirs["grads"]) == 2 * 2 * 7 and all(grad.abs().max() > 1e-6 for grad in theirs["grads"].values())
    assert_same(ours, theirs, 1e-5)


@pytest.mark.parametrize("mode", ["packed_tree", "chunked"])
def test_in_bfloat16_the_engine_is_as_close_to_float32_as_verls(found, mode):
    exact, ours, theirs = found["stock", True, 100_000], found["bf16", mode], found["bf16", "stock"]
    assert not torch.equal(ours["log_probs"], exact["log_probs"])
    error = lambda one: sum(float((g - exact["grads"][n]).square().sum()) for n, g in one["grads"].items())  # noqa: E731
    assert error(ours) < 2 * error(theirs)
    assert (ours["log_probs"] - exact["log_probs"]).square().mean() < (
        2 * (theirs["log_probs"] - exact["log_probs"]).square().mean()
    )


@pytest.mark.parametrize("context", ["full", "window"])
@pytest.mark.parametrize("mode", ["packed_tree", "chunked"])
def test_an_actor_with_a_readout_learns_the_same_values(found, context, mode):
    theirs, ours = found["readout", context, "stock"], found["readout", context, mode]
    assert (theirs["engine"], ours["engine"]) == ("ValueReadoutEngine", "PackedReadoutEngine")
    for key in ("state_values", "action_values"):
        assert theirs[key].abs().max() > 1e-3
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-4)
    assert 0 < ours["losses"]["packed/unique_tokens"] < 0.9 * ours["losses"]["packed/total_tokens"]
    assert (ours["losses"]["packed/chunked_tokens"] > 0) == (mode == "chunked")
    for key in ("sapo/v_loss", "sapo/q_loss"):
        assert ours["losses"][key] == pytest.approx(theirs["losses"][key], rel=1e-4), key
    for key in ("sapo/gradient_policy", "sapo/gradient_value"):  # norms over tokens, of which rows have several copies
        same = found["readout", context, "packed_tree" if context == "window" else "stock"]["losses"][key]
        assert ours["losses"][key] == pytest.approx(same, rel=1e-4), key
    for name, weight in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_micro_batches_of_whole_trees_need_fewer_passes_than_rows(found):
    assert found["packed_tree", False, 120]["micro_batches"] < found["stock", False, 120]["micro_batches"]


def test_metrics_tell_what_was_shared(found):
    metrics = found["packed_tree", False, 100_000]["metrics"]
    unique, total = (metrics[f"packed/{k}_tokens"].aggregate() for k in ("unique", "total"))
    assert 0 < unique < 0.7 * total
    assert metrics["packed/build_seconds"].aggregate() > 0


@pytest.mark.parametrize(
    ("key", "value"), [("ulysses_sequence_parallel_size", 2), ("use_fused_kernels", True)], ids=["ulysses", "fused"]
)
def test_unsupported_settings_are_refused_by_name(key, value):
    from verl_bpo.integration.packed_engine import refuse_unsupported
    from verl_bpo.model.packed_tree import PackedTreeUnsupported

    settings = {"ulysses_sequence_parallel_size": 1, "use_fused_kernels": False, key: value}
    with pytest.raises(PackedTreeUnsupported, match=key):
        refuse_unsupported(SimpleNamespace(**settings), SimpleNamespace(**settings))
