"""What a run says and does about trajectories that its environments lose."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_bpo.config.faults import FaultConfig
from verl_bpo.config.schema import RunError
from verl_bpo.integration.faults import LostShare
from verl_bpo.integration.tree_trainer import TreeTrainer


def test_a_step_that_loses_much_warns_and_several_in_a_row_that_lose_more_end_the_run(capsys):
    watch = LostShare(FaultConfig(warn_share=0.1, stop_share=0.4, stop_after=2))
    watch.step(1, {"crash": 0.1}, "x")
    assert capsys.readouterr().out == ""
    watch.step(2, {"crash": 0.5}, "SandboxCrashed: gone")
    watch.step(3, {"crash": 0.2, "hang": 0.1}, "SandboxCrashed: gone")
    watch.step(4, {"crash": 0.5}, "SandboxCrashed: gone")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("verl_bpo: WARNING: step ") for line in lines)
    assert "step 3 lost 30% of its trajectories to their environment (crash 20%, hang 10%)" in lines[1]
    with pytest.raises(
        RunError, match=r"step 5 lost 91% .*2 steps \(bpo.faults.stop_after\).*SandboxCrashed: gone"
    ) as e:
        watch.step(5, {"crash": 0.91}, "SandboxCrashed: gone\nfar away")
    assert "\n" not in str(e.value)


def validated(scores, lost, episodes=2):
    """A validation's metrics, by the trainer's own method and verl's, of ``episodes`` a prompt."""
    trainer = object.__new__(TreeTrainer)
    trainer.lost_share, trainer.global_steps = LostShare(FaultConfig()), 5
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"val_kwargs": {"n": episodes}}}})
    prompts = [f"p{i // episodes}" for i in range(len(scores))]
    infos = defaultdict(list, {"reward": scores, "success": scores, "task_type": ["a"] * len(scores)})
    infos["lost"] = ["crash" if gone else "" for gone in lost]
    infos["lost_to"] = ["SandboxCrashed: gone" if gone else "" for gone in lost]
    counts = {("s", prompt): episodes for prompt in prompts}
    return trainer._val_metrics_update(
        ["s"] * len(scores), prompts, infos, [3] * len(scores), expected_acc_counts=counts
    )


def test_episodes_lost_in_a_validation_are_no_failures_of_the_policy(capsys):
    """Counted as zeros they would give 0.25 here."""
    metrics = validated([1.0, 0.0, 0.0, 0.0], [False, True, True, False])
    assert metrics["val-aux/s/success/mean@2"] == metrics["val-core/s/reward/mean@2"] == 0.5
    assert metrics["val-type/s/a/success"] == 0.5 and metrics["val-type/s/a/episodes"] == 2
    assert (metrics["val-lost/episodes"], metrics["val-lost/share"]) == (2, 0.5)
    assert "validation at step 5 lost 50%" in capsys.readouterr().out
    assert not [name for name in metrics if "mean@1" in name or "lost/mean" in name]


def test_a_validation_that_loses_nothing_is_verls_own(capsys):
    metrics = validated([1.0, 0.0, 0.0, 0.0], [False] * 4)
    assert metrics["val-aux/s/success/mean@2"] == 0.25 and "val-aux/s/success/best@2/mean" in metrics
    assert (metrics["val-lost/episodes"], metrics["val-lost/share"]) == (0, 0)
    assert capsys.readouterr().out == ""


def test_a_validation_that_loses_everything_has_no_success_to_show():
    metrics = validated([0.0, 0.0], [True, True])
    assert metrics["val-lost/share"] == 1 and not [name for name in metrics if "success" in name]


def test_rows_of_lost_trees_stay_out_of_scores_and_lengths(monkeypatch):
    seen = []
    monkeypatch.setattr(
        TreeTrainer.__mro__[1], "_compute_metrics", lambda self, batch, *rest, **kw: seen.append(batch), raising=False
    )
    trainer = object.__new__(TreeTrainer)
    trainer._lost_keys = {"b_0_0"}
    batch = SimpleNamespace(
        keys=["a_0_0", "b_0_0", "pad_0_0"], tags=[{}, {}, {"is_padding": True}], partition_id="train"
    )
    trainer._compute_metrics(batch, {}, {}, global_steps=1, epoch=0)
    assert seen[0].keys == ["a_0_0", "pad_0_0"] and seen[0].tags == [{}, {"is_padding": True}]
