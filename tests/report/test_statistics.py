"""Differences between methods and their noise, on made-up runs whose answers are known."""

import math

import pytest
from scipy import stats
from seeded_runs import make_run

from verl_bpo.report.statistics import difference, differences, noise
from verl_bpo.report.table import markdown, table


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
