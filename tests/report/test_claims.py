"""The papers' claims, computed on made-up runs whose answers are known."""

import json
import math
import re

import pandas as pd
import pytest
from scipy import stats

from verl_bpo.report.claims import claims, difference, differences, noise, updates_to
from verl_bpo.report.compare import markdown, table
from verl_bpo.report.logs import Log
from verl_bpo.report.runs import load_run

SUCCESS = "val-core/textworld/success/mean@1"


def make_run(method, seed, val, estimator="bpo", seconds=10.0, norms=(1.0, 2.0, 3.0), evaluated=None, reward=None):
    """Three logged steps of two updates each."""
    frame = pd.DataFrame(
        {
            SUCCESS: val,
            "compute/updates": [0, 2, 4],
            "compute/env_steps": [0, 100, 200],
            "timing_s/step": seconds,
            "actor/grad_norm": norms,
        },
        index=pd.Index([0, 1, 2], name="step"),
    )
    record = {"environment": "world", "model": "small", "method": method, "seed": seed, "estimator": estimator}
    if evaluated is not None:
        row = {"mean": evaluated, "wilson": [0, 1], "bootstrap": [0, 1], "episodes": 10, "tasks": 5}
        record["evaluation"] = {"success": row, "task_types": {"pick": row, "look": row}}
        record["evaluation"]["reward"] = evaluated if reward is None else reward
    return load_run(method, Log(path=method, frame=frame, record=record))


def found(runs):
    return {c.what: c.ours for c in claims(runs)}


def test_seeds_are_compared_pair_by_pair():
    mine = [make_run("BPO", s, [0, 0, v]) for s, v in ((0, 0.5), (1, 0.9))]
    theirs = [make_run("GRPO", s, [0, 0, v], "grpo") for s, v in ((1, 0.8), (0, 0.4))]
    same = difference(mine, theirs, "val_last")
    assert (same.mean, same.spread, same.low, same.high) == pytest.approx((0.1, 0, 0.1, 0.1)) and same.seeds == 2
    assert math.isnan(same.p_value)  # nothing but rounding between the seeds
    other = [make_run("GRPO", s, [0, 0, v], "grpo") for s, v in ((7, 0.8), (8, 0.4))]
    apart = difference(mine, other, "val_last")
    assert (apart.mean, apart.spread) == pytest.approx((0.1, (0.08 + 0.08) ** 0.5))


def test_intervals_and_p_values_are_those_of_t_tests():
    a, b = [0.7, 0.4, 0.65, 0.5], [0.6, 0.45, 0.5, 0.4]
    mine = [make_run("BPO", s, [0, 0, v]) for s, v in enumerate(a)]
    for seeds, test in (
        ([0, 1, 2, 3], stats.ttest_rel(a, b)),
        ([None] * 4, stats.ttest_ind(a, b, equal_var=False)),
    ):
        theirs = [make_run("GRPO", s, [0, 0, v], "grpo") for s, v in zip(seeds, b)]
        found = difference(mine, theirs, "val_last")
        interval = test.confidence_interval(0.95)
        assert (found.p_value, found.low, found.high) == pytest.approx((test.pvalue, interval.low, interval.high))
    one = difference(mine[:1], theirs[:1], "val_last")
    assert one.mean == pytest.approx(0.1) and math.isnan(one.low) and math.isnan(one.p_value)


def test_every_pair_of_methods_is_listed_with_the_better_one_first():
    ends = {"BPO": [0.5, 0.4], "GRPO": [0.6, 0.55], "RLOO": [0.2, 0.3]}
    runs = [make_run(name, s, [0, 0, v]) for name, values in ends.items() for s, v in enumerate(values)]
    found = differences(runs)
    assert list(zip(found["method"], found["less"])) == [("GRPO", "BPO"), ("GRPO", "RLOO"), ("BPO", "RLOO")]
    assert found["mean"].tolist() == pytest.approx([12.5, 32.5, 20])
    assert differences(runs[:2]).empty


