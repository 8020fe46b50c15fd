"""Whatever comes in, an error is one of ours, in one line: configs, answers of models and worlds, trees, dumps."""

import json
import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from recipes.imitation.policy import make_tokenizer
from verl_bpo.config.reference import table
from verl_bpo.config.schema import build
from verl_bpo.integration import checks
from verl_bpo.options import ConfigError
from verl_bpo.report.dump import Dump
from verl_bpo.report.trees import write_page
from verl_bpo.sandbox.answers import received
from verl_bpo.sandbox.base import Observation, SandboxError
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.metrics import tree_metrics
from verl_bpo.tree.prompting import PromptConfig, Prompter
from verl_bpo.tree.rows import tree_rows
from verl_bpo.tree.topology import ROOT, Node, Tree

few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
number = st.integers(-3, 3) | st.floats(allow_nan=True) | st.sampled_from([0, -1, 10**30, float("inf")])
value = (
    st.none() | st.booleans() | number | st.text(max_size=6) | st.lists(st.integers(), max_size=2) | st.just({"x": 1})
)

BPO_KEYS = [row[0].removeprefix("bpo.") for row in table()]
VERL_KEYS = [*checks.AT_LEAST_ONE, *checks.WITHIN, *checks.WHOLE, *checks.NEEDED, *checks.FLAGS, *checks.CHOICES]


def one_line(error: Exception) -> None:
    assert str(error) and "\n" not in str(error), repr(str(error))


@few
@given(st.dictionaries(st.sampled_from(BPO_KEYS), value, min_size=1, max_size=3), st.sampled_from(["plain", "paper"]))
def test_any_value_of_any_key_of_ours_is_taken_or_refused_by_name(given_values, preset):
    config = OmegaConf.create({})
    for key, wanted in given_values.items():
        try:
            OmegaConf.update(config, key, wanted, force_add=True)
        except Exception:
            return  # OmegaConf's own: a group under a plain value
    try:
        build(OmegaConf.to_container(config), preset)
    except ConfigError as error:
        one_line(error)


@few
@given(st.dictionaries(st.sampled_from(VERL_KEYS), value, min_size=1, max_size=3))
def test_any_value_of_a_checked_key_of_verls_is_taken_or_refused_by_name(given_values):
    config = OmegaConf.create({})
    for key, wanted in given_values.items():
        OmegaConf.update(config, key, wanted, force_add=True)
    try:
        checks.check_numbers(config)
    except ConfigError as error:
        one_line(error)


TOKENIZER = make_tokenizer(["guess 1 guess 2 <action> </action> <think>"], 300)
pieces = st.lists(
    st.sampled_from(["<action>", "</action>", "<think>", "</think>", "\n", "guess 1", "search[", "]", "\ud800", " "])
    | st.text(max_size=4),
    max_size=12,
).map("".join)


@few
@given(pieces, st.sampled_from(["bare", "think_action"]), st.none() | st.lists(pieces, max_size=4).map(tuple))
def test_any_answer_of_a_model_is_an_action_or_none(text, template, admissible):
    prompter = Prompter(TOKENIZER, PromptConfig(template=template), {}, set())
    action, valid = prompter.parse(text, admissible)
    assert action is not None or not valid
    assert prompter.no_action(text, admissible).reward == 0


anything = value | st.binary(max_size=4) | st.sampled_from(["\ud800", float("nan"), object(), {1: object()}, (1,)])


@few
@given(anything, anything, anything, anything, anything, anything)
def test_any_answer_of_a_world_is_an_observation_or_loses_its_branch(
    text, reward, terminated, truncated, actions, info
):
    try:
        answer = received(Observation(text, reward, terminated, truncated, actions, info))
    except SandboxError as error:
        return one_line(error)
    json.dumps([answer.text, answer.reward, answer.actions]).encode()


@st.composite
def trees(draw) -> Tree:
    """Trees as rollouts leave them: trunks, forks at any turn, trajectories lost at any turn, and some without one."""
    tree = Tree(prompt_ids=[1, 2])
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(ROOT, len(tree.nodes) - 1))
        index = tree.add_trajectory(at)
        parent = at
        for _ in range(draw(st.integers(0, 3))):
            tokens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
            parent = tree.add_node(
                Node(parent, index, tokens, [-0.5] * len(tokens), [0.1] * len(tokens), reward=draw(st.floats(-2, 2)))
            )
            tree.nodes[parent].observation_ids = draw(st.lists(st.integers(0, 9), max_size=2))
        ends = ["failed", "terminated", "truncated"] if parent != at else ["failed"]
        tree.trajectories[index].end = draw(st.sampled_from(ends))
        if tree.trajectories[index].end != "failed":
            tree.nodes[parent].observation_ids = []
    return tree


@few
@given(st.lists(trees(), min_size=1, max_size=3))
def test_trees_of_any_shape_become_rows_and_metrics_and_come_back_from_a_dump(shapes):
    found = {f"p{i}_0": Tree.from_dict(json.loads(json.dumps(tree.to_dict()))) for i, tree in enumerate(shapes)}
    assert list(found.values()) == shapes
    metrics = tree_metrics(Forest.of(found, {session: session[:-2] for session in found}))
    assert 0 <= metrics["tree/lost_share"] <= 1 and all(value == value for value in metrics.values())
    for tree in shapes:
        rows = tree_rows(tree, False)
        trained = sorted(node for row in rows for node in row.spans.nodes)
        assert trained == sorted(set(trained)), "no turn is trained twice"


@few
@given(trees(), st.data())
def test_any_dump_file_is_shown_or_refused_in_one_line(tree, data):
    """A line cut anywhere, a value of another type anywhere, or no JSON at all."""
    line = {"step": 1, "uid": "u", "session": 0, "env": "e", "task": "t", "tree": tree.to_dict()}
    places = _places(line)
    for place in data.draw(st.lists(st.sampled_from(places), max_size=2)):
        _put(line, place, data.draw(value))
    text = json.dumps(line)
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trees").mkdir()
        (Path(folder) / "trees" / "000001-1.jsonl").write_text(
            text + data.draw(st.sampled_from(["", "\n", "\n[]\n7\n"]))
        )
        try:
            write_page(Dump(folder), os.path.join(folder, "page.html"), 5)
        except (ValueError, FileNotFoundError) as error:
            one_line(error)


def _places(value, path=()):
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


def _put(value, path, wanted):
    try:
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = wanted
    except (TypeError, KeyError, IndexError):
        pass  # an earlier change took the place away
