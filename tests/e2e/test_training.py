"""The real thing: verl's trainer, Ray, TransferQueue, FSDP2, the transformers replica, real sandboxes. No fakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from verl_bpo.commands.dry_run import dry_run
from verl_bpo.commands.evaluation.options import options_from
from verl_bpo.tree.rows import tree_rows
from verl_bpo.tree.topology import Tree

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = ("--config-dir", str(REPOSITORY / "recipes/quickstart"), "--config-name", "quickstart")


def warm_start(games: Path, out: Path, steps: int) -> None:
    command = [
        sys.executable, str(REPOSITORY / "recipes/imitation/train.py"),
        "--out", str(out), "--data", str(games), "--hidden-size", "64",
        "--layers", "2", "--heads", "2", "--steps", str(steps), "--held-out", "2", "--check-every", str(steps),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]


def train(root: Path, name: str, *overrides: str) -> list[dict]:
    """Run the trainer as a user does; returns the metrics of every step."""
    log = root / f"{name}.jsonl"
    command = [
        sys.executable, "-m", "verl_bpo.integration.main", *QUICKSTART, f"root={root}", f"name={name}",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "actor_rollout_ref.actor.entropy_coeff=0.01", "bpo.env.max_turns=4", *overrides,
    ]  # fmt: skip
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(log), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=REPOSITORY)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def assert_same_policy_in_engine_and_trainer(steps: list[dict]) -> None:
    for metrics in steps:
        assert metrics["training/rollout_probs_diff_max"] < 1e-4


def assert_sampled_from(
    model: str | Path, dump: Path, step: int, weights: dict[str, torch.Tensor] | None = None
) -> int:
    """Every log-prob and entropy of a dumped step is what transformers computes; returns the number of tokens compared."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if weights is not None:
        policy.load_state_dict({name: _plain(tensor) for name, tensor in weights.items()}, strict=False)
    compared = 0
    for line in (
        line for file in (dump / "trees").glob(f"{step:06d}-*.jsonl") for line in file.read_text().splitlines()
    ):
        tree = Tree.from_dict(json.loads(line)["tree"])
        for row in tree_rows(tree, tree.nodes[0].prompt_ids is not None):
            ids = torch.tensor([row.prompt_ids + row.response_ids])
            with torch.no_grad():
                logprobs = policy(ids).logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
            for node, start, end in zip(row.spans.nodes, row.spans.starts, row.spans.ends):
                own, tokens = logprobs[start:end], torch.tensor(tree.nodes[node].action_ids)
                entropy = torch.special.entr(own.exp()).sum(-1)
                close = {"rtol": 0, "atol": 1e-4}
                torch.testing.assert_close(torch.tensor(tree.nodes[node].action_entropy), entropy, **close)
                torch.testing.assert_close(
                    torch.tensor(tree.nodes[node].action_logprobs), own.gather(-1, tokens[:, None])[:, 0], **close
                )
                compared += len(tokens)
    return compared


def parameters(root: Path, name: str, step: int) -> dict[str, torch.Tensor]:
    folder = root / "checkpoints" / name / f"global_step_{step}" / "actor"
    return torch.load(folder / "model_world_size_1_rank_0.pt", weights_only=False)


@pytest.fixture(scope="module")
def bpo_run(root) -> list[dict]:
    """Three steps of BPO on a user's own environment, with a checkpoint after each."""
    return train(
        root, "bpo", *LETTERS, "trainer.total_training_steps=3", "trainer.save_freq=1", f"bpo.dump_dir={root}/dump",
        "trainer.test_freq=3",
    )  # fmt: skip


LETTERS = (
    "data.train_files=${root}/letters-train.parquet",
    "data.val_files=${root}/letters-valid.parquet",
    "bpo.preset=paper",
    "bpo.branch.threshold=0.1",
    "bpo.budget.limit=6",
)


def test_a_checkpoint_brings_its_runs_settings(bpo_run, root):
    folder = root / "checkpoints/bpo/global_step_2"
    config = OmegaConf.load(folder / "config.yaml")
    assert config.bpo.branch.threshold == 0.1 and config.data.val_files == f"{root}/letters-valid.parquet"
    options = options_from(folder, [])
    assert options.max_response_tokens == config.data.max_response_length != 4096
    assert options.config.env.max_turns == config.bpo.env.max_turns == 4


