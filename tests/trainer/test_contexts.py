"""The same tree trained as one row a leaf (``full``) and as one row a turn (``window``)."""

from types import SimpleNamespace

import pytest
import torch

from verl_bpo.config.schema import build
from verl_bpo.rollout.rows import topology, tree_rows
from verl_bpo.trainer.forest import build_batch
from verl_bpo.trainer.sapo_trainer import SAPOTrainer
from verl_bpo.trainer.tree_trainer import RowSpans, TreeTrainer
from verl_bpo.tree.topology import ROOT, Node, Tree


def nested_tree() -> Tree:
    """Two root samples; two forks after turn 0, one of which was lost; one fork of a fork. Actions of 1 to 3 tokens."""
    tree, number = Tree(prompt_ids=[1, 2]), 0

    def roll(parent: int, rewards: list[float], end: str = "terminated") -> None:
        nonlocal number
        index = tree.add_trajectory(parent)
        for reward in rewards:
            number += 1
            length = 1 + number % 3
            node = Node(parent, index, [number] * length, [-0.5] * length, [1.0] * length, [90, 91], reward=reward)
            node.prompt_ids = [1, 2, 80 + number]
            parent = tree.add_node(node)
        tree.trajectories[index].end = end

    roll(ROOT, [0.0, 0.2, 1.0])
    roll(ROOT, [0.1, 0.0])
    roll(0, [0.0, 0.7])
    roll(0, [0.3], "failed")
    roll(5, [0.4], "truncated")
    return tree


def per_turn(kind: type, windowed: bool, config) -> dict[str, list[list[float]]]:
    """What a trainer mode puts on the tokens of every turn, by name and turn."""
    tree = nested_tree()
    rows = tree_rows(tree, windowed)
    spans = [RowSpans(torch.tensor(r.response_mask), r.nodes, r.starts, r.ends) for r in rows]
    record = {"topology": topology(tree), "counters": {}, "failures": [], "scores": []}
    trainer = object.__new__(kind)
    trainer.bpo, trainer.global_steps = config, 1
    estimator = "sapo" if kind is SAPOTrainer else "bpo"
    trainer.config = SimpleNamespace(algorithm=SimpleNamespace(adv_estimator=estimator))
    found = {}
    trainer._put = lambda batch, masks, metrics, **values: found.update(values, mask=[m.float() for m in masks])
    value = torch.randn(2, len(tree.nodes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    trainer._read = [[span.spread(x) for span in spans] for x in value]
    trees = build_batch({"p_0": record}, {"p_0": "p"})
    trainer._turn_advantage(SimpleNamespace(keys=["p_0_0"] * len(rows)), trees, spans, ["p"] * len(rows), {})
    out = {}
    for name, tokens in found.items():
        turns = [[] for _ in tree.nodes]
        for span, row in zip(spans, tokens):
            assert not row[span.mask == 0].any()
            for node, start, end in zip(span.nodes, span.starts, span.ends):
                turns[node] += row[start:end].tolist()
        out[name] = turns
    return out


@pytest.mark.parametrize("leaf_return", ["leaf", "tree_mean"])
@pytest.mark.parametrize("weighting", ["uniform", "path_probability"])
def test_bpo_gives_a_turn_the_same_advantage_in_both_contexts(leaf_return, weighting):
    config = build({"advantage": {"leaf_return": leaf_return, "weighting": weighting}}, "paper")
    full, window = (per_turn(TreeTrainer, windowed, config) for windowed in (False, True))
    assert full == window
    assert any(x for turn in full["advantages"] for x in turn)


@pytest.mark.parametrize("truncation", ["terminal", "bootstrap"])
def test_sapo_gives_a_turn_the_same_advantage_and_targets_in_both_contexts(truncation):
    config = build({"sapo": {"truncation": truncation}}, "plain")
    full, window = (per_turn(SAPOTrainer, windowed, config) for windowed in (False, True))
    assert full == window
    assert any(x for turn in full["advantages"] for x in turn)


def test_every_usable_turn_is_trained_exactly_once_in_both_contexts():
    tree = nested_tree()
    usable = [i for i, node in enumerate(tree.nodes) if tree.trajectories[node.trajectory].usable]
    for windowed in (False, True):
        assert sorted(node for row in tree_rows(tree, windowed) for node in row.nodes) == usable
