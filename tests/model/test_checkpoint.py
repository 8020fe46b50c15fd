"""Weights of a checkpoint whose ranks saved on several machines."""

import json

import pytest
import torch

from verl_bpo.model.checkpoint import merged_shards


def test_missing_shards_are_named(tmp_path):
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"world_size": 3}))
    for rank in (0, 2):
        torch.save({"weight": torch.ones(2)}, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    with pytest.raises(FileNotFoundError, match="holds 2 of 3 shards, model_world_size_3_rank_1.pt is not among them"):
        merged_shards(tmp_path)
    torch.save({"weight": torch.ones(2)}, tmp_path / "model_world_size_3_rank_1.pt")
    assert merged_shards(tmp_path)["weight"].tolist() == [1, 1]
