"""The statistics of ``benchmarks/gradient_variance.py`` on samples whose variances are known."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.imitation.policy import make_model, make_tokenizer
from verl_bpo.advantages.bpo import BPO, sibling_advantages
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.topology import ROOT, Node, Tree

FILE = Path(__file__).resolve().parents[2] / "benchmarks/gradient_variance.py"
spec = importlib.util.spec_from_file_location("gradient_variance", FILE)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def test_intervals_cover_the_truth_of_known_gaussians():
    rng, size, repeats = np.random.default_rng(0), 50, 60
    mean = np.zeros(size)
    mean[0] = 2.0
    truth = {"trace": 50.0, "mean_square": 4.0, "noise": 12.5, "direction": 1.0}
    covered, centre = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0.0)
    for _ in range(repeats):
        gradients = mean + rng.normal(size=(60, size))  # tr(C) = 50, |mu|^2 = 4
        found = module.statistics(gradients, mean + 0.5 * rng.normal(size=(60, size)))
        for key, true in truth.items():
            low, high = found[key]["interval"]
            covered[key] += low < true < high
            centre[key] += found[key]["value"] / repeats
    for key, true in truth.items():
        assert covered[key] >= 0.85 * repeats, key
        assert centre[key] == pytest.approx(true, rel=0.1), key
    # The mean gradient's plain length would count 50 / 60 of noise: 4.83.
    assert centre["mean_square"] == pytest.approx(4.0, abs=0.3)


def test_a_batch_without_gradient_counts_as_noise_and_has_no_direction():
    rng = np.random.default_rng(0)
    gradients = 1 + rng.normal(size=(20, 5))
    with_zero = np.concatenate([gradients, np.zeros((1, 5))])
    found = module.statistics(with_zero, with_zero)
    assert all(np.isfinite(row["value"]) and np.isfinite(row["interval"]).all() for row in found.values())
    assert found["noise"]["value"] > module.statistics(gradients, gradients)["noise"]["value"]


def test_the_ratio_of_noises_on_the_same_trees_is_narrow():
    rng = np.random.default_rng(0)
    common, own = rng.normal(size=(60, 40)), rng.normal(size=(60, 40))
    a, b = 0.5 + common, 0.5 + common + 0.2 * own
    found = module.noise_ratio(b, a)
    separately = [module.statistics(g, a)["noise"] for g in (b, a)]
    assert found["value"] == pytest.approx(separately[0]["value"] / separately[1]["value"])
    low, high = found["interval"]
    assert low < 1.04 < high and high - low < 0.15
    assert separately[1]["interval"][1] / separately[1]["interval"][0] > 1.3


def test_the_identity_holds_on_returns_whose_prefix_share_is_known():
    rng, n = np.random.default_rng(0), 4
    groups = []
    for _ in range(60):
        value = rng.choice([0.2, 0.8], size=200)  # Var(E[R | s]) = 0.09
        groups.append((rng.random((200, n)) < value[:, None]).astype(float))
    found = module.identity(groups, n)
    assert found["trajectory_variance"] == pytest.approx(4 / 3 * 0.25, rel=0.03)
    assert found["sibling_variance"] == pytest.approx(4 / 3 * 0.16, rel=0.03)
    assert found["reduction"] == pytest.approx(4 / 3 * 0.09, rel=0.06)
    assert found["predicted"] == pytest.approx(4 / 3 * 0.09, rel=0.06)


def small_tree() -> Tree:
    """Two root samples, one of them forked after its first turn."""
    tree = Tree(prompt_ids=[1, 2, 3])
    for parent, ids, reward in ((ROOT, [[4, 5], [6]], 1.0), (ROOT, [[7]], 0.0), (0, [[8, 9]], 0.0)):
        index = tree.add_trajectory(parent)
        for k, action in enumerate(ids):
            last = k + 1 == len(ids)
            zeros = [0.0] * len(action)
            parent = tree.add_node(
                Node(parent, index, action, zeros, zeros, [] if last else [10, 11], reward=reward * last)
            )
        tree.trajectories[index].end = "terminated"
    tree.trunk_fair[0] = True
    return tree


def test_a_batchs_gradient_is_the_mean_over_its_trees_tokens():
    torch.manual_seed(0)
    model = make_model(make_tokenizer(["a b c"], 300), hidden_size=16, layers=1, heads=2).eval()
    trees, estimators = [small_tree(), small_tree()], {"loo": BPO(), "mean": BPO(baseline="mean")}
    trees[1].nodes[-1].reward = 7.0
    found = module.batch_gradients(model, trees, estimators, windowed=False)
    total = 0
    for tree in trees:
        result = sibling_advantages(Forest.of({"0": tree}, {"0": "0"}), baseline="loo")
        for i, node in enumerate(tree.nodes):
            before = list(tree.prompt_ids)
            for j in tree.path(i)[:-1]:
                before += tree.nodes[j].action_ids + tree.nodes[j].observation_ids
            logits = model(torch.tensor([before + node.action_ids])).logits[0, len(before) - 1 : -1]
            logprob = logits.log_softmax(-1)[range(len(node.action_ids)), node.action_ids].sum()
            total = total + result.advantage[i].float() * logprob
    grads = torch.autograd.grad(total / 12, list(model.parameters()))  # 6 tokens a tree
    expected = torch.cat([g.flatten() for g in grads])
    torch.testing.assert_close(torch.from_numpy(found["loo"]), expected, rtol=1e-4, atol=1e-6)
    assert not np.allclose(found["mean"], found["loo"])
