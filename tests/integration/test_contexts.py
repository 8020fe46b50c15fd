"""The same tree trained as one row a leaf (``full``) and as one row a turn (``window``)."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import trainer_base

from verl_bpo.advantages.bpo import sibling_advantages
from verl_bpo.config.schema import RunError, build
from verl_bpo.integration import stock_advantages as joined_rows
from verl_bpo.integration import tree_trainer
from verl_bpo.integration.agent_loop import TreeAgentLoop
from verl_bpo.integration.sapo_trainer import SAPOTrainer
from verl_bpo.integration.tree_trainer import TreeTrainer
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.record import AdvantageRecord
from verl_bpo.tree.rows import tree_rows
from verl_bpo.tree.topology import ROOT, Failure, Node, Tree
from verl_bpo.tree.trajectories import Trajectories


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
    spans = [row.spans for row in rows]
    trainer = object.__new__(kind)
    trainer.bpo, trainer.global_steps = config, 1
    trainer.estimator = config.sapo if kind is SAPOTrainer else config.advantage
    trainer.config = SimpleNamespace(algorithm={})
    found = {}
    trainer._put = lambda batch, masks, metrics, **values: found.update(values, mask=[m.float() for m in masks])
    value = torch.randn(2, len(tree.nodes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    trainer._read = [[span.spread(x) for span in spans] for x in value]
    trees = Forest.of({"p_0": tree}, {"p_0": "p"})
    trainer._turn_advantage(SimpleNamespace(keys=["p_0_0"] * len(rows)), trees, spans, ["p"] * len(rows), {})
    out = {}
    for name, tokens in found.items():
        turns = [[] for _ in tree.nodes]
        for span, row in zip(spans, tokens):
            assert not row[span.mask() == 0].any()
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
        assert sorted(node for row in tree_rows(tree, windowed) for node in row.spans.nodes) == usable


def trajectories_of_two_prompts() -> dict[str, Tree]:
    """Independent trajectories as verl's estimators take them, by session: three of one prompt, two of another, of 1 to 4
    turns each."""
    generator = torch.Generator().manual_seed(1)
    trees = {}
    for session, (turns, reward) in {
        "a_0": (1, 1.0), "a_1": (4, 0.0), "a_2": (2, 0.5), "b_0": (3, 1.0), "b_1": (2, 0.25),
    }.items():  # fmt: skip
        tree, parent = Tree(prompt_ids=[1, 2]), ROOT
        index = tree.add_trajectory(ROOT)
        for turn in range(turns):
            length = int(torch.randint(1, 4, (), generator=generator))
            node = Node(parent, index, [7] * length, [-0.5] * length, [1.0] * length, [90, 91], reward=0.0)
            node.prompt_ids, node.reward = [1, 2, 80 + turn], reward if turn == turns - 1 else 0.0
            parent = tree.add_node(node)
        tree.trajectories[index].end = "terminated"
        trees[session] = tree
    return trees


class FakeQueue:
    """Stands for TransferQueue: one batch's fields, in memory."""

    def __init__(self, fields: dict) -> None:
        self.fields = fields

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        found = {name: self.fields[name] for name in select_fields if name in self.fields}
        return TensorDict(found, batch_size=len(keys))

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> None:
        self.fields |= dict(fields.items())


def stock_advantages(windowed: bool, monkeypatch, **algorithm) -> dict[str, list[float]]:
    """What the trainer puts on the tokens of every turn of every session with one of verl's estimators. Values and log-probs
    belong to tokens, so that they are the same in both contexts."""
    names = ("response_mask", "rm_scores", "values", "old_log_probs", "ref_log_prob")
    noise, keys, places, columns = torch.Generator().manual_seed(2), [], [], {name: [] for name in names}
    for session, tree in trajectories_of_two_prompts().items():
        drawn = torch.randn(3, len(tree.nodes), 3, generator=noise)
        for i, row in enumerate(tree_rows(tree, windowed)):
            keys.append(f"{session}_{i}")
            places.append((session, row))
            mask, scores = torch.tensor(row.response_mask), torch.zeros(len(row.response_mask))
            scores[-1] = tree.trajectory_return(tree.trajectories[0])
            columns["response_mask"].append(mask)
            columns["rm_scores"].append(scores)
            for name, per_turn_values in zip(names[2:], drawn):
                column = torch.full((len(mask),), 9.0)  # on observations: must not matter
                for node, start, end in zip(row.spans.nodes, row.spans.starts, row.spans.ends):
                    column[start:end] = per_turn_values[node, : end - start]
                columns[name].append(column)
    fields = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
    uids = [key[0] for key in keys]
    queue = FakeQueue(fields | {"uid": NonTensorStack(*uids)})
    monkeypatch.setattr(tree_trainer, "tq", queue)
    monkeypatch.setattr(joined_rows, "tq", queue)
    monkeypatch.setattr(trainer_base, "tq", queue)
    trainer = object.__new__(TreeTrainer)
    trainer.bpo = build({"prompt": {"context": "window" if windowed else "full"}}, "plain")
    settings = {"gamma": 0.99, "lam": 1.0, "use_kl_in_reward": False, "kl_penalty": "kl", **algorithm}
    trainer.config = OmegaConf.create({"algorithm": settings, "actor_rollout_ref": {"rollout": {"n": 1}}})
    trainer.kl_ctrl_in_reward = core_algos.FixedKLController(0.1)
    batch = KVBatchMeta(keys=keys, partition_id="train", tags=[{}] * len(keys))
    trainer._stock_advantage(batch, uids, [{"row": row.spans.to_dict()} for _, row in places], {})
    turns = {}
    for name in ("advantages", "returns"):
        for (session, row), tokens in zip(places, queue.fields[name].unbind()):
            for node, start, end in zip(row.spans.nodes, row.spans.starts, row.spans.ends):
                turns[f"{name} {session} {node}"] = tokens[start:end].tolist()
    return turns


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("use_kl_in_reward", [False, True])
@pytest.mark.parametrize(
    ("estimator", "lam"), [("grpo", 1.0), ("rloo", 1.0), ("gae", 1.0), ("gae", 0.9), ("reinforce_plus_plus", 1.0)]
)
def test_verls_estimators_give_a_turn_the_same_advantage_in_both_contexts(
    estimator, lam, use_kl_in_reward, monkeypatch
):
    full, window = (
        stock_advantages(windowed, monkeypatch, adv_estimator=estimator, lam=lam, use_kl_in_reward=use_kl_in_reward)
        for windowed in (False, True)
    )
    assert full.keys() == window.keys()
    for turn, tokens in full.items():
        assert window[turn] == pytest.approx(tokens, abs=1e-6), turn
    assert any(x for tokens in full.values() for x in tokens)


