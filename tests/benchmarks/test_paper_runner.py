"""The experiment runner: what studies ask for, and how runs are skipped, resumed and recorded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.paper import run as runner
from benchmarks.paper.study import Run, read_study, slug
from verl_bpo.config.schema import build

STUDIES = sorted((REPOSITORY / "benchmarks/paper/studies").glob("*.yaml"))


def one_run(**changes) -> Run:
    values = {
        "study": "s", "launcher": "quickstart", "environment": "world", "model": "m", "method": "BPO paper", "seed": 3,
        "recipe": None, "overrides": ("algorithm.adv_estimator=bpo",), "env_steps": 100, "eval_episodes": 0,
    }  # fmt: skip
    return Run(**values | changes)


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """Stands in for verl: a child process that writes metrics and ends as its file says."""
    script = tmp_path / "trainer.py"
    script.write_text(
        "import json, os, sys\n"
        "with open(os.environ['VERL_FILE_LOGGER_PATH'], 'w') as f:\n"
        "    f.write(json.dumps({'step': 1, 'data': {'compute/env_steps': 100}}) + '\\n')\n"
        f"sys.exit(int(open({str(tmp_path / 'exit')!r}).read()))\n"
    )
    (tmp_path / "exit").write_text("0")
    monkeypatch.setattr(runner, "COMMAND", [sys.executable, str(script)])
    config = runner.OmegaConf.create({"algorithm": {"adv_estimator": "bpo"}})
    monkeypatch.setattr(runner, "resolved_config", lambda run, arguments: config)
    return tmp_path


def test_a_finished_run_is_recorded_and_skipped(trainer):
    folder = trainer / one_run().folder
    assert runner.execute(one_run(), trainer, ["a=1"], None)
    record = json.loads((folder / "run.json").read_text())
    assert record["done"] and record["method"] == "BPO paper" and record["seed"] == 3 and record["estimator"] == "bpo"
    assert record["arguments"] == ["a=1"] and (folder / "config.yaml").exists()
    (attempt,) = record["attempts"]
    assert attempt["exit"] == 0 and len(attempt["commit"]) == 40 and attempt["versions"]["torch"]
    assert runner.execute(one_run(), trainer, ["a=1"], None)
    assert len(list(folder.glob("metrics-*.jsonl"))) == 1


def test_an_interrupted_run_goes_on_in_a_new_attempt_that_keeps_the_first_ones_log(trainer):
    folder = trainer / one_run().folder
    (trainer / "exit").write_text("1")
    assert not runner.execute(one_run(), trainer, ["a=1"], None)
    (trainer / "exit").write_text("0")
    assert runner.execute(one_run(), trainer, ["a=1"], None)
    assert [a["exit"] for a in json.loads((folder / "run.json").read_text())["attempts"]] == [1, 0]
    assert sorted(f.name for f in folder.glob("metrics-*")) == ["metrics-1.jsonl", "metrics-2.jsonl"]


def test_a_folder_of_other_arguments_is_not_mixed_into(trainer):
    runner.execute(one_run(), trainer, ["a=1", "b=2"], None)
    with pytest.raises(ValueError, match=r"other arguments \(a=1, a=3\): remove it"):
        runner.execute(one_run(), trainer, ["a=3", "b=2"], None)


def test_runs_and_checkout_may_be_moved(trainer, monkeypatch):
    def places(out):
        return [f"model={out}/data/m", f"config={runner.REPOSITORY}/recipes"]

    runner.execute(one_run(), trainer / "a", places(trainer / "a"), None)
    (trainer / "a").rename(trainer / "b")
    monkeypatch.setattr(runner, "REPOSITORY", trainer)
    assert runner.execute(one_run(), trainer / "b", places(trainer / "b"), None)
    record = json.loads((trainer / "b" / one_run().folder / "run.json").read_text())
    assert record["arguments"] == ["model=OUT/data/m", "config=REPOSITORY/recipes"] and len(record["attempts"]) == 1


def test_a_record_with_places_in_it_is_known_where_they_are(trainer):
    arguments = [f"model={trainer}/data/m", f"config={runner.REPOSITORY}/recipes"]
    runner.execute(one_run(), trainer, arguments, None)
    file = trainer / one_run().folder / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"arguments": arguments}))
    assert runner.execute(one_run(), trainer, arguments, None) and len(json.loads(file.read_text())["attempts"]) == 1


@pytest.mark.parametrize(
    "games, policy, model, commands",
    [
        (
            {"level": 0, "train": 9, "valid": 3},
            {"hidden_size": 64},
            "m-3",
            [
                "make-games ROOT/games --level 0 --train 9 --valid 3",
                "make-data textworld ROOT/train.parquet --split train --root ROOT/games",
                "make-data textworld ROOT/valid.parquet --split valid --root ROOT/games",
                "imitation --env textworld --out ROOT/m-3 --data ROOT/games --seed 3 --hidden-size 64",
            ],
        ),
        (
            {"kind": "alfworld", "train": 9, "valid": 3},
            {"seed": 0, "list_actions": False},
            "m-0",
            [
                "make-games ROOT/games --kind alfworld --train 9 --valid 3",
                "make-data alfworld ROOT/train.parquet --split train --root ROOT/games",
                "make-data alfworld ROOT/valid.parquet --split valid_seen --root ROOT/games",
                "imitation --env alfworld --out ROOT/m-0 --data ROOT/games --seed 0 --no-list-actions",
            ],
        ),
        (
            {"env": "webshop", "train": 9, "valid": 3},
            {},
            "m-3",
            [
                "make-data webshop ROOT/train.parquet --split train --panel 9",
                "make-data webshop ROOT/valid.parquet --split test --panel 3",
                "imitation --env webshop --out ROOT/m-3 --seed 3",
            ],
        ),
    ],
)
def test_games_prompt_files_and_warm_start_are_made_as_a_study_says(
    games, policy, model, commands, tmp_path, monkeypatch
):
    said = []
    monkeypatch.setattr(runner, "IMITATION", ["python", "imitation"])
    monkeypatch.setattr(runner, "COMMAND", ["python"])
    monkeypatch.setattr(
        runner, "_must", lambda command, *words: said.append(" ".join(map(str, [*command[1:], *words])))
    )
    root, found = runner.prepare(one_run(), games, policy, tmp_path)
    assert (root, found) == (tmp_path / "data/world", tmp_path / "data/world" / model)
    assert [s.replace(str(root), "ROOT") for s in said] == commands


def test_arguments_resume_from_checkpoints_and_end_at_the_matched_steps(tmp_path):
    found = runner.training_arguments(one_run(), tmp_path / "run", (tmp_path / "data", tmp_path / "policy"))
    for word in (
        f"trainer.default_local_dir={tmp_path}/run/checkpoints", "trainer.resume_mode=auto", "bpo.seed=3",
        "bpo.max_env_steps=100", f"actor_rollout_ref.model.path={tmp_path}/policy", "algorithm.adv_estimator=bpo",
    ):  # fmt: skip
        assert word in found
    assert found[-1] == "algorithm.adv_estimator=bpo"  # a study has the last word


def test_a_recipe_brings_its_own_arguments(tmp_path):
    run = one_run(launcher="recipes", environment="webshop", model="qwen2.5_1.5b", recipe="grpo", overrides=("a.b=1",))
    found = runner.training_arguments(run, tmp_path, None)
    assert "+method=grpo" in found and "bpo.max_env_steps=100" in found and "a.b=1" in found


@pytest.mark.parametrize("file", STUDIES, ids=lambda f: f.stem)
def test_studies_can_be_read_and_their_recipes_exist(file):
    study = read_study(file)
    quick = study.quickly()
    assert 0 < len(quick.runs()) < len(study.runs())
    assert len({r.folder for r in study.runs()}) == len(study.runs())
    if study.launcher == "recipes":
        for run in study.runs():
            assert (REPOSITORY / "recipes" / run.recipe / run.environment / f"run_{run.model}.sh").exists(), run.title


def test_a_method_may_have_seeds_of_its_own_but_not_under_quick(tmp_path):
    file = tmp_path / "s.yaml"
    methods = {"A": {"seeds": [0, 5]}, "B": {}}
    study = {"name": "s", "launcher": "quickstart", "seeds": [0, 1], "environments": {"e": {}}, "models": {"m": {}}}
    file.write_text(json.dumps(study | {"methods": methods, "quick": {"seeds": [1]}}))
    found = read_study(file)
    assert [(r.method, r.seed) for r in found.runs()] == [("A", 0), ("B", 0), ("B", 1), ("A", 5)]
    assert [(r.method, r.seed) for r in found.quickly().runs()] == [("A", 1), ("B", 1)]


def test_studies_agree_on_runs_of_one_name():
    seen = {}
    for run in (r for f in STUDIES for r in read_study(f).runs()):
        assert seen.setdefault(run.folder, run.overrides) == run.overrides, run.title


@pytest.mark.parametrize("file", STUDIES, ids=lambda f: f.stem)
def test_our_keys_in_studies_are_known(file):
    for name, method in read_study(file).methods.items():
        given = runner.OmegaConf.to_container(runner.OmegaConf.from_dotlist(method.get("overrides", [])))
        build(given.get("bpo", {}), "paper" if name.startswith("BPO") else "plain")


def test_a_run_that_verl_would_refuse_ends_before_it_starts(tmp_path):
    start = tmp_path / "data", tmp_path / "policy"
    good = runner.training_arguments(one_run(), tmp_path / "run", start)
    assert runner.resolved_config(one_run(), good).bpo.max_env_steps == 100
    with pytest.raises(ValueError, match="world m BPO paper seed 3: .*bpo.branch.sellector"):
        runner.resolved_config(one_run(), [*good, "+bpo.branch.sellector=every"])


def test_what_a_study_gets_wrong_is_named(tmp_path):
    file = tmp_path / "s.yaml"
    good = {"name": "s", "launcher": "quickstart", "seeds": [0], "environments": {"e": {}}, "models": {"m": {}}}
    for changes, said in (
        ({}, "methods is missing"),
        ({"methods": {"A": {}}, "sedes": [1]}, "unknown key sedes"),
        ({"methods": {"A": {"recipe": "bpo"}}}, "methods.A: recipe goes with launcher=recipes"),
        ({"methods": {"A": {}}, "launcher": "slurm"}, "launcher='slurm' is not one of"),
        ({"methods": {"A b": {}, "a-b": {}}}, "two names make the same folder"),
    ):
        file.write_text(json.dumps(good | changes))
        with pytest.raises(ValueError, match=said):
            read_study(file)
    assert slug("BPO guided K3") == "bpo-guided-k3"


def test_a_second_runner_in_one_folder_is_refused(tmp_path):
    with FileLock(tmp_path / ".lock"):
        done = subprocess.run(
            [sys.executable, "benchmarks/paper/run.py", "--quick", "--out", str(tmp_path)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.strip() == f"another run.py is at work in {tmp_path}: wait for it, or give another --out"


def test_an_evaluation_is_extended_when_more_episodes_are_asked_for(tmp_path, monkeypatch):
    folder, calls = tmp_path / one_run().folder, []
    (folder / "eval").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"arguments": [], "done": True, "attempts": []}))
    monkeypatch.setattr(
        runner.subprocess, "run", lambda words, **_: calls.append(words) or subprocess.CompletedProcess(words, 0)
    )
    assert runner.evaluated(folder) == 0
    (folder / "eval/result.json").write_text(json.dumps({"success": {"episodes": 8, "tasks": 2}}))
    assert runner.execute(one_run(eval_episodes=4), tmp_path, [], tmp_path) and not calls
    assert runner.execute(one_run(eval_episodes=6), tmp_path, [], tmp_path)
    assert calls[0][calls[0].index("--episodes") + 1] == "6"
