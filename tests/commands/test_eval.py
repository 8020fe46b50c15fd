"""``verl-bpo eval``: a tiny model plays a real environment; interruption, panels and intervals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes.imitation.policy import make_model, make_tokenizer
from verl_bpo.commands import eval as module
from verl_bpo.commands.eval import evaluate
from verl_bpo.commands.evaluation.episodes import Episode, read_episodes
from verl_bpo.commands.evaluation.options import options_from
from verl_bpo.commands.evaluation.panel import panel_digest
from verl_bpo.commands.evaluation.summary import summary
from verl_bpo.commands.main import parse
from verl_bpo.commands.make_data import write_prompts
from verl_bpo.generation.prompts import Task, prompt_tasks
from verl_bpo.model import checkpoint
from verl_bpo.model.checkpoint import find_model, load_model
from verl_bpo.options import ConfigError
from verl_bpo.report.intervals import task_bootstrap, wilson
from verl_bpo.tree.prompting import PromptConfig

REPOSITORY = Path(__file__).resolve().parents[2]
GAME = f"{REPOSITORY}/recipes/own_env/number_game.py:NumberGame"
LIMITS = ["bpo.env.max_turns=3", "bpo.env.max_action_tokens=4", "bpo.env.isolation=none", "bpo.prompt.template=bare"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A random policy with a tokenizer of its own, and a panel."""
    folder = tmp_path_factory.mktemp("eval")
    torch.manual_seed(0)
    tokenizer = make_tokenizer(["guess 1 guess 2 guess 3 Higher. Lower. Right. Say a number."], 300)
    model = make_model(tokenizer, hidden_size=16, layers=1, heads=2)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_prompts(GAME, "train", folder / "panel.parquet", limit=6)
    return folder


def options(root: Path, **chosen):
    return options_from(root / "model", LIMITS, **chosen)


def test_an_interrupted_evaluation_goes_on_and_ends_as_an_uninterrupted_one(root, tmp_path):
    panel = prompt_tasks(root / "panel.parquet", None)
    whole = evaluate(root / "model", panel, tmp_path / "whole", options(root, episodes=2))
    assert whole["success"]["episodes"] == 12 and whole["success"]["tasks"] == 6
    evaluate(root / "model", panel, tmp_path / "parts", options(root, episodes=2))
    lines = (tmp_path / "parts/episodes.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "parts/episodes.jsonl").write_text("".join(lines[:5]) + lines[5][:9])
    parts = evaluate(root / "model", panel, tmp_path / "parts", options(root, episodes=2))
    assert parts | {"seconds": 0} == whole | {"seconds": 0}
    key = lambda e: (e.task, e.episode)  # noqa: E731
    assert sorted(read_episodes(tmp_path / "parts"), key=key) == sorted(read_episodes(tmp_path / "whole"), key=key)


def test_nothing_is_played_again_once_all_is_there(root, tmp_path, monkeypatch):
    panel = prompt_tasks(root / "panel.parquet", None)
    before = evaluate(root / "model", panel, tmp_path / "out", options(root))
    monkeypatch.setattr(module, "play", None)
    assert evaluate(root / "model", panel, tmp_path / "out", options(root))["success"] == before["success"]


def test_greedy_episodes_do_not_depend_on_the_seed(root, tmp_path):
    panel = prompt_tasks(root / "panel.parquet", None)
    for seed in (0, 1):
        evaluate(root / "model", panel, tmp_path / str(seed), options(root, temperature=0.0, seed=seed))
    assert sorted(map(str, read_episodes(tmp_path / "0"))) == sorted(map(str, read_episodes(tmp_path / "1")))


def test_a_folder_of_another_evaluation_is_not_mixed_into(root, tmp_path):
    panel = prompt_tasks(root / "panel.parquet", None)
    evaluate(root / "model", panel[:2], tmp_path / "out", options(root))
    with pytest.raises(ValueError, match="other panel: give another --out"):
        evaluate(root / "model", panel, tmp_path / "out", options(root))
    with pytest.raises(ValueError, match="other temperature"):
        evaluate(root / "model", panel[:2], tmp_path / "out", options(root, temperature=0.5))


def test_the_panel_is_told_by_order_seeds_and_contents_but_not_by_folder(tmp_path):
    rows = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "game.json").write_text("{}")
        rows.append(Task("textworld", str(tmp_path / folder / "game.json"), 0))
    assert panel_digest(rows[:1]) == panel_digest(rows[1:])
    other = Task("textworld", "game-2", 0)
    assert panel_digest([rows[0], other]) != panel_digest([other, rows[0]])
    assert panel_digest([other]) != panel_digest([Task("textworld", "game-2", 1)])
    (tmp_path / "b" / "game.json").write_text("{ }")
    assert panel_digest(rows[:1]) != panel_digest(rows[1:])


