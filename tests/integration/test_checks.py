"""What a dry run checks is what the run checks, over all rows, before Ray starts; each fault is one line."""

import json
from pathlib import Path
from types import SimpleNamespace

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


@pytest.fixture(scope="module")
def complete():
    """The whole config with nothing left unset, to change one key of."""
    from hydra import compose, initialize_config_dir

    from verl_bpo.commands.dry_run import CONFIG_FOLDER

    with initialize_config_dir(str(CONFIG_FOLDER), version_base=None):
        return compose("bpo_trainer", ["actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.model.path=x"])


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("data.train_batch_size", None, "is unset"),
        ("data.train_batch_size", 4.5, "must be a whole number of at least 1"),
        ("data.train_batch_size", -3, "must be a whole number of at least 1"),
        ("actor_rollout_ref.model.path", "", "is unset"),
        ("actor_rollout_ref.rollout.n", True, "must be a whole number of at least 1"),
        ("actor_rollout_ref.rollout.n", None, "is unset"),
        ("actor_rollout_ref.rollout.temperature", float("nan"), "must be above 0"),
        ("actor_rollout_ref.rollout.temperature", "hot", "must be above 0"),
        ("actor_rollout_ref.rollout.top_k", "abc", "must be a whole number"),
        ("actor_rollout_ref.rollout.name", "foo", "is not one of vllm, "),
        ("actor_rollout_ref.rollout.dtype", "foo", "is not one of fp32, "),
        ("actor_rollout_ref.rollout.max_model_len", 0, "must be a whole number of at least 1"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", 2, "must be above 0 and at most 1"),
        ("actor_rollout_ref.actor.optim.lr", -1, "must be above 0"),
        ("actor_rollout_ref.actor.optim.lr", "abc", "must be above 0"),
        ("actor_rollout_ref.actor.clip_ratio", -1, "must be above 0"),
        ("actor_rollout_ref.actor.strategy", "foo", "is not one of fsdp, "),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "foo", "is not one of vanilla, "),
        ("algorithm.adv_estimator", "foo", "is not one of gae, "),
        ("algorithm.gamma", 2, "must be from 0 to 1"),
        ("critic.enable", "maybe", "must be True or False"),
        ("data.shuffle", "maybe", "must be True or False"),
        ("data.seed", "abc", "must be a whole number"),
        ("data.dataloader_num_workers", -1, "must be at least 0"),
        ("data.apply_chat_template_kwargs", 7, "must hold keys"),
        ("trainer.test_freq", "abc", "must be a whole number"),
        ("trainer.save_freq", 0.5, "must be a whole number"),
        ("trainer.resume_mode", "foo", "is not one of auto, disable, resume_path"),
        ("trainer.device", "foo", "is not one of cuda, "),
        ("trainer.nnodes", "x", "must be a whole number of at least 1"),
    ],
)
def test_values_of_verls_keys_that_cant_work_are_told_by_key_and_value(complete, key, value, said):
    checks.check_numbers(complete)
    config = complete.copy()
    OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(ConfigError) as told:
        checks.check_numbers(config)
    assert str(told.value).startswith(key) and said in str(told.value) and "\n" not in str(told.value)


def places(complete, **changed):
    """The lines on where a run would write."""
    config = complete.copy()
    for key, value in changed.items():
        OmegaConf.update(config, f"trainer.{key}", value)
    return config, SimpleNamespace(dump_dir=None)


