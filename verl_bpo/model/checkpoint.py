"""Models to measure: a Hugging Face folder, or what verl saved of one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from verl_bpo.model.tensor_files import check_files, load_tensors

CONFIG_FILE = "config.yaml"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
NO_WEIGHTS = ("value_readout.safetensors", "adapter_model.safetensors")
"""Files of that form which hold no whole model."""
ADAPTER_FILE = "lora_train_meta.json"
OTHER_KINDS = {
    "adapter_config.json": "an adapter alone: merge it into its model first, with merge_and_unload of peft",
    "dist_ckpt": (
        "a checkpoint of verl's Megatron engine: merge it first with python -m verl.model_merger merge --backend megatron "
        "--local_dir {folder} --target_dir FOLDER"
    ),
}
"""What else a folder may hold, by a file that is in it, and what to do."""


def find_model(path: str | Path) -> Path:
    """The folder that holds a model: ``path`` itself, or of a verl checkpoint (``global_step_N``, or the folder of them,
    of which the latest is taken) the actor's folder, or the Hugging Face folder in it if that was saved with weights.

    Raises:
        FileNotFoundError: there is neither.
    """
    folder = Path(path).expanduser()
    folder = latest_step(folder) or folder
    if (folder / "actor").is_dir():
        folder = folder / "actor"
    if _has_weights(folder / "huggingface"):
        return folder / "huggingface"
    if _has_weights(folder) or (folder / "fsdp_config.json").is_file():
        return folder
    for file, kind in OTHER_KINDS.items():
        if (folder / file).exists():
            raise FileNotFoundError(f"{path} holds {kind.format(folder=folder)}")
    raise FileNotFoundError(
        f"{path} holds no model: give a Hugging Face folder, or a checkpoint of verl (global_step_N or the folder of them)"
    )


LATEST_FILE = "latest_checkpointed_iteration.txt"


def latest_step(folder: Path) -> Path | None:
    """``global_step_N`` of the latest checkpoint in a folder of them; None where it is no such folder.

    Raises:
        FileNotFoundError: the file that names it names none, or one that isn't there; the message says which are.
    """
    latest = folder / LATEST_FILE
    if not latest.is_file():
        return None
    said = latest.read_bytes().decode(errors="replace").strip()
    step = folder / f"global_step_{said}"
    if said.isdecimal() and step.is_dir():
        return step
    others = sorted((f.name for f in folder.glob("global_step_*") if f.is_dir()), key=lambda name: (len(name), name))
    there = (
        f"there are {', '.join(others[-4:])}: write the number of one into it" if others else "there is no checkpoint"
    )
    wrong = f"names step {said[:20]!r}, which is not there" if said else "is empty"
    raise FileNotFoundError(f"{latest} {wrong}; {there}, or remove it to begin anew")


def run_config(path: str | Path) -> Path | None:
    """The resolved config of the run that a checkpoint is of: in ``global_step_N``, or beside the folder of all of them
    (where benchmarks/paper/run.py has it). None where there is none, or no checkpoint."""
    try:
        folder = find_model(path)
    except FileNotFoundError:
        return None
    step = next((f for f in folder.absolute().parents if f.name.startswith("global_step_")), None)
    files = () if step is None else (step / CONFIG_FILE, step.parent.parent / CONFIG_FILE)
    return next((file for file in files if file.is_file()), None)


def load_model(path: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model and tokenizer of a folder that :func:`find_model` finds. Nothing is written.

    verl's own merger (``python -m verl.model_merger``) casts weights to bfloat16; here they stay as they were trained.

    Raises:
        FileNotFoundError: there is no model.
        ValueError: a checkpoint of another kind than FSDP's, or one whose weights don't fit its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, plain = find_model(path), {"trust_remote_code": False}
    if _has_weights(folder):
        if wrong := check_files(folder):
            raise ValueError(wrong[0])
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain)
        except (RuntimeError, UnpicklingError) as error:
            raise ValueError(f"the weights in {folder} can't be loaded: {' '.join(str(error).split())[:300]}") from None
        return model, AutoTokenizer.from_pretrained(folder, **plain)
    source = folder / "huggingface"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, **plain), dtype=dtype, **plain)
    if (source / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(source)
    try:
        found = model.load_state_dict(_without_adapter(merged_shards(folder), folder), strict=False)
    except RuntimeError as error:  # torch's, of other shapes
        raise ValueError(f"the weights in {folder} can't be loaded: {' '.join(str(error).split())[:300]}") from None
    missing = set(found.missing_keys) - set(getattr(model, "_tied_weights_keys", None) or ())
    if missing or found.unexpected_keys:
        wrong = ", ".join(sorted(missing | set(found.unexpected_keys))[:4])
        raise ValueError(f"the weights in {folder} don't fit the model in {source}: {wrong}")
    return model, AutoTokenizer.from_pretrained(source, **plain)


def _without_adapter(state: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Weights with a LoRA adapter added into them, under the names of the plain model.

    Raises:
        ValueError: there is an adapter, and nothing says how it is scaled.
    """
    down, up, base = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer"
    adapted = [name.removesuffix(down) for name in state if name.endswith(down)]
    if not adapted:
        return state
    if not (folder / ADAPTER_FILE).is_file():
        raise ValueError(f"{folder} holds a LoRA adapter and no {ADAPTER_FILE}, which has its scale: copy it there")
    scale = json.loads((folder / ADAPTER_FILE).read_text())
    plain = {name.replace(base, ""): tensor for name, tensor in state.items() if ".lora_" not in name}
    for name in adapted:
        change = state[name + up].float() @ state[name + down].float() * (scale["lora_alpha"] / scale["r"])
        if f"{name}.weight" not in plain:
            raise ValueError(f"{folder} holds a LoRA adapter without its model: merge it into its model first")
        plain[f"{name}.weight"] = plain[f"{name}.weight"].float() + change
    return {name.removeprefix("base_model.model."): tensor for name, tensor in plain.items()}


def merged_shards(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of an FSDP checkpoint of verl, from the shards of all its ranks.

    Raises:
        FileNotFoundError: shards are missing, as where the ranks' machines share no disk.
        ValueError: sharded over more than one dimension of the device mesh, cut, or holding more than tensors.
    """
    from torch.distributed.tensor import DTensor

    ranks = json.loads((folder / "fsdp_config.json").read_text())["world_size"]
    files = [folder / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} holds {ranks - len(missing)} of {ranks} shards, {missing[0]} is not among them: copy into it "
            f"what other machines saved"
        )
    shards = [load_tensors(file) for file in files]
    merged = {}
    for name, first in shards[0].items():
        if not isinstance(first, DTensor):
            merged[name] = first
            continue
        if len(first.placements) != 1:
            raise ValueError(
                f"{folder} is sharded over {len(first.placements)} mesh dimensions: merge it first with "
                f"python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir FOLDER"
            )
        (placement,) = first.placements
        parts = [shard[name].to_local() for shard in shards]
        merged[name] = torch.cat(parts, placement.dim) if placement.is_shard() else parts[0]
    return merged


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and find_weights(folder)


def find_weights(folder: Path) -> bool:
    """Whether a folder holds weights in Hugging Face's files."""
    names = [f.name for pattern in WEIGHTS for f in folder.glob(pattern)]
    return any(name not in NO_WEIGHTS for name in names)


def weights_digest(folder: Path) -> str:
    """Tells whether two model folders hold the same weights."""
    digest = hashlib.sha256()
    for file in sorted(f for p in ("*.safetensors", "*.bin", "model_world_size_*.pt") for f in folder.glob(p)):
        digest.update(file.name.encode())
        with open(file, "rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]
