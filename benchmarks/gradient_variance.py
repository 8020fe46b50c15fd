"""Variance of policy gradients at one fixed policy, and the identity behind BPO, on real games.

    python benchmarks/gradient_variance.py MODEL PANEL.parquet [bpo.env.max_turns=10 ...] [--batches 32] [--env-steps 250]

Gradients: for each kind of rollout (independent trajectories; trees of preset paper and guided, and ones that branch at other
places or in other numbers: ``--kinds``) many independent batches of equal environment steps are sampled at the same weights,
and turned into gradients by the estimators that the kind allows. A batch's gradient is verl's: the sum of advantage times
grad log-prob over its trained tokens, over their number. With g_b the gradients of the batches, m their mean and C their
covariance:

    noise       tr(C) / |mu|^2, where |mu|^2 is the mean inner product of two different batches: without the noise's share
    norm        Var(|g_b|) / mean(|g_b|)^2
    cosine      mean over b of cos(g_b, mean of the others), b with a gradient
    direction   cosine between mu and RLOO's, likewise without the noise's share (so that it may exceed 1); RLOO is unbiased

Intervals (95%) are the jackknife's over batches. Estimators of the same trees are also compared by the ratio of their noise.
A batch ends with the prompt that reaches --env-steps.

Identity: at branch points with n siblings, Var(trajectory-level leave-one-out advantage) - Var(sibling leave-one-out
advantage) = n/(n-1) Var(E[R | s_b]) (proved in tests/advantages/test_bpo.py). Trees of one backbone are forked at a depth
fixed for each task. Measured: the variances of both advantages, within tasks. Predicted: the covariance of two siblings'
returns, which is Var(E[R | s_b]), from other trees of the same tasks.

Nothing of verl's trainer or Ray runs. Writes benchmarks/results/gradient_variance.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from verl_bpo.advantages.bpo import BPO
from verl_bpo.advantages.estimator import Estimator
from verl_bpo.advantages.gigpo import GiGPO
from verl_bpo.advantages.state_graph import StateGraph
from verl_bpo.commands.evaluation.options import options_from
from verl_bpo.config.schema import build
from verl_bpo.generation.local import LocalRollouts
from verl_bpo.generation.prompts import Task, prompt_tasks
from verl_bpo.model.checkpoint import find_model, load_model, weights_digest
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.rows import tree_rows
from verl_bpo.tree.selectors import Choosing, DecisionPoint
from verl_bpo.tree.topology import Tree

RESULTS = Path(__file__).parent / "results" / "gradient_variance.json"
GROUP = 8
DEPTHS = 5
"""Of the branch points of the identity's trees: a task's is one of 2, 3, ..."""
# verl's GRPO: group mean and standard deviation, the trajectory's own return included in both.
ESTIMATORS: dict[str, dict[str, Estimator]] = {
    "trajectories": {
        "RLOO": BPO(),
        "GRPO": BPO(baseline="mean", normalize="sibling_std"),
        "GiGPO": GiGPO(states="digest"),
        "State graph": StateGraph(),
        "State graph, no prior": StateGraph(prior=0.0),
        "State graph, own returns": StateGraph(pooled=False),
    },
    "paper": {
        "BPO paper": BPO(),
        "BPO paper, path weights": BPO(weighting="path_probability"),
        "BPO paper, trajectory baseline": BPO(baseline="trajectory"),
        "BPO paper, shrunk baseline": BPO(baseline="shrunk"),
    },
    "random": {"BPO random": BPO()},
    "fixed": {"BPO fixed interval": BPO()},
    "guided": {
        "BPO guided": BPO(leaf_return="tree_mean"),
        "BPO guided, path weights": BPO(leaf_return="tree_mean", weighting="path_probability"),
        "BPO guided, trajectory baseline": BPO(baseline="trajectory"),
        "BPO guided, shrunk baseline": BPO(baseline="shrunk", leaf_return="tree_mean"),
        "State graph on guided's trees": StateGraph(),
    },
    "guided4": {"BPO guided K4": BPO(leaf_return="tree_mean")},
}
DIGESTS = {"estimator": {"states": "digest"}}
"""Rollouts note in which states they are."""
LEAVES = {"budget": {"unit": "leaves", "limit": GROUP}}
KINDS: dict[str, dict[str, Any]] = {
    "trajectories": LEAVES | {"branch": {"selector": "none", "root_samples": GROUP}},
    "paper": LEAVES | {"preset": "paper_threshold"},
    "random": LEAVES | {"preset": "paper_threshold", "branch": {"selector": "random", "share": 0.25}},
    "fixed": LEAVES | {"preset": "paper_threshold", "branch": {"selector": "fixed_interval", "interval": 3}},
    "guided": LEAVES | {"preset": "guided"},
    "guided4": LEAVES | {"preset": "guided", "branch": {"forks": 4, "top_k": 1}},
}


def batch_gradients(
    model: Any, trees: list[Tree], estimators: dict[str, Estimator], windowed: bool
) -> dict[str, np.ndarray]:
    """Per estimator: sum over trained tokens of weight * advantage * grad log-prob, flat, over their number."""
    named = {str(i): tree for i, tree in enumerate(trees)}
    batch = Forest.of(named, {name: name for name in named})
    results = {name: estimator(batch) for name, estimator in estimators.items()}
    sums = {name: [0.0, 0] for name in estimators}
    for tree, turns in zip(trees, batch.turns.values(), strict=True):
        own = {name: [(r.advantage * r.weight)[turns], r.valid[turns]] for name, r in results.items()}
        for name, (g, n) in tree_gradients(model, tree, own, windowed).items():
            sums[name] = [sums[name][0] + g, sums[name][1] + n]
    return {name: g / max(n, 1) for name, (g, n) in sums.items()}


def tree_gradients(model: Any, tree: Tree, turns: dict[str, list[torch.Tensor]], windowed: bool) -> dict[str, Any]:
    """Sums of :func:`batch_gradients` over one tree, and numbers of tokens. ``turns``: (weighted advantage, valid)."""
    rows = tree_rows(tree, windowed)
    width = max(len(r.prompt_ids) + len(r.response_ids) for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row.prompt_ids) + len(row.response_ids)] = torch.tensor(row.prompt_ids + row.response_ids)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # padding stands on the right of a causal model
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    out = {}
    for k, (name, (advantage, valid)) in enumerate(turns.items()):
        loss, tokens = logprobs.new_zeros(()), 0
        for i, row in enumerate(rows):
            start = len(row.prompt_ids) - 1
            own = logprobs[i, start : start + len(row.response_ids)]
            loss = loss + (row.spans.spread(advantage).float() * own).sum()
            tokens += int(row.spans.spread(valid.long()).sum())
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=k + 1 < len(turns), allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), grads)]
        out[name] = torch.cat([g.flatten() for g in flat]).numpy(), tokens
    return out


class AfterTurns(Choosing):
    """Branches at one depth."""

    turns: int = 2

    def state_only(self, entropy_of_state: bool) -> bool:
        return True

    def chooses(self, point: DecisionPoint) -> bool:
        return point.depth == self.turns


class Sampler:
    """Trees at the model's weights."""

    def __init__(self, model: Any, tokenizer: Any, panel: list[Task], options: Any, workers: int, seed: int) -> None:
        self.model, self.tokenizer, self.panel, self.options, self.workers = model, tokenizer, panel, options, workers
        self.rng = random.Random(seed)

    def rollouts(self, settings: dict[str, Any], seed: int) -> LocalRollouts:
        config = build(settings | DIGESTS, "plain")
        env = self.options.config.env.model_copy(update={"workers": self.workers, "isolation": "none"})
        config = config.model_copy(update={"env": env, "prompt": self.options.config.prompt})
        play = replace(self.options, temperature=1.0, top_p=1.0, top_k=-1)  # as in training, not as in validation
        return LocalRollouts(self.model, self.tokenizer, config, play, seed=seed)

    async def batch(self, rollouts: LocalRollouts, env_steps: int, kind: str, spare: list[Tree]) -> list[Tree]:
        """The next trees of an endless series, of prompts drawn with replacement, until they have taken ``env_steps``.

        Args:
            spare: trees of the series that were rolled and not used yet; changed.
        """
        trees, taken = [], 0
        while taken < env_steps:
            if not spare:
                wave = []
                for _ in range(self.workers):
                    row = self.rng.choice(self.panel)
                    wave.append(rollouts.tree(row, f"{kind}/{self.rng.random()}"))
                for tree in await asyncio.gather(*wave):
                    if tree.failures:
                        raise RuntimeError(f"a tree lost branches: {tree.failures[0]}")
                    spare.append(tree)
            trees.append(spare.pop(0))
            taken += int(trees[-1].counters["env_steps"])
        return trees