def test_where_a_run_cant_write_is_told(complete, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")

    def lines(**changed):
        config, bpo = places(complete, default_local_dir=str(tmp_path / "new"), logger=["console"])
        for key, value in changed.items():
            setattr(bpo, key, value) if key == "dump_dir" else OmegaConf.update(config, f"trainer.{key}", value)
        return list(checks._outputs(config, bpo, tmp_path))

    assert lines() == []
    assert lines(default_local_dir="file/below") == [
        f"trainer.default_local_dir: {tmp_path}/file is a file: give a folder"
    ]
    assert lines(dump_dir="file") == [f"bpo.dump_dir: {tmp_path}/file is a file: give a folder"]
    assert lines(logger=["nothing"])[0].startswith("trainer.logger: 'nothing' is not one of ")
    assert lines(logger=7)[0].startswith("trainer.logger: '7' is not one of ")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path))
    assert lines(logger=["file"]) == [f"VERL_FILE_LOGGER_PATH={tmp_path} is a folder: give a file"]
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    (line,) = lines()
    assert line.startswith("trainer.default_local_dir: the disk of ") and "is full" in line


def test_a_model_that_is_no_model_is_told(inputs):
    folder = inputs[0]
    config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": "model"}}, "critic": {"enable": None}})

    def line():
        (found,) = checks._models(config, folder)
        assert found.startswith("actor_rollout_ref.model.path: ") and "\n" not in found
        return found

    weights = (folder / "model/model.safetensors").read_bytes()
    (folder / "model/model.safetensors").write_bytes(weights[:-2])
    assert "model.safetensors can't be read" in line() and "it is cut short" in line()
    (folder / "model/model.safetensors").write_bytes(weights)
    (folder / "model/tokenizer.json").unlink()
    assert "no tokenizer in model" in line()
    (folder / "model/tokenizer.json").write_text("{}")
    (folder / "model/config.json").write_text("{")
    assert "model/config.json is no model's" in line()
    config.actor_rollout_ref.model.path = "model/config.json"
    assert "is a file: give the folder" in line()


def test_a_name_that_the_hub_doesnt_have_is_told_within_seconds_by_the_run_alone(monkeypatch, tmp_path):
    """verl's own look-up takes 49 seconds. Without a network every look-up fails, as here."""
    import huggingface_hub

    def refused(url, timeout):
        assert timeout <= 5
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refused)
    path = "nobody/has-this-model"
    config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": path}}, "critic": {"enable": None}})
    assert list(checks._models(config, tmp_path)) == []
    (line,) = checks._models(config, tmp_path, starts=True)
    assert line.startswith(f"actor_rollout_ref.model.path: no folder {path}, and the Hugging Face Hub gives no model")


@pytest.mark.parametrize("broken", ["latest", "cut", "code", "no ranks", "no shard"])
def test_a_checkpoint_that_cant_be_gone_on_from_is_told(inputs, broken):
    folder = inputs[0]
    actor = folder / "checkpoints/global_step_3/actor"
    actor.mkdir(parents=True)
    latest = folder / "checkpoints/latest_checkpointed_iteration.txt"
    latest.write_text("3")
    (actor / "fsdp_config.json").write_text('{"world_size": 1}')
    shard = actor / "model_world_size_1_rank_0.pt"
    torch.save({"weight": torch.ones(9)}, shard)
    config = OmegaConf.create({
        "trainer": {"resume_mode": "auto", "default_local_dir": "checkpoints", "n_gpus_per_node": 1, "nnodes": 1},
        "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}},
    })  # fmt: skip
    assert list(checks._resumed(config, folder)) == []
    if broken == "latest":
        latest.write_text("")
    elif broken == "cut":
        shard.write_bytes(shard.read_bytes()[:-40])
    elif broken == "code":
        torch.save({"weight": json.JSONDecoder}, shard)
    elif broken == "no ranks":
        (actor / "fsdp_config.json").write_text("{")
    else:
        shard.unlink()
    (line,) = checks._resumed(config, folder)
    said = {
        "latest": "latest_checkpointed_iteration.txt is empty; there are global_step_3: ",
        "cut": "model_world_size_1_rank_0.pt can't be read",
        "code": "is refused: loading it would run json.decoder.JSONDecoder",
        "no ranks": "fsdp_config.json can't be read",
        "no shard": "lacks model_world_size_1_rank_0.pt",
    }[broken]
    assert line.startswith("trainer.default_local_dir: ") and said in line and "\n" not in line


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
