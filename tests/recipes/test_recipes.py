"""Every recipe, checked as `verl-bpo train --dry-run` does, and what the recipes promise together."""

from pathlib import Path

import pandas
import pytest

from verl_bpo.commands.dry_run import dry_run, recipe_arguments, render

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("recipes/*/*/run_*.sh"))
SOME = {"train": 6, "valid_seen": 1, "valid_unseen": 1}
METHODS = {"bpo": "bpo", "sapo": "sapo", "grpo": "grpo", "rloo": "rloo", "ppo": "gae"}


@pytest.fixture(scope="module")
def reports():
    """One dry run a recipe."""
    return {recipe: dry_run(recipe_arguments(f"{REPOSITORY}/{recipe}"), 80.0, REPOSITORY) for recipe in RECIPES}


def test_every_promised_recipe_is_there():
    models = {"qwen2.5_1.5b": METHODS, "qwen2.5_7b": METHODS, "llama3.1_8b": ("bpo", "grpo", "rloo")}
    promised = {
        f"recipes/{method}/{environment}/run_{model}.sh"
        for model, methods in models.items()
        for method in methods
        for environment in ("alfworld", "webshop", "swebench")
        if environment != "swebench" or (method in models["llama3.1_8b"] and model != "qwen2.5_1.5b")
    }
    search = [(method, size) for method in ("bpo", "grpo", "rloo", "sapo") for size in ("3b", "7b")]
    promised |= {f"recipes/{method}/search/run_qwen2.5_{size}.sh" for method, size in search}
    assert set(RECIPES) == promised


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_sound_and_fits_its_gpus(reports, recipe):
    report = reports[recipe]
    assert report.problems == []
    assert report.memory.peak < 72  # of 80 GiB: an estimate needs a margin
    assert report.memory.kv_tokens > 64 * (2048 + 512)  # enough for long requests side by side


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_what_its_path_says(reports, recipe):
    _, method, environment, script = recipe.split("/")
    config = reports[recipe].config
    assert config.algorithm.adv_estimator == METHODS[method]
    assert config.bpo.env.name == environment
    name = f"{method}_{environment}_{script.removeprefix('run_').removesuffix('.sh')}"
    assert config.trainer.experiment_name == name
    model = config.actor_rollout_ref.model.path.lower().replace("-", "").replace("/", "")
    assert all(part in model for part in name.split("_")[2:])


def test_the_readme_states_what_the_dry_run_estimates(reports):
    readme = (REPOSITORY / "recipes/README.md").read_text().splitlines()
    for recipe, report in reports.items():
        (row,) = [line for line in readme if line.startswith(f"| [{recipe.removeprefix('recipes/')}]")]
        gpus = report.config.trainer.n_gpus_per_node
        steps = report.bpo.max_env_steps / report.usual.env_steps
        hours = steps * (report.usual.update_seconds + report.usual.decode_seconds) / 3600
        assert f"| {gpus} x 80 GB | {report.memory.peak:.0f} GiB, {hours:.1f} h |" in row


@pytest.mark.parametrize("environment", ["alfworld", "webshop", "swebench", "search"])
def test_methods_are_compared_at_the_same_compute_and_under_the_same_conditions(reports, environment):
    """Equal environment steps in all, trajectories a step, updates a step, limits, prompts and KL."""
    chosen = [report for recipe, report in reports.items() if recipe.split("/")[2] == environment]
    assert len({report.most.trajectories for report in chosen}) == 1
    for key in ("max_env_steps", "updates_per_step", "seed"):
        assert len({report.config.bpo[key] for report in chosen}) == 1
    for key in ("env", "prompt"):
        assert len({str(report.config.bpo[key]) for report in chosen}) == 1
    for key in ("kl_loss_coef", "use_kl_loss", "ppo_epochs", "loss_agg_mode", "optim"):
        assert len({str(report.config.actor_rollout_ref.actor[key]) for report in chosen}) == 1


@pytest.mark.parametrize(
    "recipe", [r for r in RECIPES if any(n in r for n in ("qwen2.5_1.5b", "qwen2.5_3b", "swebench"))]
)
def test_the_smoke_mode_of_a_recipe_is_sound_too(monkeypatch, recipe):
    monkeypatch.setenv("SMOKE", "1")
    report = dry_run(recipe_arguments(f"{REPOSITORY}/{recipe}"), 80.0, REPOSITORY)
    assert report.problems == []
    assert report.config.trainer.total_training_steps == 2
    assert report.config.actor_rollout_ref.model.path.startswith("runs/smoke/")


def test_missing_data_is_named_with_the_command_that_makes_it(monkeypatch):
    monkeypatch.setenv("DATA", "nowhere")
    report = dry_run(recipe_arguments(f"{REPOSITORY}/recipes/bpo/alfworld/run_qwen2.5_1.5b.sh"), 80.0, REPOSITORY)
    commands = [text.partition(": verl-bpo ")[2] for text in report.missing]
    assert commands == [
        f"make-data alfworld nowhere/{split}.parquet --split {split}"
        for split in ("train", "valid_seen", "valid_unseen")
    ]
    assert render(report).splitlines()[-1].startswith("missing: data.val_files")


