"""Algorithms compared on small worlds, many seeds in minutes on one core.

    python benchmarks/lab/run.py --families progress traps --methods rloo paper tree_critic --seeds 20 --name main

Families and training are read from config.yaml (``--set noise=0.05`` changes a key). Every method takes the same environment
steps a task and update. Runs are determined by their seeds. Finished blocks of seeds are kept in benchmarks/lab/runs and are
not done again. Writes benchmarks/results/lab_NAME.json, .md and .png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tqdm import tqdm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.lab.methods import METHODS, Method  # noqa: E402
from benchmarks.lab.policies import NetworkCritic, Policy, TableCritic  # noqa: E402
from benchmarks.lab.report import write_report  # noqa: E402
from benchmarks.lab.rolling import Roller, forest_of, world_of  # noqa: E402
from benchmarks.lab.worlds import Family, sample_tasks  # noqa: E402
from verl_bpo.advantages.sapo_losses import explained_variance  # noqa: E402
from verl_bpo.tree.budget import Budget  # noqa: E402
from verl_bpo.tree.selectors import Choosing  # noqa: E402

TRAINING = ("updates", "until", "level", "samples", "learning_rate", "noise")


def train(family: Family, method: Method, training: dict[str, Any], seed: int) -> dict[str, list[float]]:
    """One run. Lists by update, after it: exact ``success``, environment ``steps`` so far, V's ``explained`` variance (of the
    update's returns, by V as it was before)."""
    torch.manual_seed(seed)
    rng, world_rng = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    teacher = world_rng.normal(size=(family.actions, family.features))
    tasks = sample_tasks(family, world_rng, teacher)
    judged = sample_tasks(family, np.random.default_rng([seed, 2]), teacher) if family.fresh else tasks
    policy = Policy(family, training["learning_rate"])
    critic = NetworkCritic(family) if family.fresh else TableCritic(family, training["noise"], world_rng)
    config = method.config(family.turns, training["samples"])
    memory = config.branch.selector.memory() if isinstance(config.branch.selector, Choosing) else None
    out: dict[str, list[float]] = {"success": [], "steps": [], "explained": []}
    steps = 0
    for _ in range(training["updates"]):
        if family.fresh:
            tasks = sample_tasks(family, world_rng, teacher)
        branch = config.branch
        if memory is not None:
            taught = branch.selector.knowing(branch.selector.taught(memory))
            branch = branch.model_copy(update={"selector": taught})
        probabilities, values = policy.probabilities(tasks), critic.values(tasks)
        rollers = [
            Roller(
                world_of(tasks, k, probabilities, values),
                branch,
                Budget("env_steps", config.budget.limit, family.turns, 1),
                draw=lambda index, depth: rng.random(),
                chance=lambda index, depth: rng.random(),
                fill=config.budget.fill == "root",
                least_forks=1 if config.trunk_is_sibling else 2,
            ).run()
            for k in range(family.tasks)
        ]
        if memory is not None:
            memory.add([score for roller in rollers for score in roller.lessons])
        forest, turn = forest_of(rollers)
        steps += len(forest.parent)
        estimate = method.judge(config, forest)
        returns = forest.leaf_return[forest.trajectory]
        out["explained"].append(explained_variance(forest.state_value, returns))
        policy.learn(
            tasks, turn["task"], turn["state"], turn["action"], estimate.weight * estimate.advantage,
            int(estimate.valid.sum()),
        )  # fmt: skip
        if method.critic:
            critic.learn(tasks, *(turn[x].numpy() for x in ("task", "depth", "state")), returns.numpy())
        out["success"].append(judged.success(policy.probabilities(judged)))
        out["steps"].append(steps)
        if out["success"][-1] >= training["until"]:
            break
    return out


def family_of(config: dict[str, Any], name: str) -> tuple[Family, dict[str, Any]]:
    """A family of the config and how it is trained: its own keys over the common ones."""
    keys = dict(config["families"][name])
    training = {key: keys.pop(key, config[key]) for key in TRAINING}
    return Family(**keys), training


def finished(config: dict[str, Any], family: str, method: str, seeds: range, folder: Path) -> list[dict]:
    """The runs of a block of seeds, read where they were done before."""
    found, training = family_of(config, family)
    key = json.dumps([vars(found), training, repr(METHODS[method])])
    file = folder / f"{family}-{method}-{seeds[0]}-{seeds[-1]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    if not file.exists():
        runs = [train(found, METHODS[method], training, seed) for seed in seeds]
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(runs))
        part.replace(file)
    return json.loads(file.read_text())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["progress", "traps"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--name", default="main")
    parser.add_argument("--config", type=Path, default=HERE / "config.yaml")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    config = yaml.safe_load(args.config.read_text())
    config |= {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in args.set)}
    block = config["block"]
    blocks = [range(a, min(a + block, args.seeds)) for a in range(0, args.seeds, block)]
    runs: dict[str, dict[str, list]] = {f: {m: [] for m in args.methods} for f in args.families}
    todo = [(seeds, f, m) for seeds in blocks for f in args.families for m in args.methods]
    for seeds, family, method in tqdm(todo, unit="block"):
        runs[family][method] += finished(config, family, method, seeds, args.runs)
    write_report(config, runs, args.results / f"lab_{args.name}")


if __name__ == "__main__":
    main()
