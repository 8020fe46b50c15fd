"""``verl-bpo eval``: success of one policy on a fixed panel of tasks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from verl_bpo.config.schema import BPOConfig, ConfigError, build
from verl_bpo.report.intervals import task_bootstrap, wilson
from verl_bpo.tree.topology import Tree

EPISODES, RESULT, SPEC = "episodes.jsonl", "result.json", "spec.json"
DATA_KEYS = {"max_prompt_length": 2048, "max_response_length": 4096}


@dataclass(frozen=True)
class Task:
    """One row of a panel."""

    env: str
    task: str
    seed: int


@dataclass(frozen=True)
class Episode:
    """One line of ``episodes.jsonl``. ``task`` counts the panel's rows, ``episode`` a task's episodes."""

    task: int
    episode: int
    success: bool
    reward: float
    """Sum of rewards."""
    turns: int
    tokens: int
    invalid: int
    """Turns without a valid action."""
    end: str
    """``terminated`` or ``truncated``."""
    task_type: str | None


@dataclass(frozen=True)
class EvalOptions:
    """What an evaluation's numbers depend on, beside model and panel."""

    config: BPOConfig
    max_prompt_tokens: int
    max_response_tokens: int
    episodes: int = 1
    """Of each task."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise ValueError(f"--episodes={self.episodes} must be at least 1")
        if self.temperature == 0 and self.episodes > 1:
            raise ValueError(
                f"greedy, every episode of a task is played alike: leave out --episodes {self.episodes}, or give a "
                "--temperature"
            )


def read_panel(file: str | Path) -> list[Task]:
    """Tasks of a prompt file (``verl-bpo make-data``), in its order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row names no task.
    """
    import pandas

    if not Path(file).is_file():
        raise FileNotFoundError(f"no prompt file {file}: write one with `verl-bpo make-data`")
    extras = pandas.read_parquet(file)["extra_info"]
    try:
        return [Task(e["env"], e["task"], int(e.get("seed") or 0)) for e in extras]
    except (KeyError, TypeError):
        raise ValueError(
            f"a row of {file} names no env and task in extra_info: write it with `verl-bpo make-data`"
        ) from None


def panel_digest(panel: Sequence[Task]) -> str:
    """Tells whether two panels are the same tasks: names, order, seeds and, where tasks are files, contents. Folders don't
    matter."""
    digest = hashlib.sha256()
    for row in panel:
        path = Path(row.task)
        name = path.name if path.is_absolute() or path.exists() else row.task
        digest.update(f"{row.env}\0{name}\0{row.seed}\0".encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def weights_digest(folder: Path) -> str:
    """Tells whether two model folders hold the same weights."""
    digest = hashlib.sha256()
    for file in sorted(f for p in ("*.safetensors", "*.bin", "model_world_size_*.pt") for f in folder.glob(p)):
        digest.update(file.name.encode())
        with open(file, "rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def options_from(model: Path, overrides: Sequence[str], config_file: Path | None = None, **chosen: Any) -> EvalOptions:
    """Options from ``KEY=VALUE`` overrides of ``bpo.env.*``, ``bpo.prompt.*`` and ``data.max_*_length``. A warm start
    brings the prompts that it was taught with; ``config_file``, a run's resolved config, brings all of these keys, and how the
    run's validation samples. A checkpoint that has its run's config with it needs none.

    Args:
        chosen: other fields of :class:`EvalOptions`; None stands for what is not chosen.

    Raises:
        ConfigError: an unknown key or a wrong value.
    """
    from omegaconf import OmegaConf

    from verl_bpo.model.checkpoint import run_config

    given = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    bpo, data = dict(given.pop("bpo", {})), given.pop("data", {})
    unknown = [
        *given,
        *(f"data.{k}" for k in data if k not in DATA_KEYS),
        *(f"bpo.{k}" for k in bpo if k not in ("env", "prompt")),
    ]
    if unknown:
        raise ConfigError(
            f"{unknown[0]} doesn't bear on an evaluation: give bpo.env.*, bpo.prompt.*, data.max_*_length"
        )
    record = model / "warmstart.json"
    base: dict[str, Any] = {"env": {}, "prompt": {}}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    config_file = config_file or run_config(model)
    if config_file is not None:
        run = OmegaConf.load(config_file)
        base = {key: OmegaConf.to_container(run.bpo[key]) for key in base}
        data = {key: run.data[key] for key in DATA_KEYS} | data
        sampling = OmegaConf.select(run, "actor_rollout_ref.rollout.val_kwargs")
        if sampling is not None:
            temperature = float(sampling.temperature) if sampling.do_sample else 0.0
            chosen = {"temperature": temperature, "top_p": float(sampling.top_p)} | chosen
    elif record.is_file():
        base["prompt"] = json.loads(record.read_text())["options"]["prompt"]
    bpo = {key: base[key] | bpo.get(key, {}) for key in base}
    lengths = DATA_KEYS | data
    config = build(bpo, "plain")
    return EvalOptions(config, lengths["max_prompt_length"], lengths["max_response_length"], **chosen)


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
    from verl_bpo.model.checkpoint import find_model, load_model

    out, folder = Path(out), find_model(model_path)
    spec = {
        "weights": weights_digest(folder),
        "panel": {"sha256": panel_digest(panel), "tasks": len(panel), "envs": sorted({t.env for t in panel})},
        **{k: v for k, v in asdict(options).items() if k not in ("config", "episodes")},
        "env": {k: getattr(options.config.env, k) for k in ("kwargs", "max_turns", "max_action_tokens")},
        "prompt": asdict(options.config.prompt),
    }
    _check_same(out, spec)
    wanted = [(i, e) for e in range(options.episodes) for i in range(len(panel))]
    episodes = [e for e in read_episodes(out) if e.episode < options.episodes]
    done = {(e.task, e.episode) for e in episodes}
    missing = [key for key in wanted if key not in done]
    started, lost = time.perf_counter(), []
    if missing:
        model, tokenizer = load_model(folder)
        new, lost = asyncio.run(_play(model, tokenizer, panel, missing, out, options, threads, episodes))
        episodes += new
        if not episodes:
            (out / SPEC).unlink()
            raise ValueError(f"no episode could be played: {lost[0]}")
    result = {
        "model": str(model_path),
        **spec,
        **summary(episodes),
        "lost": lost[:4],
        "seconds": round(time.perf_counter() - started, 1),
    }
    _write(out / RESULT, result)
    return result


async def _play(
    model: Any,
    tokenizer: Any,
    panel: Sequence[Task],
    missing: list[tuple[int, int]],
    out: Path,
    options: EvalOptions,
    threads: int,
    before: list[Episode],
) -> tuple[list[Episode], list[str]]:
    from verl_bpo.generation.local import LocalRollouts

    played: list[Episode] = []
    lost: list[str] = []
    won = sum(e.success for e in before)
    with (
        LocalRollouts(
            model,
            tokenizer,
            options.config,
            max_prompt_tokens=options.max_prompt_tokens,
            max_response_tokens=options.max_response_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            threads=threads,
        ) as rollouts,
        open(out / EPISODES, "a") as file,
        tqdm(total=len(before) + len(missing), initial=len(before), desc="eval", unit="episode") as bar,
    ):

        async def one(index: int, number: int) -> None:
            nonlocal won
            row = panel[index]
            tree, failures = await rollouts.tree(row.env, row.task, row.seed, f"{index}/{number}")
            bar.update()
            if not any(tree.usable()):
                lost.extend(f"{row.task}: {failure}" for failure in failures)
                return
            episode = _episode(tree, index, number)
            file.write(json.dumps(asdict(episode)) + "\n")
            file.flush()
            played.append(episode)
            won += episode.success
            bar.set_postfix(success=f"{won / (len(before) + len(played)):.1%}")

        jobs = [asyncio.create_task(one(*key)) for key in missing]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:  # of one failed all go, and give their worlds back before the pools close
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
    return played, lost


def _episode(tree: Tree, index: int, number: int) -> Episode:
    (trajectory,) = tree.usable()
    reward, info = tree.trajectory_return(trajectory), trajectory.info
    return Episode(
        task=index,
        episode=number,
        success=tree.won(trajectory),
        reward=reward,
        turns=len(tree.nodes),
        tokens=sum(len(node.action_ids) for node in tree.nodes),
        invalid=sum(not node.valid_action for node in tree.nodes),
        end=trajectory.end,
        task_type=info.get("task_type"),
    )


def read_episodes(out: str | Path) -> list[Episode]:
    """Episodes that an evaluation has written so far; a line cut short by its end is left out."""
    file = Path(out) / EPISODES
    episodes = {}
    if file.is_file():
        text = file.read_text()
        for line in text.splitlines():
            try:
                episode = Episode(**json.loads(line))
            except (ValueError, TypeError):
                continue
            episodes[episode.task, episode.episode] = episode
        if text and not text.endswith("\n"):
            file.write_text(text[: text.rfind("\n") + 1])  # what is appended must not join it
    return list(episodes.values())


def summary(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Success with 95% intervals, over all and per task type, and means of an episode's other numbers.

    ``wilson`` takes the tasks as given, ``bootstrap`` covers their choice too (see :mod:`verl_bpo.report.intervals`).
    """
    kinds: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.task_type is not None:
            kinds[episode.task_type].append(episode)
    count = max(len(episodes), 1)
    return {
        "success": _success(episodes),
        "task_types": {kind: _success(kinds[kind]) for kind in sorted(kinds)},
        "reward": sum(e.reward for e in episodes) / count,
        "turns": sum(e.turns for e in episodes) / count,
        "tokens": sum(e.tokens for e in episodes) / count,
        "invalid_share": sum(e.invalid for e in episodes) / max(sum(e.turns for e in episodes), 1),
        "truncated": sum(e.end == "truncated" for e in episodes) / count,
    }


