"""From observations to tokens, and from tokens to actions.

A conversation is a list of token ids that only ever grows: what the engine saw and sampled stays as it is, never decoded
and tokenised again (that would train on tokens which were never sampled). Between two actions lies the *glue*: the end
of the assistant's turn when the sample was cut before it, the chat template's own text, the observation as a user
message, and the generation prompt. The glue depends on the observation alone, so a turn costs the same at any depth.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jinja2 import TemplateError
from pydantic import Field, model_validator

from verl_bpo.options import ConfigError, Options
from verl_bpo.sandbox.base import Observation
from verl_bpo.sandbox.turns import Action

_PLACEHOLDER = re.compile(r"<[^<>]+>")
# Stands for an assistant message while the template's text around it is looked up. Any template keeps a plain word.
ACTION_MARK = "verlBpoActionGoesHere"
_CHARACTERS_OF_A_TOKEN = 8
"""More than they have in the mean, in any text that a policy is to read."""
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_ACTION_TAG = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_FORM = "<think>your reasoning</think><action>the action</action>"

DEFAULT_SYSTEM = {
    "bare": "You act in a text world. Answer with the next action and nothing else.",
    "think_action": (
        "You act in a text world, one action per turn. First reason about what to do, then give the action, in exactly "
        f"this form: {_FORM}"
    ),
    "tools": "",
}


class PromptConfig(Options):
    """How the policy sees the world and how its answers are read."""

    template: Literal["bare", "think_action", "tools"] = "think_action"
    """``bare``: the assistant's message is the action itself. ``think_action``: reasoning, then the action, in tags.
    ``tools``: the model calls tools in its own form; an answer without a call is a text action."""
    tool_parser: str = "auto"
    """``tools``: how calls are read, by the name of one of verl's parsers (``hermes``, ``qwen3_coder``, ``gpt-oss``, ...).
    ``auto`` takes the one that reads what the chat template writes, and is refused where there isn't just one."""
    system: str | None = None
    """System message. None takes the default of ``template``; an empty text sends none."""
    list_actions: bool = False
    """Append the admissible actions, where the environment lists them, to each observation."""
    max_actions_listed: Annotated[int, Field(ge=1)] = 50
    """List at most this many; how many were left out is said."""
    max_observation_tokens: Annotated[int, Field(ge=16)] = 1024
    """A longer observation loses its middle. The list of actions isn't counted."""
    context: Literal["full", "window"] = "full"
    """``full``: the whole conversation, append-only. ``window``: a new, bounded prompt for each turn."""
    window_turns: Annotated[int, Field(ge=0)] = 4
    """``window``: how many of the latest actions stay in the prompt, each with the observation that it led to."""

    @model_validator(mode="after")
    def _check(self) -> PromptConfig:
        if self.template == "tools" and self.context == "window":
            raise ConfigError("bpo.prompt.template=tools keeps the whole conversation: set bpo.prompt.context=full")
        return self

    @property
    def system_text(self) -> str:
        """The system message to send; empty for none."""
        return DEFAULT_SYSTEM[self.template] if self.system is None else self.system


@dataclass(frozen=True)
class Conversation:
    """What the model has seen at one decision point. Immutable: forks share it and go on from it independently."""

    ids: list[int]
    """Token ids to sample the next action from."""
    added: list[int] = field(default_factory=list)
    """What the latest turn appended after its action. Empty at the start and in ``window`` context."""
    task_text: str = ""
    """Text of the first observation (``window`` context only)."""
    history: tuple[tuple[str, str], ...] = ()
    """The latest (observation text, action) pairs, at most ``window_turns`` of them (``window`` context only)."""
    observation_text: str = ""
    """Text of the latest observation (``window`` context only)."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the task's tools (template ``tools`` only)."""


@dataclass(frozen=True)
class Answer:
    """What the policy said, as the world may take it."""

    text: str
    action: Action | None
    """None: it holds none, so nothing may be executed."""
    valid: bool
    told: Observation | None = None
    """What follows in place of the world's own answer where there is no action: a turn passes, and nothing is done."""