def test_bpo_trains_on_trees_and_the_engine_follows_every_update(bpo_run):
    assert len(bpo_run) == 3
    assert_same_policy_in_engine_and_trainer(bpo_run)
    for metrics in bpo_run:
        assert metrics["tree/leaves"] == 6 and metrics["tree/forks"] > 0
        assert metrics["actor/grad_norm"] > 0
        assert metrics["tree/cached_share"] > 0.3  # branches reuse their prefix
    assert any(m["bpo/sibling_return_variance"] > 0 for m in bpo_run)
    assert any("success/mean@" in key for key in bpo_run[-1])


def test_log_probs_and_entropies_are_those_of_the_weights_that_sampled(root, bpo_run):
    assert assert_sampled_from(root / "warmstart", root / "dump", 1) > 100
    assert assert_sampled_from(root / "warmstart", root / "dump", 3, parameters(root, "bpo", 2)) > 100


def test_costs_are_counted_from_the_start_of_training(bpo_run):
    for key in ("env_steps", "generated_tokens", "prefill_tokens", "cached_tokens"):
        counts = [m[f"compute/{key}"] for m in bpo_run]
        assert counts == sorted(counts) and counts[0] > 0
    assert [m["compute/updates"] for m in bpo_run] == [1, 2, 3]


def test_dumped_trees_give_the_advantages_that_were_trained_on(root, bpo_run):
    done = subprocess.run(
        [sys.executable, "-m", "verl_bpo.commands.main", "report", "recompute", str(root / "dump")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "match" in done.stdout, done.stdout + done.stderr


def test_a_resumed_run_reaches_the_same_state(root, bpo_run):
    resumed = train(
        root, "resumed", *LETTERS, "trainer.total_training_steps=3", "trainer.save_freq=1",
        "trainer.resume_mode=resume_path", f"trainer.resume_from_path={root}/checkpoints/bpo/global_step_2",
    )  # fmt: skip
    assert len(resumed) == 1
    assert resumed[0]["compute/env_steps"] == bpo_run[2]["compute/env_steps"]
    assert resumed[0]["compute/updates"] == 3
    before, after = parameters(root, "bpo", 3), parameters(root, "resumed", 3)
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(_plain(after[name]), _plain(before[name]), rtol=0, atol=1e-6)


def test_training_changes_the_policy(root, bpo_run):
    first, last = parameters(root, "bpo", 1), parameters(root, "bpo", 3)
    assert any(not torch.equal(_plain(first[n]), _plain(last[n])) for n in first)


def test_grpo_takes_plain_trajectories_of_the_same_environment(root):
    steps = train(
        root, "grpo", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=3", "trainer.total_training_steps=2"
    )
    assert_same_policy_in_engine_and_trainer(steps)
    assert steps[-1]["tree/trees"] == 6 and steps[-1]["tree/leaves"] == 1 and steps[-1]["tree/snapshots"] == 0
    assert steps[-1]["compute/env_steps"] > 0 and steps[-1]["compute/updates"] == 2


def test_ppo_trains_its_critic(root):
    steps = train(
        root, "ppo", "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2"
    )
    assert_same_policy_in_engine_and_trainer(steps)
    assert steps[-1]["critic/grad_norm"] > 0


@pytest.mark.parametrize(
    "override, message",
    [
        ("bpo.branch.selector=entropy", "bpo.branch.selector='entropy' is not one of"),
        ("bpo.branch.forks=0", "bpo.branch.forks=0 must be at least 1"),
        ("+bpo.branching.forks=2", "unknown key bpo.branching"),
        ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward=True"),
        ("bpo.env.name=nowhere", "no environment named 'nowhere'"),
    ],
)
def test_bad_config_is_found_before_anything_starts(root, override, message):
    assert message in dry_run([*QUICKSTART, f"root={root}", override]).problems[0]


def test_a_run_stops_at_a_bad_config_before_ray_with_one_line(root):
    command = [sys.executable, "-m", "verl_bpo.integration.main", *QUICKSTART, f"root={root}", "bpo.branch.forks=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert done.returncode != 0
    assert "verl_bpo: bpo.branch.forks=0 must be at least 1" in done.stderr
    assert "ray init" not in done.stdout and "Traceback" not in done.stderr


def _plain(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