def test_a_graded_reward_is_compared_beside_success():
    ends = {"BPO": [(0.5, 0.7), (0.4, 0.8)], "GRPO": [(0.4, 0.5), (0.4, 0.4)]}
    runs = [
        make_run(name, s, [0, 0, 0], evaluated=success, reward=reward)
        for name, values in ends.items()
        for s, (success, reward) in enumerate(values)
    ]
    assert differences(runs)["mean"].tolist() == pytest.approx([5])
    assert differences(runs, reward=True)["mean"].tolist() == pytest.approx([30])
    assert "| reward, evaluated |" in markdown(table(runs))
    same = [make_run(r.name, r.seed, [0, 0, 0], evaluated=0.5) for r in runs]
    assert differences(same, reward=True).empty and "reward, evaluated" not in markdown(table(same))


def test_runs_of_bpo_alone_have_nothing_to_be_compared_with():
    assert claims([make_run("BPO", 0, [0, 0, 0.6])]) == []


def test_only_shared_seeds_are_compared():
    easy, hard = [0, 0, 0.9], [0, 0, 0.2]
    bpo = [make_run("BPO", s, v) for s, v in ((0, easy), (1, hard), (2, hard))]
    grpo = [make_run("GRPO", s, v, "grpo") for s, v in ((0, easy), (1, hard), (2, [0, 0, 0.1]))]
    rloo = [make_run("RLOO", 0, [0, 0, 0.8], "rloo")]
    said = {c.what: (c.ours, c.seeds) for c in claims([*bpo, *grpo, *rloo])}
    # RLOO's only seed is the easy one, where GRPO is better.
    assert said["BPO - GRPO (best baseline), success in points"] == ("+3.3 ± 5.8 [-11.0, +17.7], p = 0.42", 3)
    assert said["BPO - RLOO, success in points"] == ("+10.0", 1)
    assert said["BPO: updates to RLOO's best mean level"] == ("-6% (3.78 against 4 updates to 80.0%)", 1)


def test_noise_between_two_methods_is_the_paired_t_tests():
    ends = {"BPO": [0.7, 0.4, 0.65, 0.5], "GRPO": [0.6, 0.45, 0.5, 0.4]}
    runs = [make_run(name, s, [0, 0, v]) for name, values in ends.items() for s, v in enumerate(values)]
    found = noise(runs)
    test = stats.ttest_rel(ends["BPO"], ends["GRPO"])
    assert found.p_value == pytest.approx(test.pvalue)
    low, high = test.confidence_interval(0.95)
    assert found.least == pytest.approx((high - low) / 2)
    assert (found.methods, found.seeds) == (2, 4)


def test_noise_is_of_the_methods_that_have_all_seeds_and_of_none_else():
    ends = {"A": [0.7, 0.4], "B": [0.6, 0.5]}
    runs = [make_run(name, s, [0, 0, v]) for name, values in ends.items() for s, v in enumerate(values)]
    assert noise([*runs, make_run("C", 0, [0, 0, 0.9])]) == noise(runs)
    assert noise(runs[:2]) is None and noise(runs[:3]) is None
    same = [make_run(name, s, [0, 0, 0.5]) for name in "AB" for s in range(2)]
    assert noise(same) is None


def test_bpo_is_compared_with_the_best_baseline():
    runs = [
        make_run("BPO", 0, [0.1, 0.5, 0.6], norms=(1.0, 1.0, 4.0)),
        make_run("GRPO", 0, [0.1, 0.2, 0.3], "grpo"),
        make_run("RLOO", 0, [0.1, 0.2, 0.5], "rloo", norms=(0.0, 1.0, 2.0)),
    ]
    said = found(runs)
    assert said["BPO - RLOO (best baseline), success in points"] == "+10.0"
    assert said["BPO: updates to RLOO's best mean level"] == "-50% (2 against 4 updates to 50.0%)"
    assert said["BPO against RLOO, variance of the gradient norm over the run, relative"] == "x 0.75"  # 3/4 against 1