def test_episodes_lost_to_their_environment_are_left_out_and_told(root, tmp_path, capsys):
    panel = [*prompt_tasks(root / "panel.parquet", None)[:2], Task("textworld", "no/such/game.json", 0)]
    result = evaluate(root / "model", panel, tmp_path / "out", options(root))
    assert result["success"]["episodes"] == 2 and "no/such/game.json" in result["lost"][0]
    with pytest.raises(ValueError, match="no episode could be played: no/such/game.json"):
        evaluate(root / "model", panel[2:], tmp_path / "none", options(root))


def test_command(root, tmp_path, capsys):
    words = [
        "eval",
        str(root / "model"),
        *LIMITS,
        "--panel",
        str(root / "panel.parquet"),
        "--out",
        str(tmp_path / "out"),
    ]
    command, arguments = parse([*words, "--greedy"])
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "6 episodes, 6 tasks" in printed
    assert json.loads((tmp_path / "out/result.json").read_text())["temperature"] == 0


def test_overrides_may_stand_behind_options(root, tmp_path):
    command = [
        sys.executable,
        "-m",
        "verl_bpo.commands.main",
        "eval",
        str(root / "model"),
        "--panel",
        str(root / "panel.parquet"),
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "o"), "bpo.brnch.depth=2"], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "bpo.brnch doesn't bear on an evaluation" in done.stderr


def test_what_the_user_can_mend_is_said_in_one_line(root, tmp_path):
    with pytest.raises(ValueError, match="every episode of a task is played alike"):
        options(root, temperature=0.0, episodes=2)
    with pytest.raises(ConfigError, match="unknown key bpo.env.max_turn;"):
        options_from(root / "model", ["bpo.env.max_turn=3"])
    with pytest.raises(FileNotFoundError, match="make-data"):
        prompt_tasks(tmp_path / "none.parquet", None)
    with pytest.raises(FileNotFoundError, match="holds no model"):
        find_model(tmp_path)


def test_a_warm_start_brings_its_prompts(root, tmp_path):
    record = {"options": {"prompt": {"template": "bare", "list_actions": True}}}
    (tmp_path / "warmstart.json").write_text(json.dumps(record))
    assert options_from(tmp_path, []).config.prompt == PromptConfig(template="bare", list_actions=True)
    assert not options_from(tmp_path, ["bpo.prompt.list_actions=false"]).config.prompt.list_actions


def test_a_runs_config_brings_its_settings_and_overrides_win(root, tmp_path):
    bpo = {"env": {"max_turns": 7, "max_action_tokens": 5}, "prompt": {"template": "bare", "system": ""}}
    data = {"max_prompt_length": 99, "max_response_length": 77, "train_files": "x"}
    (tmp_path / "config.yaml").write_text(json.dumps({"bpo": bpo, "data": data}))
    found = options_from(
        root / "model", ["bpo.env.max_turns=9", "data.max_response_length=66"], tmp_path / "config.yaml"
    )
    assert found.config.prompt.system_text == "" and found.config.env.max_action_tokens == 5
    assert (found.config.env.max_turns, found.max_prompt_tokens, found.max_response_tokens) == (9, 99, 66)


@pytest.mark.parametrize(
    "validation, chosen, sampled",
    [
        ({"do_sample": True, "temperature": 0.4, "top_p": 0.9}, {}, (0.4, 0.9)),
        ({"do_sample": True, "temperature": 0.4, "top_p": 0.9}, {"temperature": 1.0, "top_p": None}, (1.0, 0.9)),
        ({"do_sample": False, "temperature": 0.4, "top_p": 1.0}, {"temperature": None}, (0.0, 1.0)),
        (None, {"temperature": None, "top_p": None}, (1.0, 1.0)),
    ],
)
def test_a_run_is_sampled_as_in_its_validation_unless_told_otherwise(root, tmp_path, validation, chosen, sampled):
    rollout = {"val_kwargs": validation} if validation else {}
    run = {"bpo": {"env": {}, "prompt": {}}, "data": {"max_prompt_length": 9, "max_response_length": 9}}
    (tmp_path / "config.yaml").write_text(json.dumps(run | {"actor_rollout_ref": {"rollout": rollout}}))
    found = options_from(root / "model", [], tmp_path / "config.yaml", **chosen)
    assert (found.temperature, found.top_p) == sampled


