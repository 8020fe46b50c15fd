"""A policy to start reinforcement learning from: behaviour cloning of an environment's expert.

    python recipes/imitation/train.py --out runs/policy --data runs/games

Reinforcement learning from sparse rewards needs a policy that already succeeds now and then. Here a small model is
built from nothing (or a given one is loaded) and trained on demonstrations by the environment's expert until it does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from recipes.imitation.cloning import clone, encode  # noqa: E402
from recipes.imitation.demonstrations import record_demonstrations, texts_of  # noqa: E402
from recipes.imitation.options import ImitationOptions  # noqa: E402
from recipes.imitation.policy import RECORD, load_base, make_model, make_tokenizer, save  # noqa: E402
from verl_bpo.options import keys, read  # noqa: E402
from verl_bpo.sandbox.base import SandboxError  # noqa: E402
from verl_bpo.sandbox.loading import EnvironmentUnavailable, list_tasks, load_environment  # noqa: E402
from verl_bpo.tree.prompting import PromptConfig, Prompter  # noqa: E402


def train(options: ImitationOptions, out: str | Path, data: str | None = None, overwrite: bool = False) -> Path:
    """Train a policy and save it as a Hugging Face folder with ``warmstart.json`` beside the weights.

    Args:
        out: folder to write; it appears whole or not at all. Nothing is done when it holds a policy made with the
            same options and games.
        data: root folder of the games, for environments that need one.
        overwrite: replace a folder that holds a policy made otherwise.

    Returns:
        ``out``.

    Raises:
        ValueError: too few games, no base model, or ``out`` holds something else; the message says what to do.
    """
    out = Path(out).expanduser()
    environment_class = load_environment(options.env)
    tasks = list_tasks(options.env, "train", **({"root": data} if data else {}))
    count = min(len(tasks), options.games or len(tasks))
    if count <= options.held_out:
        raise ValueError(
            f"{count} train games leave none to learn from after --held-out {options.held_out}: make more games, "
            f"or hold out fewer"
        )
    made_from = json.loads(json.dumps({"options": _plain(options), "games": _digest(tasks)}))
    if _is_done(out, made_from, overwrite):
        print(f"{out} is there already, made with the same options and games")
        return out

    started = time.perf_counter()
    torch.manual_seed(options.seed)
    # Neighbouring games may be alike (sorted by task type, say), so the held-out ones are drawn.
    shuffled = random.Random(options.seed).sample(list(tasks), count)
    held_out, demonstrated = shuffled[: options.held_out], shuffled[options.held_out :]
    environments = [environment_class() for _ in held_out]
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        if options.base != "tiny":
            model, tokenizer = load_base(options.base)
        demonstrations = record_demonstrations(
            environments[0],
            demonstrated,
            detours=options.detours,
            max_turns=options.max_turns,
            seed=options.seed,
            repeats=options.repeats,
            detour_actions=options.detour_actions,
            mistakes=options.mistakes,
        )
        if options.base == "tiny":
            tokenizer = make_tokenizer(
                list(texts_of(demonstrations, options.prompt)), options.vocab_size, options.whole
            )
            model = make_model(tokenizer, options.hidden_size, options.layers, options.heads)
        prompter = Prompter(tokenizer, options.prompt)
        examples = [example for demonstration in demonstrations for example in encode(prompter, demonstration)]
        result = clone(model, prompter, examples, environments, held_out, options)
    finally:
        torch.set_num_threads(threads)
        for environment in environments:
            environment.close()
    result = {
        **result,
        "measured": asdict(result["measured"]),
        "seconds": round(time.perf_counter() - started, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocab_size": len(tokenizer),
        "examples": len(examples),
    }
    save(model, tokenizer, prompter.end_of_turn_id, {**made_from, "result": result}, out)
    success = result["measured"]["success"]
    print(
        f"{out}: wins {success:.0%} of {len(held_out)} held-out games after {result['steps']} steps, "
        f"{result['parameters'] / 1e6:.2f}M parameters, {result['seconds']} s"
    )
    if success < options.until_success:
        print(f"that is short of --until-success {options.until_success}: raise --steps, or make more games")
    return out


def _plain(options: ImitationOptions) -> dict[str, Any]:
    return {**vars(options), "prompt": options.prompt.model_dump()}


def _digest(tasks: Sequence[str]) -> str:
    """Hash of the tasks' names and, where they are files, contents; the folder they lie in doesn't matter."""
    digest = hashlib.sha256()
    for task in tasks:
        path = Path(task)
        digest.update(path.name.encode() + b"\0" + (path.read_bytes() if path.is_file() else task.encode()))
    return digest.hexdigest()[:16]


def _is_done(out: Path, made_from: dict[str, Any], overwrite: bool) -> bool:
    """Whether ``out`` is this policy already.

    Raises:
        ValueError: ``out`` holds something else that mustn't be replaced.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    record = out / RECORD
    if not record.is_file():
        raise ValueError(f"{out} exists and holds no policy of this recipe: give another --out")
    found = json.loads(record.read_text())
    # An option that came later had its default's effect.
    found["options"] = {**json.loads(json.dumps(_plain(ImitationOptions()))), **found.get("options", {})}
    if all(found.get(key) == value for key, value in made_from.items()):
        return True
    if not overwrite:
        changed = [k for k, v in made_from["options"].items() if found["options"].get(k) != v] or ["the games"]
        raise ValueError(f"{out} was made otherwise ({', '.join(changed)} differ): give another --out, or --overwrite")
    return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options; defaults are those of :class:`ImitationOptions`."""
    defaults = ImitationOptions()
    parser.add_argument("--out", required=True, help="folder to save the policy in")
    parser.add_argument("--data", help="root folder of the games, with a train folder in it")
    parser.add_argument("--overwrite", action="store_true", help="replace a policy made with other options")
    group = parser.add_argument_group("prompt", "train with the same values in bpo.prompt.*")
    own = {key: value for key, value in vars(defaults).items() if key != "prompt"}
    for values, target in ((own, parser), (dict(defaults.prompt), group)):
        for name, default in values.items():
            kind = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": type(default)}
            target.add_argument(f"--{name.replace('_', '-')}", default=default, help=f"default {default!r}", **kind)


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 1 for what the user can mend, said in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args(words)
    try:
        prompt = read(PromptConfig, {key: getattr(args, key) for key in keys(PromptConfig)}, "bpo.prompt")
        chosen = {o.name: getattr(args, o.name) for o in fields(ImitationOptions) if o.name != "prompt"}
        train(ImitationOptions(prompt=prompt, **chosen), args.out, args.data, args.overwrite)
    except (ValueError, SandboxError, EnvironmentUnavailable) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
