"""Where a training step spends its time and memory, and how much of the prompts comes from the prefix cache.

Trains one policy for a few steps with each method, one after the other in one run: 64 episodes and one update a step for
all. Means are over all steps but the first; memory is the peak resident size of the trainer's worker (actor and, for PPO,
critic) and of the rollout engine. An environment step is what methods are matched by; forks start in the middle, so that BPO's
64 episodes take fewer of them. ``grpo64`` has a world for each episode, where the others have eight. Needs
the quickstart's games (recipes/quickstart/run.sh makes them).

    python benchmarks/step_profile.py --root runs/quickstart --model runs/quickstart/warmstart-0 --steps 6

PPO is verl's: token-level GAE across turns and a critic of its own. SAPO is Single-rollout Autoregressive Policy
Optimization (arXiv 2608.19842), not verl's policy loss of that name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
PHASES = ("gen", "old_log_prob", "values", "adv", "update_critic", "update_actor", "update_weights", "step")
SINGLE = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size=64"]
RUNS = {
    "bpo": ["algorithm.adv_estimator=bpo", "bpo.preset=guided"],
    "grpo": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"],
    "grpo64": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "bpo.env.workers=64"],
    "sapo": ["algorithm.adv_estimator=sapo", *SINGLE],
    "ppo": ["algorithm.adv_estimator=gae", *SINGLE],
}
PROCESSES = {"trainer": "ray::WorkerDict", "rollout": "ray::TransformersServer"}


def train(name: str, overrides: list[str], root: Path, model: Path, steps: int) -> tuple[list[dict], dict[str, float]]:
    """Metrics of every step of one short run of the quickstart, and each process's peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "metrics.jsonl"
        command = [
            sys.executable, "-m", "verl_bpo.integration.main", "--config-dir", str(REPOSITORY / "recipes/quickstart"),
            "--config-name", "quickstart", f"root={root}", f"name=profile-{name}",
            f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}",
            f"trainer.total_training_steps={steps}", "trainer.test_freq=-1", "trainer.val_before_train=false",
            *overrides,
        ]  # fmt: skip
        environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(log), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with open(Path(folder) / "output", "w+") as output:
            run = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            peak: dict[str, float] = dict.fromkeys(PROCESSES, 0.0)
            stop = threading.Event()
            watch = threading.Thread(target=_watch, args=(psutil.Process(run.pid), peak, stop))
            watch.start()
            status = run.wait()
            stop.set()
            watch.join()
            if status:
                output.seek(0)
                raise SystemExit(f"{name} failed:\n{output.read()[-5000:]}")
        return [json.loads(line)["data"] for line in log.read_text().splitlines()], peak


def _watch(parent: psutil.Process, peak: dict[str, float], stop: threading.Event) -> None:
    while not stop.wait(0.2):
        for process in parent.children(recursive=True):
            try:
                title = " ".join(process.cmdline())
                for part, prefix in PROCESSES.items():
                    if title.startswith(prefix):
                        peak[part] = max(peak[part], process.memory_info().rss / 2**20)
            except psutil.Error:  # it has ended
                continue


def profile(steps: list[dict]) -> dict[str, float]:
    """Mean seconds of each phase and the cache's share, without the first step, which warms up."""
    warm = steps[1:] or steps
    mean = {phase: sum(s.get(f"timing_s/{phase}", 0.0) for s in warm) / len(warm) for phase in PHASES}
    spent = {
        key: steps[-1][f"compute/{key}"] for key in ("cached_tokens", "prefill_tokens", "generated_tokens", "env_steps")
    }
    cached = spent["cached_tokens"] / max(spent["cached_tokens"] + spent["prefill_tokens"], 1)
    taken = steps[-1]["compute/env_steps"] - (steps[0]["compute/env_steps"] if len(steps) > 1 else 0)
    seconds = sum(s["timing_s/step"] for s in warm)
    return {**mean, "ms_per_env_step": 1000 * seconds / taken, **spent, "cached_share": cached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--model", type=Path, help="policy to train; default: ROOT/warmstart-0")
    parser.add_argument("--methods", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks/results/step_profile.json")
    arguments = parser.parse_args()
    arguments.model = arguments.model or arguments.root / "warmstart-0"
    results = {}
    for name in arguments.methods:
        print(f"{name} ...", file=sys.stderr)
        steps, peak = train(name, RUNS[name], arguments.root, arguments.model, arguments.steps)
        results[name] = {**profile(steps), **{f"{part}_peak_mb": mb for part, mb in peak.items()}}
    print(f"{'':18}" + "".join(f"{name:>12}" for name in results))
    for key in next(iter(results.values())):
        unit = " s" if key in PHASES else ""
        print(
            f"{key + unit:18}"
            + "".join(f"{r[key]:12.3f}" if r[key] < 100 else f"{r[key]:12.0f}" for r in results.values())
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"steps": arguments.steps, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