@pytest.mark.parametrize("where", ["checkpoints/global_step_3", "."])
def test_a_checkpoint_brings_its_runs_settings(tmp_path, where):
    actor = tmp_path / "checkpoints/global_step_3/actor"
    actor.mkdir(parents=True)
    (actor / "fsdp_config.json").write_text("{}")
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    assert options_from(actor, []).config.env.max_turns != 7
    bpo = {"env": {"max_turns": 7}, "prompt": {"template": "bare"}}
    data = {"max_prompt_length": 99, "max_response_length": 77}
    (tmp_path / where / "config.yaml").write_text(json.dumps({"bpo": bpo, "data": data}))
    for model in (actor, actor.parent, tmp_path / "checkpoints"):
        found = options_from(model, ["data.max_response_length=66"])
        assert (found.config.env.max_turns, found.max_prompt_tokens, found.max_response_tokens) == (7, 99, 66)
        assert found.config.prompt.template == "bare"


# --- checkpoints ------------------------------------------------------------------------------------------------------


def write_checkpoint(root: Path, folder: Path, monkeypatch) -> dict[str, torch.Tensor]:
    """What two ranks of verl's FSDP engine leave: sharded tensors with their place in the mesh (kept in memory)."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    actor = folder / "global_step_7/actor"
    (actor / "huggingface").mkdir(parents=True)
    state, files = load_model(root / "model")[0].state_dict(), {}
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
            part = {
                name: DTensor.from_local(
                    (tensor + 1).chunk(2)[rank] if len(tensor) > 1 or rank == 0 else tensor[:0],
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
                for name, tensor in state.items()
            }
            files[f"model_world_size_2_rank_{rank}.pt"] = part
            (actor / f"model_world_size_2_rank_{rank}.pt").touch()
        finally:
            dist.destroy_process_group()
    monkeypatch.setattr(checkpoint, "load_tensors", lambda file: files[file.name])
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    for file in (root / "model").iterdir():
        if file.suffix != ".safetensors":
            (actor / "huggingface" / file.name).write_bytes(file.read_bytes())
    return state


def test_the_shards_of_a_checkpoint_are_put_together_as_they_were_trained(root, tmp_path, monkeypatch):
    before = write_checkpoint(root, tmp_path, monkeypatch)
    for path in (tmp_path, tmp_path / "global_step_7", tmp_path / "global_step_7/actor"):
        assert find_model(path) == tmp_path / "global_step_7/actor"
    model, tokenizer = load_model(tmp_path)
    assert len(tokenizer) == model.config.vocab_size and model.generation_config.eos_token_id == tokenizer.eos_token_id
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, before[name] + 1, rtol=0, atol=0)


@pytest.mark.parametrize("key, code", [("name", "{}/evil.py:World"), ("backend", "{}/evil.py:World")])
def test_code_that_a_checkpoints_config_names_is_loaded_only_where_the_user_says_so(tmp_path, key, code):
    actor = tmp_path / "global_step_3/actor"
    actor.mkdir(parents=True)
    (actor / "fsdp_config.json").write_text("{}")
    (tmp_path / "evil.py").write_text(f"open('{tmp_path}/ran', 'w')")
    code, file = code.format(tmp_path), tmp_path / "global_step_3/config.yaml"
    data = {"max_prompt_length": 99, "max_response_length": 77}
    file.write_text(json.dumps({"bpo": {"env": {key: code}, "prompt": {}}, "data": data}))
    with pytest.raises(
        ConfigError, match=f"came with the checkpoint, names code of its own .*bpo.env.{key}="
    ) as refused:
        options_from(actor, [])
    assert "\n" not in str(refused.value) and not (tmp_path / "ran").exists()
    assert getattr(options_from(actor, [], file).config.env, key) == code
    assert options_from(actor, ["bpo.env.name=textworld", "bpo.env.backend=memory"]).config.env.backend == "memory"


def test_weights_that_were_saved_for_hugging_face_are_preferred(root, tmp_path):
    folder = tmp_path / "global_step_1/actor/huggingface"
    folder.mkdir(parents=True)
    for file in (root / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert find_model(tmp_path / "global_step_1") == folder


# --- intervals --------------------------------------------------------------------------------------------------------


def test_wilson_is_the_textbook_interval():
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    for won, episodes, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(won, episodes) == pytest.approx((low, high), abs=5e-5)


def test_the_bootstrap_over_tasks_knows_that_a_tasks_episodes_are_alike():
    alike = task_bootstrap([[1.0] * 10] * 5 + [[0.0] * 10] * 5)
    assert alike[0] < 0.25 and alike[1] > 0.75  # ten tasks, not a hundred episodes
    assert task_bootstrap([[1.0], [1.0]]) == (1.0, 1.0)


def test_success_is_told_per_task_type():
    episodes = [Episode(i, 0, i % 2 == 0, 1.0, 3, 9, 1, "terminated", "pick" if i < 2 else "heat") for i in range(5)]
    found = summary(episodes)
    assert found["success"]["mean"] == 0.6 and found["invalid_share"] == pytest.approx(1 / 3)
    assert {k: (v["mean"], v["episodes"]) for k, v in found["task_types"].items()} == {
        "heat": (2 / 3, 3),
        "pick": (0.5, 2),
    }
