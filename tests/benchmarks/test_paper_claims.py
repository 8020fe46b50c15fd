"""The papers' claims beside made-up runs whose answers are known, and the page that shows them."""

import re

from seeded_runs import make_run, write_study

from benchmarks.paper.claims import claims, updates_to
from benchmarks.paper.report import main


def found(runs):
    return {c.what: c.ours for c in claims(runs)}


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


def test_the_page_of_a_study_holds_everything_and_needs_nothing_beside_it(tmp_path):
    write_study(tmp_path / "runs")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/index.html").read_text()
    assert not re.search(r'(?:src|href)="(?!data:)', page) and "data:image/png;base64," in page
    for said in ("world / small", "+20.0 ± 0.0", "+3.6 to +6.1", "pick", "aaaaaaaaaa + changes", "verl 0.9.1", "0.50"):
        assert said in page, said
    text = (tmp_path / "out/comparison.md").read_text()
    assert "| BPO | 2 |" in text and "0.700 ± 0.000" in text
