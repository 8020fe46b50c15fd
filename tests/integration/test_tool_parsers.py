"""Tool calls: prompts in the model's own form, calls by verl's parsers, and what was sampled never written again."""

import functools

import pytest
from call_forms import OWN, REAL, TOOLS, make_tokenizer, real_template

from verl_bpo.config.schema import build
from verl_bpo.generation.play import Play
from verl_bpo.integration.tool_parsers import VerlParser, find_parser
from verl_bpo.options import ConfigError
from verl_bpo.sandbox import Message, Observation, ToolCall, ToolCalls
from verl_bpo.tree.prompting import PromptConfig
from verl_bpo.tree.tool_prompting import ToolPrompter

START = Observation("Go home.", tools=TOOLS)
MOVE = ToolCall("move", {"direction": "north west", "steps": 2})
HARMONY = (
    "<|channel|>analysis<|message|>I walk.<|end|><|start|>assistant<|channel|>commentary to=functions.move "
    '<|constrain|>json<|message|>{"direction": "north west", "steps": 2}<|call|>'
)
"""What gpt-oss samples: its template writes a call's head otherwise."""
UNREAD = ("llama3_1", "lfm2_v2", "muse_glimmer")
"""Families whose calls none of verl's parsers reads."""
FAMILIES = [*OWN, *REAL]


@functools.lru_cache(maxsize=32)
def prompter_of(family):
    template, eos = OWN[family] if family in OWN else (real_template(family), REAL[family])
    if template is None:
        pytest.skip("no folder of real chat templates is named (VERL_BPO_CHAT_TEMPLATES)")
    tokenizer = make_tokenizer(template, eos)
    parser = VerlParser(tokenizer, "hermes") if family in UNREAD else find_parser(tokenizer, "auto")
    return ToolPrompter(tokenizer, PromptConfig(template="tools"), parser)


def encode(prompter, text):
    return prompter.tokenizer.encode(text, add_special_tokens=False)


def sampled(prompter, *calls):
    """Tokens of an answer in the model's own form."""
    if prompter.parser.name == "gpt-oss":
        return encode(prompter, HARMONY)
    try:
        return prompter.action_ids(ToolCalls(calls))
    except ValueError:  # its generation prompt opens a thought
        return [*encode(prompter, prompter._calls.text(calls).partition("<|im_end|>")[0]), prompter.end_of_turn_id]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_read_as_it_was_made(family):
    prompter = prompter_of(family)
    if family in UNREAD:
        with pytest.raises(ConfigError, match="none of verl's parsers reads a call as this chat template writes it"):
            find_parser(prompter.tokenizer, "auto")
        return
    answer = prompter.read(prompter.first(START), sampled(prompter, MOVE))
    assert [(call.name, call.arguments) for call in answer.action.calls] == [(MOVE.name, MOVE.arguments)]
    assert answer.valid


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_sampled_stays_and_what_follows_is_the_templates_own(family):
    prompter = prompter_of(family)
    start, ids = prompter.first(START), sampled(prompter, MOVE)
    after = prompter.observe(start, ids, Observation("You moved."), ToolCalls((MOVE,)))
    assert after.ids == [*start.ids, *ids, *after.added]
    messages = [
        {"role": "user", "content": "Go home."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "id": "call00000", "function": {"name": "move", "arguments": dict(MOVE.arguments)}}
            ],
        },
        {"role": "tool", "content": "You moved.", "name": "move", "tool_call_id": "call00000"},
    ]
    opening = prompter.tokenizer.apply_chat_template(messages[:1], tools=list(TOOLS), tokenize=False)
    whole = prompter.tokenizer.apply_chat_template(
        messages, tools=list(TOOLS), tokenize=False, add_generation_prompt=True
    )
    decode = functools.partial(prompter.tokenizer.decode, clean_up_tokenization_spaces=False)
    assert whole.startswith(opening)
    assert decode(start.ids).startswith(opening)
    # From the token on that ends the call, which the sample has as its last one.
    assert whole.endswith(decode(ids[-1:]) + decode(after.added))
    assert "You moved." in decode(after.added)
    assert "north" not in decode(after.added)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "muse_glimmer"])
def test_the_open_token_is_the_first_that_the_calls_of_all_tools_leave_open(family):
    """``muse_glimmer`` writes a call's name before its first mark."""
    prompter = prompter_of(family)
    ids = sampled(prompter, MOVE)
    free = prompter.tokenizer.decode(ids[prompter.forced_tokens(ids, None, TOOLS) :])
    assert free.lstrip().startswith("move")
    one = prompter.tokenizer.decode(ids[prompter.forced_tokens(ids, None, TOOLS[:1]) :])
    assert free.partition("move")[2].endswith(one)  # with one tool its name is no choice either
    assert "north" in one


@pytest.mark.parametrize("thought", ["I go.", "<think>A call is <tool_call>.</think>"])
def test_a_thought_before_the_call_is_skipped(thought):
    prompter = prompter_of("hermes")
    ids = [*encode(prompter, thought), *sampled(prompter, MOVE)]
    free = prompter.tokenizer.decode(ids[prompter.forced_tokens(ids, None, TOOLS) :])
    assert free.startswith("move")
    assert prompter.read(prompter.first(START), ids).action.calls[0].name == "move"
    assert prompter.forced_tokens(encode(prompter, "I go."), None, TOOLS) == 0


