"""Weights of a checkpoint whose ranks saved on several machines."""

import json

import pytest
import torch

from verl_bpo.model.checkpoint import _without_adapter, find_model, merged_shards


def test_missing_shards_are_named(tmp_path):
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"world_size": 3}))
    for rank in (0, 2):
        torch.save({"weight": torch.ones(2)}, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    with pytest.raises(FileNotFoundError, match="holds 2 of 3 shards, model_world_size_3_rank_1.pt is not among them"):
        merged_shards(tmp_path)
    torch.save({"weight": torch.ones(2)}, tmp_path / "model_world_size_3_rank_1.pt")
    assert merged_shards(tmp_path)["weight"].tolist() == [1, 1]


def lora_state():
    return {
        "base_model.model.a.weight": torch.zeros(2, 2),
        "base_model.model.b.base_layer.weight": torch.ones(2, 2),
        "base_model.model.b.lora_A.default.weight": torch.ones(1, 2),
        "base_model.model.b.lora_B.default.weight": torch.ones(2, 1),
    }


def test_an_adapter_is_added_into_its_weights(tmp_path):
    with pytest.raises(ValueError, match="no lora_train_meta.json, which has its scale"):
        _without_adapter(lora_state(), tmp_path)
    (tmp_path / "lora_train_meta.json").write_text('{"r": 1, "lora_alpha": 3}')
    found = _without_adapter(lora_state(), tmp_path)
    assert sorted(found) == ["a.weight", "b.weight"]
    assert bool((found["a.weight"] == 0).all()) and bool((found["b.weight"] == 1 + 3).all())


def test_an_adapter_without_its_model_is_told(tmp_path):
    (tmp_path / "lora_train_meta.json").write_text('{"r": 1, "lora_alpha": 3}')
    state = {name: tensor for name, tensor in lora_state().items() if "lora_" in name}
    with pytest.raises(ValueError, match="a LoRA adapter without its model"):
        _without_adapter(state, tmp_path)


@pytest.mark.parametrize(
    "file, said", [("adapter_config.json", "an adapter alone"), ("dist_ckpt", "Megatron engine: merge it")]
)
def test_checkpoints_of_other_kinds_are_named(tmp_path, file, said):
    (tmp_path / file).write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=said):
        find_model(tmp_path)