def test_a_level_that_is_not_reached_is_said():
    runs = [make_run("BPO", 0, [0.1, 0.2, 0.3]), make_run("GRPO", 0, [0.1, 0.2, 0.5], "grpo")]
    assert found(runs)["BPO: updates to GRPO's best mean level"].startswith("not reached (50.0%")
    assert updates_to(runs[:1], 0.2) == 2


def test_sapo_is_compared_with_ppo_and_grpo():
    runs = [
        make_run("SAPO", 0, [0, 0, 0.6], "sapo", seconds=6.0),
        make_run("PPO", 0, [0, 0, 0.5], "gae", seconds=10.0),
        make_run("GRPO", 0, [0, 0, 0.4], "grpo"),
    ]
    said = found(runs)
    assert said["SAPO - PPO, success in points"] == "+10.0" and said["SAPO - GRPO, success in points"] == "+20.0"
    assert said["SAPO against PPO, time per iteration"] == "-40.0%"


def test_evaluations_are_compared_once_all_runs_have_one():
    runs = [make_run("BPO", 0, [0, 0, 0.6], evaluated=0.9), make_run("GRPO", 0, [0, 0, 0.5], "grpo")]
    assert found(runs)["BPO - GRPO (best baseline), success in points"] == "+10.0"
    runs[1] = make_run("GRPO", 0, [0, 0, 0.5], "grpo", evaluated=0.5)
    assert found(runs)["BPO - GRPO (best baseline), success in points"] == "+40.0"
    # A run that is still going on, whose seed the other method has: no reason to go back to validation.
    ends = [make_run("BPO", 1, [0, 0, 0.1]), make_run("GRPO", 1, [0, 0, 0.8], "grpo", evaluated=0.8)]
    assert found([*runs, *ends])["BPO - GRPO (best baseline), success in points"] == "+40.0"


def test_runs_that_nothing_is_claimed_of_make_no_table():
    assert claims([make_run("mine", 0, [0, 0, 1.0], "reinforce_plus_plus")]) == []


def test_the_page_holds_everything_and_needs_nothing_beside_it(tmp_path, report):
    for method, estimator, last in (("BPO", "bpo", 0.7), ("GRPO", "grpo", 0.5)):
        for seed in range(2):
            folder = tmp_path / "runs" / method / f"seed-{seed}"
            folder.mkdir(parents=True)
            run = make_run(method, seed, [0.1, 0.3, last], estimator, evaluated=last)
            attempt = {"commit": "a" * 40, "changed_files": 1, "versions": {"verl": "0.9.1"}, "seconds": 1800}
            record = {k: v for k, v in run.record.items() if k != "evaluation"} | {"attempts": [attempt], "done": True}
            (folder / "run.json").write_text(json.dumps(record))
            (folder / "eval").mkdir()
            (folder / "eval/result.json").write_text(json.dumps(run.record["evaluation"]))
            lines = [
                {"step": s, "data": {SUCCESS: v, "compute/updates": 2 * s, "compute/env_steps": 100 * s}}
                for s, v in enumerate((0.1, 0.3, last))
            ]
            (folder / "metrics-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report("compare", tmp_path / "runs", "--out", tmp_path / "out") == 0
    page = (tmp_path / "out/index.html").read_text()
    assert not re.search(r'(?:src|href)="(?!data:)', page) and "data:image/png;base64," in page
    for said in ("world / small", "+20.0 ± 0.0", "+3.6 to +6.1", "pick", "aaaaaaaaaa + changes", "verl 0.9.1", "0.50"):
        assert said in page, said
    text = (tmp_path / "out/comparison.md").read_text()
    assert "| BPO | 2 |" in text and "0.700 ± 0.000" in text