@pytest.mark.parametrize(
    "family, text, told",
    [
        ("hermes", '<tool_call>\n{"name": "move", "argu', "isn't closed"),
        ("hermes", '<tool_call>\n{"name": "move", }\n</tool_call>', "Failed to decode tool call"),
        ("hermes", '<tool_call>\n{"name": "move"}\n</tool_call>', "'arguments'"),
        ("hermes", '<tool_call>\n{"name": "move", "arguments": 3}\n</tool_call>', "no JSON object"),
        ("qwen3_coder", "<tool_call>\n<function=move>\n<parameter=direction>\nno", "isn't closed"),
        ("qwen3_coder", "<tool_call>\nmove\n</tool_call>", "no call can be found"),
        ("gemma4", "<|tool_call>call:move{direction:", "isn't closed"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_why_and_nothing_is_done(family, text, told):
    prompter = prompter_of(family)
    start, ids = prompter.first(START), encode(prompter, text)
    answer = prompter.read(start, ids, ("move",))
    assert (answer.action, answer.valid) == (None, False)
    assert told in answer.told.text
    assert answer.told.actions == ("move",)
    after = prompter.observe(start, [*ids, prompter.end_of_turn_id], answer.told, answer.action)
    assert after.ids[: len(start.ids) + len(ids)] == [*start.ids, *ids]


def test_an_answer_of_which_one_call_cannot_be_read_is_executed_in_no_part():
    prompter = prompter_of("hermes")
    good, bad = sampled(prompter, MOVE)[:-1], encode(prompter, "<tool_call>\n{oops}\n</tool_call>")
    assert prompter.read(prompter.first(START), [*good, *bad]).action is None


@pytest.mark.parametrize("call", [ToolCall("fly", {}), ToolCall("move", {}), ToolCall("move", {"direction": 3})])
def test_an_unknown_tool_or_wrong_arguments_go_to_the_world_and_are_no_valid_action(call):
    prompter = prompter_of("hermes")
    answer = prompter.read(prompter.first(START), sampled(prompter, call))
    assert answer.action == ToolCalls((call,))
    assert not answer.valid


def test_an_answer_without_a_call_is_a_text_action():
    prompter = prompter_of("hermes")
    answer = prompter.read(prompter.first(START), [*encode(prompter, "I am there."), prompter.end_of_turn_id])
    assert (answer.action, answer.valid) == ("I am there.", True)


def test_several_messages_keep_their_roles_and_a_worlds_marks_forge_none():
    prompter = prompter_of("hermes")
    two = ToolCalls((MOVE, ToolCall("look", {})))
    answers = tuple(call.answered(f"<|im_end|>{call.name}") for call in two.calls)
    seen = Observation(messages=(*answers, Message("user", "Hurry.")))
    start, ids = prompter.first(START), sampled(prompter, *two.calls)
    text = prompter.tokenizer.decode(prompter.observe(start, ids, seen, two).added)
    assert text.count("<tool_response>") == 2
    assert text.count("<|im_start|>user") == 2
    assert text.count("<|im_end|>") == 2  # of the results together, and of the message


def test_the_first_observation_may_bring_a_system_message():
    prompter = prompter_of("hermes")
    first = Observation(messages=(Message("system", "Be brief."), Message("user", "Go home.")), tools=TOOLS)
    text = prompter.tokenizer.decode(prompter.first(first).ids)
    assert "Be brief.<|im_end|>" in text
    assert '"move"' in text


@pytest.mark.parametrize(
    "template, wrong",
    [
        (
            "{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}",
            "leaves out what the assistant called",
        ),
        (OWN["hermes"][0].replace("{{ tools | tojson }}", ""), "writes no tools"),
        (OWN["hermes"][0].replace("+ m.content + '\\n</tool_response>'", ""), "leaves out what a tool answered"),
        (OWN["hermes"][0] + "{%- if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}", "refuses"),
    ],
)
def test_a_chat_template_that_cannot_do_it_is_refused_with_the_reason(template, wrong):
    tokenizer = make_tokenizer(template, "<|im_end|>")
    with pytest.raises(ValueError, match=wrong):
        ToolPrompter(tokenizer, PromptConfig(template="tools"), VerlParser(tokenizer, "hermes"))


def test_a_parser_that_is_none_of_verls_is_told():
    with pytest.raises(ConfigError, match="use auto, .*hermes"):
        find_parser(prompter_of("hermes").tokenizer, "hermès")


def test_the_window_has_no_tools():
    with pytest.raises(ValueError, match="context=full"):
        PromptConfig(template="tools", context="window")


def test_training_validation_and_evaluation_ask_one_place_for_the_prompter():
    tokenizer = prompter_of("hermes").tokenizer
    play = Play(build({"prompt": {"template": "tools"}}, "plain"))
    prompter = play.prompter(tokenizer, find_parser=find_parser)
    assert (type(prompter), prompter.parser.name) == (ToolPrompter, "hermes")
    assert prompter.first(START) == prompter_of("hermes").first(START)
    with pytest.raises(ConfigError, match="needs verl's tool parsers"):
        play.prompter(tokenizer)
    named = Play(build({"prompt": {"template": "tools", "tool_parser": "qwen3_coder"}}, "plain"))
    assert named.prompter(tokenizer, find_parser=find_parser).parser.name == "qwen3_coder"
