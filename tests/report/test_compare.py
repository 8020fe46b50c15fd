"""Comparison tables and curves."""

import csv
import json

import pytest
from seeded_runs import write_study

from verl_bpo.report.logs import find_logs, read_metrics
from verl_bpo.report.runs import load_run as load
from verl_bpo.report.runs import mean_curve, validation_columns
from verl_bpo.report.table import table

SUCCESS = "val-aux/textworld/success/mean@1"


def load_run(name, path):
    (log,) = find_logs(path)
    return load(name, log)


def write_metrics(path, steps=6, val=(0.1, 0.4, 0.7), env_steps=100, grad_norms=None, extra=None):
    """What verl's file logger writes: one line a step, validation every third step and before training."""
    lines = [
        {"step": 0, "data": {SUCCESS: val[0], "val-core/textworld/reward/mean@1": 0.9, "val-aux/num_turns/mean": 7.0}}
    ]
    for step in range(1, steps + 1):
        data = {
            "tree/success": 0.1 * step,
            "actor/grad_norm": grad_norms[step - 1] if grad_norms else 1.0,
            "timing_s/step": 1800.0,
            "compute/env_steps": env_steps * step,
            "compute/generated_tokens": 1000 * step,
            "compute/prefill_tokens": 100 * step,
            "compute/cached_tokens": 300 * step,
            "compute/updates": 2 * step,
            **(extra or {}),
        }
        if step % 3 == 0:
            data[SUCCESS] = val[step // 3]
        lines.append({"step": step, "data": data})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_runs_numbers_are_those_of_its_log(tmp_path):
    run = load_run("bpo", write_metrics(tmp_path / "m.jsonl", grad_norms=[1, 1, 1, 3, 3, 3]))
    assert run.metric == SUCCESS
    assert (run.totals["val_first"], run.totals["val_last"]) == (0.1, 0.7)
    assert run.totals["env_steps"] == 600 and run.totals["generated_tokens"] == 6000 and run.totals["updates"] == 12
    assert run.totals["prefill_tokens"] == 600 and run.totals["cached_share"] == 0.75
    assert run.totals["hours"] == 3.0
    assert run.totals["grad_norm_mean"] == 2.0
    assert run.totals["grad_norm_relative_variance"] == pytest.approx(1.2 / 4)  # sample variance of 1,1,1,3,3,3 over 2²


def test_curves_start_at_no_cost_and_run_against_cumulative_cost(tmp_path):
    curve = load_run("bpo", write_metrics(tmp_path / "m.jsonl")).curve
    val = curve[curve["val"].notna()]
    assert val["env_steps"].tolist() == [0, 300, 600]
    assert val["hours"].tolist() == [0, 1.5, 3.0]


def test_success_is_preferred_then_accuracy_then_reward_over_all_sources(tmp_path):
    frame = read_metrics(write_metrics(tmp_path / "m.jsonl", extra={"val-aux/alfworld/a/b/success/mean@4": 0.5}))
    assert validation_columns(frame) == [SUCCESS, "val-aux/alfworld/a/b/success/mean@4"]
    frame = frame.drop(columns=validation_columns(frame))
    assert validation_columns(frame) == ["val-core/textworld/reward/mean@1"]
    frame["val-core/textworld/acc/mean@1"] = 0.5
    assert validation_columns(frame) == ["val-core/textworld/acc/mean@1"]
    assert validation_columns(frame, "val-aux/num_turns/mean") == ["val-aux/num_turns/mean"]


def test_seeds_of_one_name_give_mean_and_spread(tmp_path):
    runs = [
        load_run("bpo", write_metrics(tmp_path / "0.jsonl", val=(0.1, 0.4, 0.6), env_steps=100)),
        load_run("bpo", write_metrics(tmp_path / "1.jsonl", val=(0.1, 0.6, 0.8), env_steps=140)),
        load_run("rloo", write_metrics(tmp_path / "2.jsonl")),
    ]
    numbers = table(runs)
    assert numbers.loc["bpo", "seeds"] == 2 and numbers.loc["bpo", "val_last"] == pytest.approx(0.7)
    assert numbers.loc["bpo", "val_last_std"] == pytest.approx(0.02**0.5)
    assert numbers.loc["rloo"].isna()["val_last_std"]
    curve = mean_curve(runs[:2], "val", "updates")
    assert curve["mean"].tolist() == pytest.approx([0.1, 0.5, 0.7])
    assert curve.index.tolist() == [0, 6, 12]
    assert (curve["high"] - curve["mean"]).tolist() == pytest.approx([0, 0.02**0.5, 0.02**0.5])


def test_a_mean_curve_reads_seeds_off_between_their_points_and_ends_where_the_first_seed_ends(tmp_path):
    runs = [
        load_run("bpo", write_metrics(tmp_path / "0.jsonl", val=(0.0, 0.3, 0.6), env_steps=100)),  # at 0, 300, 600
        load_run("bpo", write_metrics(tmp_path / "1.jsonl", val=(0.0, 0.4, 0.8), env_steps=80)),  # at 0, 240, 480
    ]
    curve = mean_curve(runs, "val", "env_steps")
    assert curve.index.tolist() == [0, 240, 300, 480]
    assert curve["mean"].tolist() == pytest.approx([0, (0.24 + 0.4) / 2, (0.3 + 0.5) / 2, (0.48 + 0.8) / 2])
    assert mean_curve(runs, "val", "hours").index.tolist() == [0, 1.5, 3.0]


def test_command_writes_table_and_curves(tmp_path, report, capsys):
    files = [write_metrics(tmp_path / f"{i}.jsonl") for i in range(3)]
    out = tmp_path / "out"
    assert report("compare", f"bpo={files[0]}", f"bpo={files[1]}", f"rloo={files[2]}", "--out", out) == 0
    printed = capsys.readouterr().out
    assert (out / "comparison.md").read_text() in printed
    assert "| rloo | 1 | 6 | 0.100 → 0.700 |" in printed
    rows = {r["run"]: r for r in csv.DictReader((out / "comparison.csv").open())}
    assert float(rows["rloo"]["env_steps"]) == 600 and rows["rloo"]["env_steps_std"] == ""
    for picture in ("curves.png", "ends.png"):
        assert (out / picture).read_bytes()[:4] == b"\x89PNG"


def test_a_run_of_another_trainer_leaves_its_costs_blank(tmp_path, report, capsys):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": s, "data": {SUCCESS: 0.1 * s}}) + "\n" for s in range(3)))
    assert report("compare", f"ppo={path}", "--out", tmp_path) == 0
    assert "| ppo | 1 | 2 | 0.000 → 0.200 | 0.200 | – | – | – | – | – | – | – | – | – | – |" in capsys.readouterr().out


def test_a_half_written_last_line_is_left_out(tmp_path):
    path = write_metrics(tmp_path / "m.jsonl")
    whole = read_metrics(path)
    with open(path, "a") as file:
        file.write('{"step": 7, "data": {"tree/succ')
    assert read_metrics(path).equals(whole)


def test_what_is_missing_is_named_in_one_line(tmp_path, report):
    good, empty = write_metrics(tmp_path / "m.jsonl"), tmp_path / "empty.jsonl"
    empty.write_text("")
    novel = tmp_path / "no_validation.jsonl"
    novel.write_text('{"step": 1, "data": {"actor/loss": 0.5}}\n')
    for arguments, error, said in (
        ([f"a={tmp_path / 'none.jsonl'}"], FileNotFoundError, "none.jsonl does not exist"),
        ([f"a={empty}"], ValueError, "empty.jsonl holds no metrics"),
        ([f"a={novel}"], ValueError, "no validation success was logged.*trainer.test_freq.*actor/loss"),
        ([f"a={good}", "--metric", "val-aux/nope/success/mean@1"], ValueError, "no metric 'val-aux/nope.*num_turns"),
        ([f"={good}"], ValueError, "is not NAME=PATH"),
    ):
        with pytest.raises(error, match=said) as caught:
            report("compare", *arguments, "--out", tmp_path / "out")
        assert "\n" not in str(caught.value)


def test_the_papers_claims_are_no_part_of_a_comparison(tmp_path, report):
    write_study(tmp_path / "runs")
    assert report("compare", tmp_path / "runs", "--out", tmp_path / "out") == 0
    (difference,) = csv.DictReader((tmp_path / "out/differences.csv").open())
    assert float(difference["mean"]) == pytest.approx(20)
    page = (tmp_path / "out/index.html").read_text()
    assert "| BPO | 2 |" in (tmp_path / "out/comparison.md").read_text()
    assert "+3.6 to +6.1" not in page and "claim" not in page
