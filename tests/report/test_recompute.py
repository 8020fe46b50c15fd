"""Dumped advantages against recomputed ones."""

import json

import pytest
import torch
from fake_run import small_steps, write_dump

from verl_bpo.advantages import bpo
from verl_bpo.advantages.gigpo import GiGPO
from verl_bpo.report.recompute import recompute


def edit(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    "options",
    [{}, {"normalize": "batch_std", "leaf_return": "tree_mean", "weighting": "path_probability"}, {"baseline": "mean"}],
)
def test_advantages_of_a_run_match(tmp_path, report, capsys, options):
    write_dump(tmp_path, small_steps(), **options)
    assert report("recompute", tmp_path) == 0
    assert "steps match (max difference" in capsys.readouterr().out


@pytest.mark.parametrize("field, change", [("advantage", 1e-3), ("weight", 1e-3)])
def test_one_changed_number_is_found(tmp_path, report, capsys, field, change):
    write_dump(tmp_path, small_steps())

    def nudge(lines):
        lines[1][field][5] += change

    edit(tmp_path / "advantages" / "000002.jsonl", nudge)
    assert report("recompute", tmp_path) == 1
    assert [c.step for c in recompute(tmp_path) if not c.matches] == [2]
    assert "step 2: MISMATCH" in (out := capsys.readouterr().out) and "0.001" in out


def test_one_turned_mask_is_found(tmp_path):
    write_dump(tmp_path, small_steps())

    def turn(lines):
        lines[0]["valid"][0] = not lines[0]["valid"][0]

    edit(tmp_path / "advantages" / "000001.jsonl", turn)
    assert [c.matches for c in recompute(tmp_path)] == [False, True, True]


def test_a_reward_changed_in_a_tree_is_found(tmp_path):
    write_dump(tmp_path, small_steps())

    def reward(lines):
        lines[3]["tree"]["nodes"][0]["reward"] += 0.5
        lines[0]["tree"]["nodes"][-1]["reward"] += 0.5

    edit(tmp_path / "trees" / "000003-17.jsonl", reward)
    assert [c.matches for c in recompute(tmp_path)] == [True, True, False]


@pytest.mark.parametrize(
    "part, fault, options",
    [
        ("tree_means", lambda forest, fair: forest.leaf_return[forest.trajectory], {"leaf_return": "tree_mean"}),
        ("_product_along_path", lambda parent, factor: factor, {"weighting": "path_probability"}),
        ("prefix_explained_share", lambda forest: forest.reward.new_zeros(()), {"baseline": "shrunk"}),
        ("_segment_head", lambda forest, continues: torch.arange(len(continues)), {}),
    ],
)
def test_a_fault_in_the_estimator_itself_is_found(tmp_path, monkeypatch, part, fault, options):
    monkeypatch.setattr(bpo, part, fault)
    write_dump(tmp_path, small_steps(), **options)
    assert not all(check.matches for check in recompute(tmp_path))


def test_an_unreadable_or_missing_tree_is_no_match(tmp_path):
    write_dump(tmp_path, small_steps(count=2))
    trees = tmp_path / "trees"
    text = (trees / "000001-17.jsonl").read_text()
    (trees / "000001-17.jsonl").write_text(text[:-20])
    edit(trees / "000002-17.jsonl", lambda lines: lines.pop())
    first, second = recompute(tmp_path)
    assert not first.matches and "000001-17.jsonl:4" in first.problem
    assert not second.matches and second.problem == "the dump lacks 1 of 4 trees"


def test_trees_of_an_interrupted_try_are_left_out(tmp_path):
    write_dump(tmp_path, small_steps(count=1))

    def leftover(lines):
        lines.append({**lines[2], "uid": "uid-of-the-first-try"})

    edit(tmp_path / "trees" / "000001-17.jsonl", leftover)
    assert [c.matches for c in recompute(tmp_path)] == [True]


def test_a_dump_without_advantages_says_so(tmp_path):
    write_dump(tmp_path, small_steps(count=1))
    (tmp_path / "advantages" / "000001.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="adv_estimator=bpo"):
        recompute(tmp_path)


@pytest.mark.parametrize("options", [{}, {"norm": "none", "gamma": 1.0, "states": "digest"}])
def test_gigpos_advantages_are_checked_too(tmp_path, options):
    steps = small_steps(count=2)
    for tree in (tree for prompts in steps.values() for trees in prompts for tree in trees):
        for node in tree.nodes:
            node.observed, node.digest = len(tree.path(node.parent)), node.parent
    write_dump(tmp_path, steps, GiGPO(**options), "gigpo")
    assert [check.matches for check in recompute(tmp_path)] == [True, True]
    edit(
        tmp_path / "trees" / "000001-17.jsonl", lambda lines: lines[0]["tree"]["nodes"][1].update(observed=7, digest=7)
    )
    assert [check.matches for check in recompute(tmp_path)] == [False, True]


def test_an_estimator_without_a_second_definition_is_named(tmp_path, report, capsys):
    write_dump(tmp_path, small_steps(count=1), name="tree_critic")
    assert report("recompute", tmp_path) == 1
    said = capsys.readouterr().out
    assert "step 1: NOT CHECKED: of tree_critic there is no second definition, only of bpo, gigpo" in said
