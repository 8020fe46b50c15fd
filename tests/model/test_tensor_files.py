"""Checkpoints are data: nothing in them runs, whoever opens them."""

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from verl_bpo.model.checkpoint import latest_step, merged_shards
from verl_bpo.model.tensor_files import check_files, check_safetensors, check_tensors, load_tensors


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def save_by_hand(content: bytes, file: Path) -> None:
    """A file with the records that torch.load looks for, and this pickle in it."""
    torch.save({"weight": torch.ones(1)}, file)
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, content if name.endswith("/data.pkl") else data)


ATTACKS = {
    "a class that runs a command": lambda mark: pickle.dumps({"weight": Runs(mark)}, protocol=2),
    "in a newer protocol": lambda mark: pickle.dumps({"weight": Runs(mark)}, protocol=4),
    "by an older operation": lambda mark: f"(S'touch {mark}'\nios\nsystem\n.".encode(),
    "by a name within a known module": lambda mark: (
        b"\x80\x04ctorch\nserialization.os.system\n(X" + len(f"touch {mark}").to_bytes(4, "little")
        + f"touch {mark}".encode() + b"tR."
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_would_run_something_is_refused_by_name_and_runs_nothing(tmp_path, attack):
    file, mark = tmp_path / "model_world_size_1_rank_0.pt", tmp_path / "ran"
    save_by_hand(ATTACKS[attack](mark), file)
    with pytest.raises(ValueError, match="model_world_size_1_rank_0.pt ") as refused:
        load_tensors(file)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError):
        check_tensors(file)
    assert not mark.exists()


def test_the_attack_works_where_nothing_is_checked(tmp_path):
    """verl's own way to load, so that the test above is one."""
    torch.save({"weight": Runs(tmp_path / "ran")}, tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_a_file_of_an_older_form_is_refused(tmp_path):
    torch.save({"x": torch.ones(1)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"x.pt can't be read"):
        check_tensors(tmp_path / "x.pt")


def test_what_verl_saves_beside_weights_is_read(tmp_path):
    state = {
        "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1]},
        "rng": {
            "numpy": numpy.random.get_state(),
            "cpu": torch.get_rng_state(),
            "random": __import__("random").getstate(),
        },
    }
    torch.save(state, tmp_path / "extra_state_world_size_1_rank_0.pt")
    found = load_tensors(tmp_path / "extra_state_world_size_1_rank_0.pt")
    assert (found["rng"]["numpy"][1] == state["rng"]["numpy"][1]).all() and found["rng"]["random"] == state["rng"][
        "random"
    ]
    assert check_files(tmp_path) == []


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_file_that_was_cut_or_changed_is_named_or_read(data):
    """Never an error of another kind, wherever the damage is."""
    buffer = io.BytesIO()
    torch.save({"weight": torch.arange(64.0)}, buffer)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"cut-{os.getpid()}.pt"
    file.write_bytes(content)
    try:
        load_tensors(file)
    except ValueError as error:
        assert str(error).startswith(str(file)) and "\n" not in str(error)
    finally:
        file.unlink()


def test_cut_safetensors_are_named(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(64)}, file)
    check_safetensors(file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="model.safetensors can't be read"):
        check_safetensors(file)
    assert len(check_files(tmp_path)) == 1


@pytest.mark.parametrize(
    "content, said", [(b"", "is empty"), (b"\xff\x00", "names step"), (b"7", "names step '7'"), (b"../x", "names step")]
)
def test_a_latest_file_that_names_nothing_is_told_with_what_is_there(tmp_path, content, said):
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint, or remove it to begin anew") as told:
        latest_step(tmp_path)
    assert said in str(told.value)
    for step in (2, 10):
        (tmp_path / f"global_step_{step}").mkdir()
    with pytest.raises(FileNotFoundError, match="there are global_step_2, global_step_10: "):
        latest_step(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    assert latest_step(tmp_path) == tmp_path / "global_step_10"


def test_eval_of_a_checkpoint_that_would_run_something_ends_in_one_line(tmp_path):
    actor, mark = tmp_path / "global_step_1/actor", tmp_path / "ran"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "fsdp_config.json").write_text(json.dumps({"world_size": 1}))
    torch.save({"weight": Runs(mark)}, actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(ValueError, match=r"refused: loading it would run posix.system"):
        merged_shards(actor)
    from transformers import Qwen2Config

    Qwen2Config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
                vocab_size=8).save_pretrained(actor / "huggingface")  # fmt: skip
    (tmp_path / "panel.jsonl").write_text('{"extra_info": {"env": "textworld", "task": "a", "seed": 0}}\n')
    words = [
        "eval",
        str(tmp_path / "global_step_1"),
        "--panel",
        str(tmp_path / "panel.jsonl"),
        "--out",
        str(tmp_path / "o"),
    ]
    done = subprocess.run([sys.executable, "-m", "verl_bpo.commands.main", *words], capture_output=True, text=True)
    assert done.returncode == 1 and not mark.exists() and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("verl-bpo eval: ") and "refused" in done.stderr