def gradient_study(
    sampler: Sampler, kinds: list[str], batches: int, env_steps: int, seed: int
) -> Iterator[dict[str, Any]]:
    """After each kind of rollout: gradients of the estimators so far, [batches, parameters], and what batches cost."""
    found: dict[str, Any] = {}
    for kind in kinds:
        estimators = ESTIMATORS[kind]
        gradients: dict[str, list[np.ndarray]] = {name: [] for name in estimators}
        costs: list[dict[str, float]] = []
        spare: list[Tree] = []
        with sampler.rollouts(KINDS[kind], seed) as rollouts:
            for _ in tqdm(range(batches), desc=kind, unit="batch"):
                trees = asyncio.run(_fresh(rollouts, sampler.batch(rollouts, env_steps, kind, spare)))
                found_here = batch_gradients(sampler.model, trees, estimators, rollouts.prompter.windowed)
                for name, g in found_here.items():
                    gradients[name].append(g)
                total = lambda key: sum(t.counters.get(key, 0) for t in trees)  # noqa: B023, E731
                costs.append(
                    {
                        "prompts": len(trees),
                        "leaves": total("leaves"),
                        "env_steps": total("env_steps"),
                        "generated_tokens": total("generated_tokens"),
                        "branch_points": total("branch_points"),
                        "success": float(np.mean([t.trajectory_return(x) > 0 for t in trees for x in t.usable()])),
                    }
                )
        mean_cost = {key: float(np.mean([c[key] for c in costs])) for key in costs[0]}
        found |= {name: {"gradients": np.stack(g), "cost": mean_cost} for name, g in gradients.items()}
        yield found


