"""What the page says about a tree."""

from itertools import product

import pytest
from fake_run import FakeRollout, small_steps, write_dump

from verl_bpo.report.analysis import TreeView
from verl_bpo.report.dump import Dump, DumpedTree
from verl_bpo.tree.record import TreeRecord
from verl_bpo.tree.topology import ROOT


def undumped(tree):
    return DumpedTree(TreeRecord(1, "u", 0, "fake", "t", tree), None)


def views(folder):
    out = [TreeView(dumped) for dumped in Dump(folder)]
    return out, {
        key: [r for v in out if v.record.key[:2] == key for r in v.roots()] for key in {v.record.key[:2] for v in out}
    }


@pytest.mark.parametrize(
    "baseline, leaf_return, trunk",
    list(product(("loo", "mean", "shrunk", "trajectory"), ("leaf", "tree_mean"), ("auto", "always", "never"))),
)
def test_the_dump_says_how_every_advantage_came_out(tmp_path, baseline, leaf_return, trunk):
    options = {"baseline": baseline, "leaf_return": leaf_return, "trunk_in_siblings": trunk}
    trees, roots = views(write_dump(tmp_path, small_steps(seed=40, count=2), **options))
    compared = 0
    for view in trees:
        why, dumped, prompt = view.comparison, view.advantages, roots[view.record.key[:2]]
        for i, head in enumerate(why.head):
            assert (why.baseline[i] is not None) == dumped.valid[i] == (why.compared[i] > 0)
            assert (view.value[i] is None) != view.usable[i]
            if not dumped.valid[i]:
                continue
            assert view.value[head] - why.baseline[i] == pytest.approx(dumped.advantage[i], abs=1e-9)
            if baseline in ("loo", "mean"):
                of_turn = [(view.value[m], why.fair[m], m == head) for m in view.siblings(view.tree.nodes[head].parent)]
                if view.tree.nodes[head].parent == ROOT:
                    of_turn = [(r.value, True, (r.session, r.node) == (view.record.session, head)) for r in prompt]
                taken = [value for value, fair, own in of_turn if fair and (baseline == "mean" or not own)]
                assert len(taken) == why.compared[i]
                assert why.baseline[i] == pytest.approx(sum(taken) / len(taken), abs=1e-9)
            compared += dumped.advantage[i] != 0
    assert compared > 50


def test_the_fake_run_has_what_the_estimators_treat_specially(dump):
    """Else the test above would prove less than it says."""
    trees, roots = views(dump)
    assert any(not t for v in trees for t in v.tree.trunk_fair.values())
    assert any(t.end == "failed" for v in trees for t in v.tree.trajectories)
    assert any(len(group) > len(v.siblings(ROOT)) for v in trees for group in [roots[v.record.key[:2]]])
    assert any(t.parent != ROOT and v.tree.trajectories[v.tree.nodes[t.parent].trajectory].parent != ROOT
               for v in trees for t in v.tree.trajectories)  # fmt: skip


def test_no_connection_crosses_another_branch():
    tree = FakeRollout(3, leaves=80, roots=3, nesting=4, turns=14, skill=0.95).tree
    view = TreeView(undumped(tree))
    rows = view.rows()
    assert sorted(rows) == list(range(len(tree.trajectories)))
    at = {row: t for t, row in enumerate(rows)}
    for fork, trajectory in enumerate(tree.trajectories):
        if trajectory.parent == ROOT:
            continue
        above = rows[tree.nodes[trajectory.parent].trajectory]
        assert above < rows[fork]
        # The vertical line from the branch point passes only branches that start at its right or on it.
        for row in range(above + 1, rows[fork]):
            assert view.depth[tree.trajectories[at[row]].start] >= view.depth[trajectory.start]


def test_a_tree_without_advantages_is_still_looked_at():
    tree = FakeRollout(1).tree
    view = TreeView(undumped(tree))
    assert view.comparison is None
    assert view.value == [view.leaf_return[node.trajectory] for node in tree.nodes]
