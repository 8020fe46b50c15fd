"""How a policy plays: what its success depends on beside its weights and its tasks. Training's rollouts, its validation, the
dry run and ``verl-bpo eval`` all read it here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_bpo.config.schema import BPOConfig, build
from verl_bpo.options import ConfigError
from verl_bpo.tree.prompting import PromptConfig, Prompter
from verl_bpo.tree.tool_prompting import ToolParser, ToolPrompter

FindParser = Callable[..., ToolParser]
"""(tokenizer, name, options of the chat template) -> how its model's tool calls are read; verl's stand in the wing."""
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}


@dataclass(frozen=True)
class Play:
    """The settings of single trajectories."""

    config: BPOConfig
    max_prompt_tokens: int = 2048
    max_response_tokens: int = 4096
    template_options: dict[str, Any] = field(default_factory=dict)
    """``data.apply_chat_template_kwargs``."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    chat_template: str | None = None
    """In place of the tokenizer's own; ``actor_rollout_ref.model.custom_chat_template``."""

    @classmethod
    def of_run(cls, config: Mapping[str, Any]) -> Play:
        """As the validation of a run plays.

        Args:
            config: verl's, completed, as plain values.
        """
        data, bpo, policy = config["data"], config["bpo"], config.get("actor_rollout_ref", {})
        return cls(
            config=build({key: bpo[key] for key in ("env", "prompt", "faults") if key in bpo}, "plain"),
            max_prompt_tokens=data["max_prompt_length"],
            max_response_tokens=data["max_response_length"],
            template_options=dict(data.get("apply_chat_template_kwargs") or {}),
            chat_template=policy.get("model", {}).get("custom_chat_template"),
            **validation_sampling(policy.get("rollout", {}).get("val_kwargs")),
        )

    @property
    def sampling(self) -> dict[str, Any]:
        """What a request asks of the engine."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    def prompter(self, tokenizer: Any, *models: Any, find_parser: FindParser | None = None) -> Prompter:
        """The prompter, which knows where an action ends.

        Args:
            models: configs that may name tokens which end a turn.
            find_parser: finds what reads tool calls.
        """
        if self.chat_template:
            tokenizer.chat_template = self.chat_template
        return prompter_for(tokenizer, self.config.prompt, self.template_options, eos_ids(*models), find_parser)


def prompter_for(
    tokenizer: Any,
    config: PromptConfig,
    template_options: Mapping[str, Any],
    ends: Collection[int] = (),
    find_parser: FindParser | None = None,
) -> Prompter:
    """The prompter of a prompt style.

    Args:
        ends: tokens that the model ends its turns with.
        find_parser: finds what reads tool calls.

    Raises:
        ValueError: the tokenizer and the prompt style don't go together.
        ConfigError: no parser is found for the model's tool calls.
    """
    if config.template != "tools":
        return Prompter(tokenizer, config, dict(template_options), ends)
    if find_parser is None:
        raise ConfigError("bpo.prompt.template=tools needs verl's tool parsers, which this command doesn't load")
    parser = find_parser(tokenizer, config.tool_parser, **template_options)
    return ToolPrompter(tokenizer, config, parser, dict(template_options), ends)


def validation_sampling(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Temperature, top_p and top_k of ``rollout.val_kwargs``; without ``do_sample`` they are greedy, whatever it says."""
    if given is None:
        return {}
    if not given["do_sample"]:
        return dict(GREEDY)
    return {
        "temperature": float(given["temperature"]),
        "top_p": float(given["top_p"]),
        "top_k": int(given.get("top_k", -1)),
    }


def eos_ids(*sources: Any) -> set[int]:
    """Tokens that end a sequence, as a tokenizer, a model's config or its generation config name them."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids |= set() if value is None else {value} if isinstance(value, int) else set(value)
    return ids