async def _fresh(rollouts: LocalRollouts, job: Any) -> Any:
    rollouts.slots = asyncio.Semaphore(rollouts.config.env.workers)  # belongs to one event loop
    return await job


def statistics(gradients: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """See the module.

    Args:
        gradients, reference: [batches, parameters]; batch b of both may be of the same trees.
    """
    return {
        key: {"value": float(values[0]), "interval": (values[0] + _error(values)).tolist()}
        for key, values in jackknife(gradients, reference).items()
    }


def noise_ratio(gradients: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """tr(C)/|mu|^2 of one estimator over another's that was given the same trees, [batches, parameters] each, with the
    jackknife's interval of its logarithm: what the trees have in common falls out, so that it is narrower than either's."""
    logs = np.log(jackknife(gradients, reference)["noise"]) - np.log(jackknife(reference, reference)["noise"])
    return {"value": float(np.exp(logs[0])), "interval": np.exp(logs[0] + _error(logs)).tolist()}


def _error(values: np.ndarray) -> np.ndarray:
    """Both ends of the 95% interval about ``values[0]``, from the values without each batch that follow it."""
    left, batches = values[1:], len(values) - 1
    error = np.sqrt((batches - 1) / batches * ((left - left.mean()) ** 2).sum())
    return 1.96 * np.array([-error, error])


def jackknife(gradients: np.ndarray, reference: np.ndarray) -> dict[str, np.ndarray]:
    """Each number of :func:`statistics` of all batches, then without each of them: [1 + batches]. All of them come from inner
    products, so that the jackknife costs no gradients."""
    batches = len(gradients)
    both = np.concatenate([gradients, reference]).astype(np.float64)
    gram = both @ both.T

    def numbers(kept: np.ndarray) -> dict[str, float]:
        own, other, crossed = (gram[np.ix_(kept + a, kept + b)] for a, b in ((0, 0), (batches, batches), (0, batches)))
        n = len(kept)
        apart = lambda g: (g.sum() - np.trace(g)) / (n * (n - 1))  # noqa: E731
        square, norms = apart(own), np.sqrt(np.diag(own))
        trace = np.diag(own).mean() - square
        inner = (own.sum(1) - np.diag(own)) / (n - 1)
        others = (own.sum() - 2 * own.sum(1) + np.diag(own)) / (n - 1) ** 2
        directed = norms > 0  # a batch whose returns are all equal has no direction
        return {
            "trace": float(trace),
            "mean_square": square,
            "noise": trace / square if square > 0 else np.inf,
            "norm": norms.mean(),
            "norm_variance": norms.var(ddof=1) / norms.mean() ** 2,
            "cosine": float(np.mean(inner[directed] / (norms * np.sqrt(others))[directed])),
            "direction": apart(crossed) / np.sqrt(square * apart(other)) if min(square, apart(other)) > 0 else np.nan,
        }

    everyone = np.arange(batches)
    found = [numbers(everyone), *(numbers(np.delete(everyone, b)) for b in everyone)]
    return {key: np.array([x[key] for x in found]) for key in found[0]}


def identity_study(sampler: Sampler, tasks: int, trees: int, siblings: int, seed: int) -> dict[str, Any]:
    """Returns of siblings [tasks, trees, siblings] below backbones of each task, and what they say."""
    rng = random.Random(seed)
    rows = rng.sample(sampler.panel, min(tasks, len(sampler.panel)))
    found: list[tuple[int, list[float] | None, int]] = []

    async def one(rollouts: LocalRollouts, index: int, number: int, bar: tqdm) -> None:
        tree = await rollouts.tree(rows[index], f"identity/{index}/{number}")
        bar.update()
        if tree.failures:
            raise RuntimeError(f"a tree lost branches: {tree.failures[0]}")
        returns = [tree.trajectory_return(t) for t in tree.usable()]
        found.append((index, returns if len(returns) == siblings else None, int(tree.counters["env_steps"])))

    async def all_of(rollouts: LocalRollouts, indices: range, bar: tqdm) -> None:
        await asyncio.gather(*[one(rollouts, i, k, bar) for i in indices for k in range(trees)])

    with tqdm(total=len(rows) * trees, desc="identity", unit="tree") as bar:
        for kind in range(min(DEPTHS, len(rows))):
            branch = {"selector": f"{__file__}:AfterTurns", "turns": 2 + kind, "forks": siblings - 1, "root_samples": 1}
            settings = {"branch": branch, "budget": {"unit": "leaves", "limit": siblings, "fill": "none"}}
            with sampler.rollouts(settings, seed) as rollouts:
                asyncio.run(_fresh(rollouts, all_of(rollouts, range(kind, len(rows), DEPTHS), bar)))
    per_task: dict[int, list[list[float]]] = {}
    for index, returns, _ in found:
        if returns is not None:  # else its backbone had ended before the branch point
            per_task.setdefault(index, []).append(returns)
    groups = [np.array(g) for g in per_task.values() if len(g) >= 2 * siblings]
    result = identity(groups, siblings)
    draw = np.random.default_rng(0)
    drawn = [identity([groups[i] for i in draw.integers(len(groups), size=len(groups))], siblings) for _ in range(1000)]
    return {
        key: {"value": value, "interval": np.quantile([d[key] for d in drawn], [0.025, 0.975]).tolist()}
        for key, value in result.items()
    } | {
        "tasks": len(groups),
        "trees": int(sum(map(len, groups))),
        "siblings": siblings,
        "env_steps": int(sum(steps for *_, steps in found)),
    }


def identity(groups: list[np.ndarray], n: int) -> dict[str, float]:
    """Means over tasks. ``groups``: per task [trees, n] returns. Half of a task's trees measure, the other half predict."""
    sums = []
    for returns in groups:
        measured, predicting = returns[::2], returns[1::2]
        loo = lambda r: r - (r.sum(1, keepdims=True) - r) / (n - 1)  # noqa: E731
        siblings = loo(measured)
        blocks = len(measured) // n
        # n independent trajectories are the k-th siblings of n trees.
        trajectories = loo(measured[: blocks * n].reshape(blocks, n, n).transpose(0, 2, 1).reshape(-1, n))
        centred = predicting - predicting.mean()
        pairs = (centred.sum(1) ** 2 - (centred**2).sum(1)) / (n * (n - 1))
        between = pairs.sum() / (len(predicting) - 1)
        total = float((trajectories**2).mean())
        sums.append((total, float((siblings**2).mean()), n / (n - 1) * between))
    total, within, predicted = np.mean(sums, axis=0)
    return {
        "trajectory_variance": float(total),
        "sibling_variance": float(within),
        "reduction": float(total - within),
        "predicted": float(predicted),
        "explained_share": float(predicted / total) if total else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("panel", type=Path, help="prompt file of the tasks to draw from")
    parser.add_argument("overrides", nargs="*", help="bpo.env.*, bpo.prompt.*, data.max_*_length")
    parser.add_argument("--threshold", type=float, default=1.0, help="of preset paper_threshold")
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--env-steps", type=int, default=250, help="of a batch")
    parser.add_argument("--identity-tasks", type=int, default=32)
    parser.add_argument("--identity-trees", type=int, default=16, help="of each task")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS)[1:], default=["paper", "guided"], help="of trees")
    arguments = parser.parse_intermixed_args()
    kinds = ["trajectories", *arguments.kinds]  # RLOO's gradient is what the others are compared with
    torch.set_num_threads(1)
    started, cpu = time.perf_counter(), time.process_time()
    folder = find_model(arguments.model)
    model, tokenizer = load_model(folder)
    options = options_from(arguments.model, arguments.overrides)
    panel = prompt_tasks(arguments.panel, options.config.env.name)
    sampler = Sampler(
        model,
        tokenizer,
        panel,
        options,
        arguments.workers,
        arguments.seed,
    )
    KINDS["paper"]["branch"] = {"threshold": arguments.threshold}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {
        "arguments": {k: str(v) for k, v in vars(arguments).items()},
        "commit": commit,
        "weights": weights_digest(folder),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__},
        "identity": identity_study(sampler, arguments.identity_tasks, arguments.identity_trees, 4, arguments.seed),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for study in itertools.chain(
        [{}], gradient_study(sampler, kinds, arguments.batches, arguments.env_steps, arguments.seed)
    ):
        result["gradients"] = {
            name: {**statistics(s["gradients"], study["RLOO"]["gradients"]), "cost": s["cost"]}
            for name, s in study.items()
        }
        result["noise_ratios"] = {
            f"{name} / {first}": noise_ratio(study[name]["gradients"], study[first]["gradients"])
            for first, *others in ESTIMATORS.values()
            for name in others
            if first in study
        }
        result["seconds"], result["cpu_seconds"] = (
            round(time.perf_counter() - started),
            round(time.process_time() - cpu),
        )
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")  # what is there stays if the rest is interrupted
        print(table(result), flush=True)


def table(result: dict[str, Any]) -> str:
    """The result for people, in Markdown."""

    def cell(x: dict[str, Any], digits: int) -> str:
        low, high = x["interval"]
        return f"{x['value']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    heads = (
        "prompts",
        "env steps",
        "leaves",
        "success",
        "tr(C)/\\|mu\\|²",
        "Var(norm)/mean²",
        "cosine to mean",
        "to RLOO's",
    )
    lines = ["| estimator | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name, r in result["gradients"].items():
        c = r["cost"]
        cells = [f"{c['prompts']:.1f}", f"{c['env_steps']:.0f}", f"{c['leaves']:.0f}", f"{c['success']:.1%}"]
        cells += [cell(r[k], d) for k, d in (("noise", 1), ("norm_variance", 3), ("cosine", 3), ("direction", 3))]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    ratios = [f"{name} {cell(ratio, 2)}" for name, ratio in result["noise_ratios"].items()]
    lines += ["", f"Noise on the same trees: {'; '.join(ratios)}."] if ratios else []
    same = result["identity"]
    lines += [
        "",
        f"Identity, {same['siblings']} siblings, {same['trees']} branch points of {same['tasks']} tasks: variance of the "
        f"trajectory-level advantage {cell(same['trajectory_variance'], 4)}, of the siblings' "
        f"{cell(same['sibling_variance'], 4)}; reduction measured {cell(same['reduction'], 4)}, predicted "
        f"{cell(same['predicted'], 4)}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