class Prompter:
    """Turns observations into tokens and sampled tokens into actions, for one tokenizer and one prompt style.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        config: the prompt style.
        chat_template_kwargs: passed on to the chat template (``enable_thinking=False``, ...).
        eos_token_ids: tokens that the model ends its turns with, beside the tokenizer's own.

    Raises:
        ValueError: the tokenizer has no chat template, or the template refuses this prompt style's messages, or leaves out
            what the assistant said, or ends its turn in no token.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: PromptConfig,
        chat_template_kwargs: dict[str, Any] | None = None,
        eos_token_ids: Collection[int] = (),
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "this tokenizer has no chat template; use an instruct model or set tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        self.config = config
        self._template_kwargs = dict(chat_template_kwargs or {})
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = (
            re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        )
        try:
            glue = self._glue_ids([{"role": "user", "content": "observation"}])
        except TemplateError as error:
            raise ValueError(
                f"the chat template refuses this prompt style: {error}; try bpo.prompt.system=''"
            ) from error
        self._read_ends(glue, {tokenizer.eos_token_id} - {None} | set(eos_token_ids))

    def _read_ends(self, glue: Sequence[int], own: set[int]) -> None:
        """Where an action ends.

        Args:
            glue: what follows one.
            own: tokens that the model or its tokenizer call ends.
        """
        eos = self.tokenizer.eos_token_id
        first = next((token for token in glue if not self._is_space(token)), None)
        if first not in own and not self._is_special(first):
            first = None
        # A template may write nothing behind an answer but the beginning of the next message.
        opens = first is not None and first != eos and not any(map(self._is_special, self._head(glue, first)))
        end = eos if first is None or (opens and eos is not None) else first
        if end is None:
            raise ValueError(
                "nothing ends the assistant's turn: neither does the chat template write a special token behind it, nor has "
                "the tokenizer an eos_token; set tokenizer.eos_token"
            )
        self.end_of_turn_id = end
        """The token with which the template ends an assistant message, and the policy its action."""
        self.stop_ids = frozenset(own | {end} | {first} - {None})
        """An action ends after one of these, in training as in evaluation, whichever engine samples it."""
        self._closing = [] if first is None or opens else self._end_of_message(glue)

    @property
    def windowed(self) -> bool:
        """Whether each turn has a prompt of its own (``window`` context)."""
        return self.config.context == "window"

    def first(self, observation: Observation) -> Conversation:
        """The conversation at the initial state."""
        ids = self._encode(self._render(self._opening(self.user_text(observation))))
        if self.windowed:
            return Conversation(ids, task_text=observation.text, observation_text=observation.text)
        return Conversation(ids)

    def observe(
        self,
        conversation: Conversation,
        action_ids: Sequence[int],
        observation: Observation,
        action: Action | None = None,
    ) -> Conversation:
        """The conversation one turn later; ``conversation`` itself stays as it is.

        Args:
            action_ids: what was sampled, verbatim, with or without its end-of-turn token.
            observation: the world's answer.
            action: the parsed action, shown in later ``window`` prompts; None looks for it in ``action_ids``.
        """
        if not self.windowed:
            glue = self.glue(action_ids, observation)
            return Conversation([*conversation.ids, *action_ids, *glue], glue)
        action = self.parse(self.decode(action_ids))[0] if action is None else action
        action = "(no action)" if action is None else action
        turns = self.config.window_turns
        history = (*conversation.history, (conversation.observation_text, action))[-turns:] if turns else ()
        ids = self.window_prompt(conversation.task_text, history, observation)
        return Conversation(ids, [], conversation.task_text, history, observation.text)

    def glue(self, action_ids: Sequence[int], observation: Observation) -> list[int]:
        """Token ids between ``action_ids`` and the next action (``full`` context)."""
        return self._joined(action_ids, self._glue_ids([{"role": "user", "content": self.user_text(observation)}]))

    def _joined(self, action_ids: Sequence[int], ids: list[int]) -> list[int]:
        """``ids``, what the template writes behind an answer, without what the answer itself ends with."""
        # Sampling stops at an end of turn, which then is the action's own last token; a cut action lacks it. One that the
        # model ended in its own way stands for the template's.
        last = action_ids[-1] if len(action_ids) else None
        if last not in self.stop_ids:
            return ids
        if last in self._closing:
            return ids[self._closing.index(last) + 1 :]
        return ids[1:] if last == ids[0] else ids[len(self._closing) :]

    def window_prompt(self, task_text: str, history: Sequence[tuple[str, str]], observation: Observation) -> list[int]:
        """Token ids of a bounded prompt: the task, the last ``window_turns`` actions with their outcomes, the actions.

        Args:
            task_text: text of the first observation, which states the task.
            history: (observation text, action taken there) pairs, oldest first; only the latest are used.
            observation: the present one.
        """
        history = history[max(0, len(history) - self.config.window_turns) :]
        if not history and observation.text == task_text:
            return self._encode(self._render(self._opening(self.user_text(observation))))
        # The first pair's own observation is either the task or older than the window.
        outcomes = [text for text, _ in history[1:]] + [observation.text]
        actions = [f"> {action}" for _, action in history] or ["..."]
        steps = [f"{action}\n{self._shorten(text)}" for action, text in zip(actions, outcomes)]
        text = "\n\n".join([self._shorten(task_text), *steps]) + self._action_list(observation)
        return self._encode(self._render(self._opening(self._defuse(text))))

    def action_ids(self, action: str, thought: str = "") -> list[int]:
        """Token ids of an assistant message that takes ``action``, its end-of-turn token included."""
        text = action if self.config.template == "bare" else f"<think>{thought}</think><action>{action}</action>"
        return [*self._encode(text), self.end_of_turn_id]

    def decode(self, action_ids: Sequence[int]) -> str:
        """The text of a sampled action, without special tokens."""
        # transformers 4 drops spaces before punctuation where the tokenizer's files ask for it.
        return self.tokenizer.decode(list(action_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def forced_tokens(
        self,
        action_ids: Sequence[int],
        admissible: Sequence[str] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """How many of a sample's first tokens the form of an answer dictates: they spell ``<think>``, or in ``bare`` what all
        admissible actions begin with. A sample that departs from it sooner has as many as it kept to."""
        form = "<think>"
        if self.config.template == "bare":
            form = os.path.commonprefix([_PLACEHOLDER.split(action)[0].lower() for action in admissible or ()])
        count = 0
        for token in action_ids if form else ():
            spelt = self.decode(action_ids[: count + 1]).lstrip().lower()
            if token == self.end_of_turn_id or not form.startswith(spelt):
                break
            count += 1
        return count

    def read(
        self, conversation: Conversation, action_ids: Sequence[int], admissible: tuple[str, ...] | None = None
    ) -> Answer:
        """What was sampled after ``conversation``, understood."""
        text = self.decode(action_ids)
        action, valid = self.parse(text, admissible)
        return Answer(text, action, valid, self.no_action(text, admissible) if action is None else None)

    def parse(self, text: str, admissible: Sequence[str] | None = None) -> tuple[str | None, bool]:
        """The action in the model's text, and whether it is valid. None: the text holds none, so nothing may be executed
        (see :meth:`no_action`).

        ``bare``: the action is the first line that isn't empty. ``think_action``: what stands in the last closed
        ``<action>`` outside of ``<think>``, so that an answer cut off before its tags close has none.

        Valid means: there is an action and, where the environment lists its admissible actions, it is one of them (letter
        case and spacing aside; the environment's own spelling is returned) or fills in the placeholder of one, as
        ``search[<query>]``. One that isn't admissible goes to the world all the same, which answers it.
        """
        if self.config.template == "bare":
            action = next(iter(text.strip().splitlines()), "").strip()
            if not action:
                return text.strip(), False
        else:
            tags = _ACTION_TAG.findall(without_thoughts(text))
            action = tags[-1].strip() if tags else ""
            if not action:
                return None, False
        if admissible is None:
            return action, True
        key = _normal(action)
        match = next((known for known in admissible if _normal(known) == key), None)
        if match is not None:
            return match, True
        return action, any(_fills_in(key, _normal(known)) for known in admissible)

    def no_action(self, text: str, admissible: tuple[str, ...] | None = None) -> Observation:
        """What follows an answer without an action, in place of the world's own: a turn passes, and nothing is done.

        Args:
            text: the model's.
            admissible: the actions of the state, which is the same afterwards.
        """
        answer = without_thoughts(text)
        if "<think>" in text and "</think>" not in text:
            problem = "<think> isn't closed"
        elif _ACTION_TAG.search(answer):
            problem = "<action> is empty"
        elif "<action>" in answer:
            problem = "<action> isn't closed"
        else:
            problem = "it has no <action>"
        return Observation(
            f"Your answer holds no action ({problem}), so nothing was done. The form is: {_FORM}", actions=admissible
        )

    def user_text(self, observation: Observation) -> str:
        """The user message for an observation."""
        return self._defuse(self._shorten(observation.text) + self._action_list(observation))

    def _opening(self, user: str) -> list[dict[str, Any]]:
        system = self.config.system_text
        return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": user}]

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        options = {"add_generation_prompt": True, **self._template_kwargs, **options}
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _glue_ids(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """What the template writes behind an answer that ``messages`` follow."""
        # Rendered after a short stand-in for the history: special tokens delimit messages, so neither the template's
        # text nor its tokens depend on what came before the end of the assistant's turn.
        stand_in = [*self._opening("observation"), {"role": "assistant", "content": ACTION_MARK}]
        _, mark, behind = self._render([*stand_in, *messages], **options).partition(ACTION_MARK)
        if not mark:
            raise ValueError(
                "the chat template leaves out what the assistant said: set another tokenizer.chat_template"
            )
        return self._encode(behind)

    def _head(self, glue: Sequence[int], first: int) -> list[int]:
        """What stands between the first token behind an answer and the next message's text."""
        text = self._encode(self.user_text(Observation("observation")))
        rest = list(glue[list(glue).index(first) + 1 :])
        length = next((i for i in range(len(rest)) if rest[i : i + len(text)] == text), len(rest))
        return rest[:length]

    def _end_of_message(self, glue: Sequence[int]) -> list[int]:
        """What the template writes behind an assistant's words up to its last token that ends a turn."""
        length = 0
        for place, token in enumerate(glue):
            if token in self.stop_ids:
                length = place + 1
            elif length or not self._is_space(token):
                break
        return list(glue[:length])

    def _is_space(self, token: int) -> bool:
        return not self._is_special(token) and not self.tokenizer.decode([token]).strip()

    def _is_special(self, token: int) -> bool:
        known = self.tokenizer.added_tokens_decoder.get(token)
        return known is not None and known.special

    def _shorten(self, text: str) -> str:
        limit = self.config.max_observation_tokens
        if len(text.encode()) <= limit:  # a token covers at least one byte: the common case needs no tokenizer
            return text
        most = _CHARACTERS_OF_A_TOKEN * limit
        whole = len(text) <= 2 * most
        # Rollouts share one event loop, which tokenising a megabyte would hold for seconds: only both ends are tokenised.
        first, last = (self._encode(text),) * 2 if whole else (self._encode(text[:most]), self._encode(text[-most:]))
        if whole and len(first) <= limit:
            return text
        head, tail = self.decode(first[: limit - limit // 2]), self.decode(last[-(limit // 2) :])
        out = f"{len(first) - limit} tokens" if whole else f"{len(text) - len(head) - len(tail)} characters"
        return f"{head}\n[... {out} left out ...]\n{tail}"

    def _action_list(self, observation: Observation) -> str:
        if not self.config.list_actions or not observation.actions:
            return ""
        shown = observation.actions[: self.config.max_actions_listed]
        more = len(observation.actions) - len(shown)
        return "\nActions:\n" + "\n".join(shown) + (f"\n(and {more} more)" if more else "")

    def _defuse(self, text: str) -> str:
        """Break up special tokens that the world wrote, which could otherwise end its message and forge others."""
        return self._special.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text) if self._special else text


def without_thoughts(text: str) -> str:
    """What an answer says outside of ``<think>``. One that isn't closed reaches to the end; one that was opened by the
    prompt, from the beginning."""
    text = _THOUGHT.sub("", text)
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _fills_in(action: str, known: str) -> bool:
    """Whether ``action`` is ``known`` with some text in place of each placeholder, such as ``<query>``."""
    parts = _PLACEHOLDER.split(known)
    return len(parts) > 1 and re.fullmatch(".*\\S.*".join(map(re.escape, parts)), action) is not None


def _normal(action: str) -> str:
    return " ".join(action.lower().split())
