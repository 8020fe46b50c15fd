"""Where a training step spends its time, and how much of the prompts comes from the prefix cache.

Trains the quickstart's policy for a few steps with BPO and with GRPO, one after the other in one run, and prints the mean
of every phase over all steps but the first. Needs the quickstart's games and warm start (recipes/quickstart/run.sh makes
them).

    python benchmarks/step_profile.py --root runs/quickstart --steps 6
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PHASES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")
RUNS = {
    "bpo": ["algorithm.adv_estimator=bpo", "bpo.preset=guided"],
    "grpo": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"],
}


def train(name: str, overrides: list[str], root: Path, steps: int) -> list[dict]:
    """Metrics of every step of one short run."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "metrics.jsonl"
        command = [
            sys.executable, "-m", "verl_bpo.trainer.main", "--config-dir", str(REPOSITORY / "recipes/quickstart"),
            "--config-name", "quickstart", f"root={root}", f"name=profile-{name}", f"trainer.total_training_steps={steps}",
            "trainer.test_freq=-1", "trainer.val_before_train=false", *overrides,
        ]  # fmt: skip
        environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(log), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def profile(steps: list[dict]) -> dict[str, float]:
    """Mean seconds of each phase and the cache's share, without the first step, which warms up."""
    warm = steps[1:] or steps
    mean = {phase: sum(s.get(f"timing_s/{phase}", 0.0) for s in warm) / len(warm) for phase in PHASES}
    spent = {
        key: steps[-1][f"compute/{key}"] for key in ("cached_tokens", "prefill_tokens", "generated_tokens", "env_steps")
    }
    cached = spent["cached_tokens"] / max(spent["cached_tokens"] + spent["prefill_tokens"], 1)
    return {**mean, **spent, "cached_share": cached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks/results/step_profile.json")
    arguments = parser.parse_args()
    results = {name: profile(train(name, o, arguments.root, arguments.steps)) for name, o in RUNS.items()}
    print(f"{'':18}" + "".join(f"{name:>12}" for name in results))
    for key in next(iter(results.values())):
        unit = " s" if key in PHASES else ""
        print(
            f"{key + unit:18}"
            + "".join(f"{r[key]:12.3f}" if r[key] < 100 else f"{r[key]:12.0f}" for r in results.values())
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"steps": arguments.steps, **results}, indent=1))


if __name__ == "__main__":
    main()
