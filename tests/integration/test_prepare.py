"""What is said before a run starts."""

import json

import pytest
from transformers import Qwen2Config

from recipes.imitation.policy import make_tokenizer
from verl_bpo.config.schema import RunError
from verl_bpo.integration.prepare import taught_otherwise
from verl_bpo.integration.tree_trainer import check_policy
from verl_bpo.tree.prompting import PromptConfig

TAUGHT = PromptConfig(template="bare", system="", list_actions=True)


@pytest.fixture
def policy(tmp_path):
    (tmp_path / "warmstart.json").write_text(json.dumps({"options": {"prompt": TAUGHT.model_dump()}}))
    return tmp_path


@pytest.mark.parametrize(
    "change, keys",
    [
        ({}, []),
        ({"template": "think_action"}, ["template"]),
        ({"system": None, "list_actions": False}, ["list_actions", "system"]),
        ({"max_actions_listed": 5}, ["max_actions_listed"]),
        ({"window_turns": 9}, []),  # says nothing about full conversations
        ({"context": "window"}, ["context"]),
    ],
)
def test_a_prompt_style_that_the_warm_start_never_saw_is_warned_of(policy, change, keys):
    lines = taught_otherwise(str(policy), TAUGHT.model_copy(update=change))
    assert [line.partition("=")[0] for line in lines] == [f"bpo.prompt.{key}" for key in keys]


def test_other_models_are_not_warned_of(tmp_path):
    assert taught_otherwise(str(tmp_path), TAUGHT) == taught_otherwise("Qwen/Qwen3-0.6B", TAUGHT) == []


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(["go north", "take the lamp from the shelf"], 300)


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    check_policy(Qwen2Config(vocab_size=len(tokenizer)), tokenizer, TAUGHT)
    with pytest.raises(RunError, match=f"tokenizer has {len(tokenizer)} tokens and the model embeds only 100"):
        check_policy(Qwen2Config(vocab_size=100), tokenizer, TAUGHT)


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(RunError, match="no chat template"):
        check_policy(Qwen2Config(vocab_size=len(tokenizer)), tokenizer, TAUGHT)
