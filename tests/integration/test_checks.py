"""What a dry run checks is what the run checks, over all rows, before Ray starts; each fault is one line."""

import json
from pathlib import Path

import pandas
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from verl_bpo.commands.dry_run import dry_run
from verl_bpo.commands.make_data import write_prompts
from verl_bpo.generation.prompts import prompt_tasks
from verl_bpo.integration import checks
from verl_bpo.integration.prepare import wrap_validate_config
from verl_bpo.options import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
GAME = f"{REPOSITORY}/recipes/own_env/number_game.py:NumberGame"


@pytest.fixture
def inputs(tmp_path):
    """A folder with all that a run needs, and the run's overrides."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    save_file({"weight": torch.ones(1)}, model / "model.safetensors")
    (model / "tokenizer.json").write_text("{}")
    for split in ("train", "valid"):
        write_prompts(GAME, "train", tmp_path / f"{split}.parquet", limit=8)
    overrides = [
        "actor_rollout_ref.rollout.name=hf",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/valid.parquet",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={tmp_path}/checkpoints",
    ]
    return tmp_path, overrides


def said(overrides):
    """What the dry run says, which must be what the run says before it starts."""
    report = dry_run(overrides)
    found = report.problems + report.missing
    if report.config is not None:
        from hydra import compose, initialize_config_dir

        from verl_bpo.commands.dry_run import CONFIG_FOLDER

        with initialize_config_dir(str(CONFIG_FOLDER), version_base=None):
            config = compose("bpo_trainer", overrides)
        run = wrap_validate_config(lambda config, **parts: None)
        if found:
            with pytest.raises(SystemExit) as stopped:
                run(config)
            assert [line.removeprefix("verl_bpo: ") for line in str(stopped.value).splitlines()] == found
        else:
            run(config)
    return found


def rows(count, **changed):
    base = {"prompt": [{"role": "user", "content": "x"}], "extra_info": {"env": GAME, "task": "train-0", "seed": 0}}
    return pandas.DataFrame([{**base, **changed} for _ in range(count)])


def test_a_run_that_has_everything_is_ready(inputs):
    assert said(inputs[1]) == []


@pytest.mark.parametrize(
    "frame, line",
    [
        (pandas.DataFrame({"question": ["1+1?"] * 8}), ": has no messages in prompt ('None')"),
        (
            rows(8, extra_info=None),
            ": names no task (extra_info=None): write it with `verl-bpo make-data` (row 0 and 7 more rows)",
        ),
        (rows(8, extra_info={"index": 1, "answer": "2"}), ": names no task"),
        (rows(8, extra_info={"env": "nowhere", "task": "a", "seed": 0}), ": no environment named 'nowhere'"),
        (rows(8, prompt="q"), ": has no messages in prompt ('q')"),
        (rows(8, extra_info={"env": GAME, "task": "train-0", "seed": 0.5}), ": has seed=0.5"),
        (rows(0), "train.parquet has no rows"),
        (rows(3), "data.train_files: 3 rows are fewer than data.train_batch_size=4"),
        (pandas.concat([rows(6), rows(2, extra_info=None)]), ": names no task"),
        (pandas.concat([rows(6), rows(2, extra_info=None)]), "(row 6 and 1 more rows)"),
    ],
)
def test_prompt_files_of_other_kinds_are_told_by_file_and_row(inputs, frame, line):
    folder, overrides = inputs
    frame.reset_index(drop=True).to_parquet(folder / "train.parquet")
    found = said(overrides)
    assert any(line in text and text.startswith("data.train_files: ") for text in found), found
    assert all("\n" not in text for text in found)


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"question,answer"])
def test_a_file_that_is_no_parquet_file_is_told(inputs, content):
    folder, overrides = inputs
    (folder / "train.parquet").write_bytes(content)
    (found,) = said(overrides)
    assert found.startswith("data.train_files: ") and "train.parquet can't be read" in found
    with pytest.raises(ConfigError, match="can't be read"):
        prompt_tasks(folder / "train.parquet", None)


@pytest.mark.parametrize(
    "override, line",
    [
        ("data.train_files={}/none.parquet", "data.train_files: no "),
        ("data.train_files={}/train.csv", "data.train_files: no "),
        ("actor_rollout_ref.model.path={}/none", "actor_rollout_ref.model.path: no model in "),
        ("actor_rollout_ref.rollout.n=0", "actor_rollout_ref.rollout.n=0 must be a whole number of at least 1"),
        ("data.train_batch_size=0", "data.train_batch_size=0 must be"),
        ("trainer.total_training_steps=0", "trainer.total_training_steps=0 must be"),
        ("actor_rollout_ref.rollout.val_kwargs.n=0", "actor_rollout_ref.rollout.val_kwargs.n=0 must be"),
        ("actor_rollout_ref.rollout.temperature=0", "actor_rollout_ref.rollout.temperature=0 must be above 0"),
        ("actor_rollout_ref.rollout.top_p=0", "actor_rollout_ref.rollout.top_p=0 must be above 0 and at most 1"),
        ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node=0 must be"),
        ("bpo.env.step_timeout=0", "bpo.env.step_timeout=0 must be"),
        ("+bpo.env.kwargs.nothing=1", "which bpo.env.kwargs="),
    ],
)
def test_what_would_end_the_run_at_once_is_told_in_one_line(inputs, override, line):
    folder, overrides = inputs
    key = override.partition("=")[0]
    found = said([*(word for word in overrides if not word.startswith(key)), override.format(folder)])
    assert found and line in found[0] and all("\n" not in text for text in found)


def test_a_model_without_weights_is_told(inputs):
    folder, overrides = inputs
    (folder / "model/model.safetensors").unlink()
    (found,) = said(overrides)
    assert found.startswith("actor_rollout_ref.model.path: no weights in ")


def test_another_number_of_ranks_than_a_checkpoints_is_told(inputs):
    folder, overrides = inputs
    actor = folder / "checkpoints/global_step_3/actor"
    actor.mkdir(parents=True)
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    (actor / "fsdp_config.json").write_text(json.dumps({"world_size": 2}))
    (found,) = said(overrides)
    assert "was saved by 2 ranks and can't be gone on from by 1" in found
    assert said([*overrides, "trainer.resume_mode=disable"]) == []
    assert "no checkpoint" in said([*overrides, "trainer.resume_mode=resume_path", "trainer.resume_from_path=x"])[0]


def test_a_running_cluster_without_accelerators_needs_a_word(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert "set VERL_PLATFORM=cpu here" in checks.needs_platform()
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert checks.needs_platform() is None


def test_names_of_the_hub_are_left_to_verl(tmp_path):
    config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": "Qwen/Qwen3-0.6B"}}, "critic": {"enable": None}})
    assert list(checks._models(config, tmp_path)) == []
    (tmp_path / "Qwen").mkdir()
    assert len(list(checks._models(config, tmp_path))) == 1


def test_a_running_cluster_is_given_no_numbers_and_its_workers_the_platform(monkeypatch):
    from hydra import compose, initialize_config_dir

    from verl_bpo.commands.dry_run import CONFIG_FOLDER
    from verl_bpo.integration.prepare import cpu_defaults

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    with initialize_config_dir(str(CONFIG_FOLDER), version_base=None):
        config = compose("bpo_trainer", ["actor_rollout_ref.rollout.name=hf"])
    cpu_defaults(config)
    started = config.ray_kwargs.ray_init
    assert started.get("num_gpus") is None and started.get("num_cpus") is None
    assert started.runtime_env.env_vars == {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