def _success(episodes: Sequence[Episode]) -> dict[str, Any]:
    per_task: dict[int, list[float]] = defaultdict(list)
    for e in episodes:
        per_task[e.task].append(float(e.success))
    won = sum(e.success for e in episodes)
    return {
        "mean": won / max(len(episodes), 1),
        "episodes": len(episodes),
        "tasks": len(per_task),
        "wilson": wilson(won, len(episodes)),
        "bootstrap": task_bootstrap(list(per_task.values())),
    }


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


def add_arguments(parser: Any) -> None:
    """Declare the options of ``verl-bpo eval``."""
    parser.add_argument(
        "model", type=Path, help="Hugging Face folder, or verl's checkpoint (global_step_N, or all of them)"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="of bpo.env.*, bpo.prompt.* and data.max_*_length, as in training",
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


def main(arguments: Any) -> int:
    """Run ``verl-bpo eval``; returns the exit status: 1 if episodes were lost to their environment."""
    from verl_bpo.sandbox.loading import EnvironmentUnavailable

    options = options_from(
        arguments.model,
        arguments.overrides,
        arguments.config,
        episodes=arguments.episodes,
        temperature=0.0 if arguments.greedy else arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    try:
        result = evaluate(arguments.model, read_panel(arguments.panel), arguments.out, options, arguments.threads)
    except EnvironmentUnavailable as error:
        raise ValueError(str(error)) from error
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
        print(f"episodes were lost to their environment, run again to play them; the first: {result['lost'][0]}")
        return 1
    return 0
