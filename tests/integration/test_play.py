"""A run and the evaluation of its checkpoint set up the same thing, whatever the run was given."""

import asyncio
import json
from dataclasses import fields
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipes.imitation.policy import make_tokenizer
from verl_bpo.commands.dry_run import CONFIG_FOLDER
from verl_bpo.commands.evaluation.options import options_from
from verl_bpo.generation.play import Play
from verl_bpo.generation.prompts import Task
from verl_bpo.integration.agent_loop import TreeAgentLoop, _plain_json, _shared
from verl_bpo.integration.prepare import prepare
from verl_bpo.options import ConfigError

OTHER = [
    "bpo.env.name=textworld",
    "bpo.env.max_turns=7",
    "bpo.env.max_action_tokens=9",
    "bpo.env.backend=replay",
    "bpo.prompt.template=bare",
    "bpo.prompt.context=window",
    "data.max_prompt_length=333",
    "data.max_response_length=444",
    "+data.apply_chat_template_kwargs.enable_thinking=false",
    "+actor_rollout_ref.model.custom_chat_template=xyz",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.7",
    "actor_rollout_ref.rollout.val_kwargs.top_p=0.8",
    "actor_rollout_ref.rollout.val_kwargs.top_k=5",
]
"""Every setting of a run that its validation plays by, none of them at its default."""


def completed(overrides):
    with initialize_config_dir(str(CONFIG_FOLDER), version_base=None):
        config = compose("bpo_trainer", ["data.train_batch_size=8", "actor_rollout_ref.rollout.name=hf", *overrides])
    prepare(config, cpu=False)
    return config


@pytest.mark.parametrize("overrides", [[], OTHER, ["actor_rollout_ref.rollout.val_kwargs.temperature=0.7"]])
def test_a_checkpoint_is_evaluated_as_its_run_validates(tmp_path, overrides):
    config = completed(overrides)
    folder = tmp_path / "global_step_3"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/fsdp_config.json").write_text("{}")
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    validated, evaluated = _shared(_plain_json(config)).play, options_from(folder, [])
    for item in fields(Play):
        assert getattr(evaluated, item.name) == getattr(validated, item.name), item.name
    if overrides == OTHER:
        default = Play(config=_shared(_plain_json(completed([]))).play.config)
        assert not [item.name for item in fields(Play) if getattr(evaluated, item.name) == getattr(default, item.name)]


def test_an_override_of_a_template_option_wins(tmp_path):
    OmegaConf.save(completed(OTHER), tmp_path / "config.yaml", resolve=True)
    found = options_from(tmp_path, ["+data.apply_chat_template_kwargs.enable_thinking=true"], tmp_path / "config.yaml")
    assert found.template_options == {"enable_thinking": True}


@pytest.mark.parametrize("validate", [False, True])
def test_rollouts_are_prompted_and_stopped_as_an_evaluation_is(monkeypatch, validate):
    """A base model's eos is not the end of its turn: training must stop at both."""
    config = completed([*OTHER[:7], "actor_rollout_ref.rollout.val_kwargs.top_k=3"])
    tokenizer = make_tokenizer(["look wait"], 300)
    end, eos = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.eos_token = "<|endoftext|>"
    shared = _shared(_plain_json(config))
    monkeypatch.setattr(type(shared.pools), "__getitem__", lambda self, env: SimpleNamespace(open=refuse))
    loop = object.__new__(TreeAgentLoop)
    loop.shared, loop.bpo, loop.tokenizer, loop.loop = shared, shared.config, tokenizer, asyncio.new_event_loop()
    sent = {}
    loop._generator = lambda params, identity: sent.update(params)
    models = SimpleNamespace(eos_token_id=[17]), SimpleNamespace(eos_token_id=None)
    asked = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "_validate": validate, "_models": models}
    loop.loop.run_until_complete(loop.run(asked, extra_info={"task": "x"}))
    assert sent["stop_token_ids"] == sorted({17, end, eos})
    assert sent["temperature"] == (0.0 if validate else 1.0)
    play = options_from_run(config)
    assert play.prompter(tokenizer, *models).stop_ids == {17, end, eos}
    assert loop.prompter.first(observation()) == play.prompter(tokenizer, *models).first(observation())


def refuse():
    from verl_bpo.sandbox.base import SandboxCrashed

    raise SandboxCrashed("none here")


def observation():
    from verl_bpo.sandbox.base import Observation

    return Observation("A room.")


def options_from_run(config):
    return Play.of_run(json.loads(json.dumps(OmegaConf.to_container(config, resolve=True))))


@pytest.mark.parametrize(
    "extra, wrong",
    [
        (None, "names no task"),
        ({"index": 1}, "names no task"),
        ({"task": 3, "env": "x"}, "names no task"),
        ({"task": "a", "env": None}, "names no environment, and bpo.env.name is unset"),
        ({"task": "a", "env": "x", "seed": 0.5}, "seed=0.5"),
        ({"task": "a", "env": "x", "seed": float("nan")}, "seed=nan"),
    ],
)
def test_a_row_that_names_no_task_is_told(extra, wrong):
    with pytest.raises(ConfigError, match=wrong):
        Task.of({"extra_info": extra}, None)


def test_a_row_without_an_environment_is_of_the_configured_one():
    assert Task.of({"extra_info": {"task": "a", "env": None, "seed": None}}, "x") == Task("x", "a", 0)
    assert Task.of({"extra_info": {"task": "a", "env": "y", "seed": 1.0}}, "x") == Task("y", "a", 1)