def test_rloo_leaves_a_whole_trajectory_out_of_its_baseline_in_window_context(monkeypatch):
    """By hand: the others' mean of prompt b's two trajectories (returns 1 and 0.25) is the other one's return."""
    turns = stock_advantages(True, monkeypatch, adv_estimator="rloo")
    for session, turn_count, expected in (("b_0", 3, 0.75), ("b_1", 2, -0.75), ("a_1", 4, -0.75)):
        for node in range(turn_count):
            tokens = turns[f"advantages {session} {node}"]
            assert tokens == pytest.approx([expected] * len(tokens))


def test_rows_are_joined_by_their_number_and_split_back_in_their_own_order():
    trajectories = Trajectories(["u_0_1", "v_0_0", "u_0_0", "u_0_10", "u_0_2"], [1, 2, 3, 1, 2])
    values = torch.arange(15.0).reshape(5, 3)
    joined = trajectories.join(values)
    assert joined.tolist() == [[6, 7, 8, 0, 12, 13, 9], [3, 4, 0, 0, 0, 0, 0]]
    assert trajectories.last == [3, 1]
    assert [tokens.tolist() for tokens in trajectories.split(joined)] == [[0], [3, 4], [6, 7, 8], [9], [12, 13]]


def travel(tree: Tree) -> list:
    """What the agent loop hands to verl for a tree."""
    loop = object.__new__(TreeAgentLoop)
    loop.prompter, loop.tokenizer = SimpleNamespace(windowed=False), SimpleNamespace(eos_token_id=2)
    return loop._outputs(SimpleNamespace(versions={1}), tree)


def test_a_tree_travels_with_its_first_row_and_padding_trains_nothing(monkeypatch, tmp_path):
    """From the agent loop's output through JSON to the trainer, which finds in it what the whole tree says."""
    tree, lost = (
        nested_tree(),
        Tree(prompt_ids=[], counters={"failed": 1}, failures=[Failure("SandboxCrashed", "gone")]),
    )
    outputs = {f"p_0_{i}": out for i, out in enumerate(travel(tree))} | {"q_0_0": travel(lost)[0]}
    outputs["pad_0_0"] = outputs["p_0_0"]  # verl's padding rows copy the first row's fields, and have one token
    masks = [torch.tensor(out.response_mask) for out in outputs.values()]
    masks[-1] = torch.zeros(1, dtype=torch.int64)
    fields = {
        "uid": NonTensorStack(*[key[0] for key in outputs]),
        "response_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged),
        "extra_fields": NonTensorStack(*[json.loads(json.dumps(out.extra_fields)) for out in outputs.values()]),
    }
    monkeypatch.setattr(tree_trainer, "tq", FakeQueue(fields))
    trainer = object.__new__(TreeTrainer)
    trainer.bpo, trainer.global_steps, trainer.totals = build({"dump_dir": str(tmp_path)}, "paper"), 3, Counter()
    trainer.estimator = trainer.bpo.advantage
    trainer.lost_share, trainer._lost_keys = tree_trainer.LostShare(trainer.bpo.faults), set()
    trainer.config = SimpleNamespace(algorithm=SimpleNamespace(adv_estimator="bpo"))
    trainer.memory, trainer._told_blind = None, True
    found = {}
    trainer._put = lambda batch, masks, metrics, **values: found.update(values, masks=masks)
    tags = [{"is_padding": key == "pad_0_0"} for key in outputs]
    batch = KVBatchMeta(keys=list(outputs), partition_id="train", tags=tags)
    trainer._stop_if_hopeless(batch)
    trainer._compute_advantage(batch, metrics := {})
    expected = sibling_advantages(Forest.of({"p_0": tree}, {"p_0": "p"}))
    for row, mask, advantage in zip(tree_rows(tree), found["masks"], found["advantages"]):
        assert mask.tolist() == row.spans.spread(expected.valid.long()).tolist()
        assert advantage.tolist() == row.spans.spread(expected.advantage).tolist()
    assert not any(mask.any() for mask in found["masks"][-2:])
    assert (metrics["tree/trees"], metrics["tree/failed_branches"], metrics["tree/padding_rows"]) == (2, 1, 1)
    (own, none) = [json.loads(line) for line in (tmp_path / "advantages" / "000003.jsonl").read_text().splitlines()]
    assert AdvantageRecord.from_dict(own).advantage == expected.advantage.tolist() and none["advantage"] == []
    with pytest.raises(RunError, match="no such task"):
        fields["extra_fields"] = NonTensorStack(*[out.extra_fields for out in travel(Tree([], fatal="no such task"))])
        monkeypatch.setattr(tree_trainer, "tq", FakeQueue(fields))
        trainer._stop_if_hopeless(KVBatchMeta(keys=["q_0_0"], partition_id="train", tags=[{}]))
