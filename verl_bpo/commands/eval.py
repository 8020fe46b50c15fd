"""``verl-bpo eval``: success of one policy on a fixed panel of tasks."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_bpo.commands.evaluation.episodes import play, read_episodes
from verl_bpo.commands.evaluation.options import EvalOptions, options_from
from verl_bpo.commands.evaluation.panel import panel_digest
from verl_bpo.commands.evaluation.summary import summary
from verl_bpo.generation.prompts import Task, prompt_tasks

RESULT, SPEC = "result.json", "spec.json"


def evaluate(
    model_path: str | Path, panel: Sequence[Task], out: str | Path, options: EvalOptions, threads: int = 1
) -> dict[str, Any]:
    """Play every episode that ``out`` doesn't hold yet, and summarise all of them.

    An episode's actions depend on the model, its task and ``options`` alone: one interrupted and resumed gives what an
    uninterrupted one does (up to float rounding). Episodes lost to their environment are left out and played again by the
    next call.

    Returns:
        The content of ``result.json``.

    Raises:
        FileNotFoundError: no model.
        ValueError: ``out`` holds an evaluation of something else, or no episode could be played.
    """
    from verl_bpo.model.checkpoint import find_model, load_model, weights_digest

    out, folder = Path(out), find_model(model_path)
    spec = {
        "weights": weights_digest(folder),
        "panel": {"sha256": panel_digest(panel), "tasks": len(panel), "envs": sorted({t.env for t in panel})},
        **{k: v for k, v in asdict(options).items() if k not in ("config", "episodes")},
        "env": {k: getattr(options.config.env, k) for k in ("kwargs", "max_turns", "max_action_tokens")},
        "prompt": options.config.prompt.model_dump(),
    }
    _check_same(out, spec)
    wanted = [(i, e) for e in range(options.episodes) for i in range(len(panel))]
    episodes = [e for e in read_episodes(out) if e.episode < options.episodes]
    done = {(e.task, e.episode) for e in episodes}
    missing = [key for key in wanted if key not in done]
    started, lost = time.perf_counter(), []
    if missing:
        model, tokenizer = load_model(folder)
        new, lost = asyncio.run(play(model, tokenizer, panel, missing, out, options, threads, episodes))
        episodes += new
        if not episodes:
            (out / SPEC).unlink()
            raise ValueError(f"no episode could be played: {lost[0]}")
    result = {
        "model": str(model_path),
        **spec,
        **summary(episodes),
        "lost": lost[:4],
        "lost_episodes": len(wanted) - len(episodes),
        "seconds": round(time.perf_counter() - started, 1),
    }
    _write(out / RESULT, result)
    return result


def _check_same(out: Path, spec: dict[str, Any]) -> None:
    """See that ``out`` holds nothing else, and note what it will hold."""
    spec, file = json.loads(json.dumps(spec)), out / SPEC
    if file.is_file():
        before = json.loads(file.read_text())
        changed = [key for key in spec if before.get(key) != spec[key]]
        if changed:
            raise ValueError(f"{out} holds an evaluation with other {', '.join(changed)}: give another --out")
        return
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} holds something else than an evaluation: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    _write(file, spec)


def _write(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, file)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``verl-bpo eval``."""
    parser.add_argument(
        "model", type=Path, help="Hugging Face folder, or verl's checkpoint (global_step_N, or all of them)"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="of bpo.env.*, bpo.prompt.*, data.max_*_length and data.apply_chat_template_kwargs.*, as in training",
    )
    parser.add_argument("--panel", type=Path, required=True, help="prompt file of the tasks, by verl-bpo make-data")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for episodes and result; an interrupted one goes on"
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="resolved config of a training run, to evaluate under its settings (default: the one in a checkpoint)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="the likeliest token at every step")
    how.add_argument(
        "--temperature", type=float, help="sample (default: as the run's validation does; without a run 1.0)"
    )
    parser.add_argument("--top-p", type=float, help="likewise")
    parser.add_argument("--episodes", type=int, default=1, help="of each task (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (default 1)")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Overrides may stand behind the options too."""
    return parser.parse_intermixed_args(words)


def main(arguments: argparse.Namespace) -> int:
    """Run ``verl-bpo eval``; returns the exit status: 1 if episodes were lost to their environment."""
    options = options_from(
        arguments.model,
        arguments.overrides,
        arguments.config,
        episodes=arguments.episodes,
        temperature=0.0 if arguments.greedy else arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    panel = prompt_tasks(arguments.panel, options.config.env.name)
    result = evaluate(arguments.model, panel, arguments.out, options, arguments.threads)
    rows = {"all": result["success"], **result["task_types"]}
    width = max(map(len, rows))
    for name, row in rows.items():
        low, high = row["wilson"]
        print(
            f"{name:<{width}}  {row['mean']:6.1%}  [{low:.1%}, {high:.1%}]  {row['episodes']} episodes, {row['tasks']} tasks"
        )
    print(
        f"{arguments.out / RESULT}: 95% intervals by Wilson; over the choice of tasks: {result['success']['bootstrap']}"
    )
    if result["lost"]:
        print(
            f"{result['lost_episodes']} episodes were lost to their environment and are left out above: run again to play "
            f"them; the first: {result['lost'][0]}"
        )
        return 1
    return 0
