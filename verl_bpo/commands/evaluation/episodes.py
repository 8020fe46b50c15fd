"""Episodes of an evaluation: played, written line by line, read again by the call that goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from verl_bpo.commands.evaluation.options import EvalOptions
from verl_bpo.generation.play import FindParser
from verl_bpo.generation.prompts import Task
from verl_bpo.tree.topology import Tree

EPISODES = "episodes.jsonl"


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


async def play(
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
            options,
            seed=options.seed,
            threads=threads,
            find_parser=_find_parser(options),
        ) as rollouts,
        open(out / EPISODES, "a") as file,
        tqdm(total=len(before) + len(missing), initial=len(before), desc="eval", unit="episode") as bar,
    ):

        async def one(index: int, number: int) -> None:
            nonlocal won
            row = panel[index]
            tree = await rollouts.tree(row, f"{index}/{number}")
            bar.update()
            if not any(tree.usable()):
                lost.extend(f"{row.task}: {failure}" for failure in tree.failures)
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


def _find_parser(options: EvalOptions) -> FindParser | None:
    """verl's tool parsers, loaded only for prompts that need them."""
    if options.config.prompt.template != "tools":
        return None
    from verl_bpo.integration.tool_parsers import find_parser

    return find_parser


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