def test_a_prompt_file_whose_games_are_gone_is_named(monkeypatch, tmp_path):
    from verl_bpo.commands.make_data import write_prompts
    from verl_bpo.envs.alfworld.generate import make_alfworld_games

    monkeypatch.setenv("ALFWORLD_DATA", str(make_alfworld_games(tmp_path / "games", progress=False, counts=SOME)))
    monkeypatch.setenv("DATA", str(tmp_path))
    for split in SOME:
        write_prompts("alfworld", split, tmp_path / f"{split}.parquet")
    few = ["data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=6", "bpo.updates_per_step=1"]
    arguments = recipe_arguments(f"{REPOSITORY}/recipes/bpo/alfworld/run_qwen2.5_1.5b.sh", few)
    report = dry_run(arguments, 80.0, REPOSITORY)
    assert report.missing == [] and render(report).splitlines()[-1] == "ready"
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "elsewhere"))
    missing = dry_run(arguments, 80.0, REPOSITORY).missing
    assert len(missing) == 3 and "no ALFWorld game at" in missing[0] and "alfworld-download" in missing[0]


def test_a_shop_that_is_gone_or_another_one_is_named(monkeypatch, tmp_path):
    pytest.importorskip("thefuzz")
    rows = [{"env": "webshop", "task": "0"}, {"env": "webshop", "task": "all-human:0"}]
    for split, row in zip(("train", "test"), rows):
        prompt = [{"role": "user", "content": row["task"]}]
        pandas.DataFrame({"prompt": [prompt] * 64, "extra_info": [row] * 64}).to_parquet(tmp_path / f"{split}.parquet")
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path))
    arguments = recipe_arguments(f"{REPOSITORY}/recipes/bpo/webshop/run_qwen2.5_1.5b.sh")
    gone, other = dry_run(arguments, 80.0, REPOSITORY).missing
    assert "train.parquet: no " in gone and "items_shuffle_1000.json" in gone and "setup.sh" in gone
    assert "test.parquet: 'all-human:0' is no goal of this WebShop, which is small-synthetic" in other
    for name in ("items_shuffle_1000.json", "items_ins_v2_1000.json"):
        (tmp_path / name).touch()
    assert dry_run(arguments, 80.0, REPOSITORY).missing == [other]


@pytest.mark.parametrize(
    "override, problem",
    [
        ("bpo.budjet.limit=4", "budjet"),
        ("+bpo.budjet.limit=4", "unknown key bpo.budjet: did you mean bpo.budget?"),
        ("+trainer.tset_freq=5", "unknown key trainer.tset_freq: did you mean trainer.test_freq?"),
        ("+actor_rollout_ref.actor.optim.learning_rate=1", "unknown key actor_rollout_ref.actor.optim.learning_rate"),
        ("+dta.train_batch_size=3", "unknown key dta: did you mean data?"),
        ("bpo.branch.forks=0", "bpo.branch.forks=0 must be at least 1"),
        ("bpo.updates_per_step=64", "bpo.updates_per_step=64 is more than data.train_batch_size=16"),
        ("actor_rollout_ref.actor.loss_agg_mode=mean", "Invalid loss_agg_mode"),
        ("bpo.env.execution=container", "environment alfworld runs no shell commands; leave it at local"),
        ("bpo.env.backend=nowhere.py:Mine", "no file nowhere.py: give the path of the file that holds your class"),
        ("bpo.env.max_turns=many", "bpo.env.max_turns='many' must be int"),
    ],
)
def test_a_wrong_key_or_value_is_named(override, problem):
    report = dry_run(
        recipe_arguments(f"{REPOSITORY}/recipes/bpo/alfworld/run_qwen2.5_1.5b.sh", [override]), 80.0, REPOSITORY
    )
    assert len(report.problems) == 1 and problem in report.problems[0]


def test_a_key_misspelt_in_a_yaml_file_is_found(tmp_path):
    text = (REPOSITORY / "recipes/config/base.yaml").read_text().replace("test_freq", "test_frequency")
    (tmp_path / "base.yaml").write_text(text)
    (tmp_path / "alfworld.yaml").write_text((REPOSITORY / "recipes/config/alfworld.yaml").read_text())
    report = dry_run(["--config-dir", str(tmp_path), "--config-name", "alfworld"])
    assert report.problems == ["unknown key trainer.test_frequency: did you mean trainer.test_freq?"]


def test_the_command_takes_hydras_options_in_any_order(capsys, monkeypatch, tmp_path):
    from verl_bpo.commands import main as cli

    monkeypatch.chdir(REPOSITORY)
    arguments = "bpo.seed=7 --config-dir recipes/quickstart --dry-run --config-name quickstart --gpu-memory 24 "
    arguments += f"root={tmp_path}"
    monkeypatch.setattr("sys.argv", ["verl-bpo", "train", *arguments.split(), "bpo.nothing=1"])
    assert cli.main() == 1
    assert "nothing" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["verl-bpo", "train", *arguments.split()])
    assert cli.main() == 1  # its games aren't made
    said = capsys.readouterr().out
    assert "seed: 7" in said and "GPUs of 24 GiB" in said and "problem" not in said and "missing" in said
