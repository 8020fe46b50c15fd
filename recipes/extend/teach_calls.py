"""A tiny policy that knows the form of tool calls and nothing else: it has seen random ones.

python recipes/extend/teach_calls.py trl:recipes/extend/cups.py:Cups runs/cups/warmstart
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from imitation.cloning import Example, batches, cloning_loss  # noqa: E402
from imitation.policy import make_model, make_tokenizer, save  # noqa: E402

from verl_bpo.commands.check_env import tried  # noqa: E402
from verl_bpo.integration.tool_parsers import find_parser  # noqa: E402
from verl_bpo.sandbox import ToolCalls  # noqa: E402
from verl_bpo.sandbox.asynchronous import settled  # noqa: E402
from verl_bpo.sandbox.loading import load_environment  # noqa: E402
from verl_bpo.sandbox.tools import problem_of  # noqa: E402
from verl_bpo.tree.prompting import PromptConfig  # noqa: E402
from verl_bpo.tree.tool_prompting import ToolPrompter  # noqa: E402

TEMPLATE = (
    "{%- if tools %}<|im_start|>tools{%- for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    '{%- for call in m.tool_calls or [] %}{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A short one: a context of a few hundred tokens is enough for a tiny policy."""


def episode(environment, task: str, turns: int, rng: random.Random) -> tuple[list, list]:
    """Observations and calls of a random player."""
    observations, actions = [settled(environment.reset(task))], []
    known = observations[0].tools
    right = [a for a in tried(known) if isinstance(a, ToolCalls) and not any(problem_of(c, known) for c in a.calls)]
    right = [action for action in right if len(action.calls) == 1]
    for _ in range(turns):
        actions.append(rng.choice(right))
        observations.append(settled(environment.step(actions[-1])))
        if observations[-1].done:
            break
    return observations, actions


def example(prompter: ToolPrompter, observations: list, actions: list) -> Example:
    """An episode's tokens, of which the calls are learned."""
    conversation, mask = prompter.first(observations[0]), []
    mask = [False] * len(conversation.ids)
    for action, observation in zip(actions, observations[1:]):
        ids = prompter.action_ids(action)
        conversation = prompter.observe(conversation, ids, observation, action)
        mask += [True] * len(ids) + [False] * len(conversation.added)
    return Example(conversation.ids, mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env", help="an environment that is acted on by tools")
    parser.add_argument("out", type=Path, help="folder of the policy")
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(0)
    rng, environment = random.Random(0), load_environment(args.env)()
    played = [episode(environment, f"teach-{number}", args.turns, rng) for number in range(args.episodes)]
    texts = [
        text for observations, actions in played for text in [o.text for o in observations] + list(map(str, actions))
    ]
    tokenizer = make_tokenizer([*texts, TEMPLATE, '<tool_call>{"name": "lift", "arguments": {"cup": "'], 512, r"\w+")
    tokenizer.chat_template, prompt = TEMPLATE, PromptConfig(template="tools")
    prompter = ToolPrompter(tokenizer, prompt, find_parser(tokenizer, "auto"))
    examples = [example(prompter, *one) for one in played]
    model = make_model(tokenizer, 64, 2, 4)
    optimizer, source = torch.optim.AdamW(model.parameters(), lr=2e-3), batches(examples, 16, rng)
    for step in range(1, args.steps + 1):
        loss = cloning_loss(model, next(source))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: {loss.item():.3f} nats a token")
    record = {"options": {"prompt": prompt.model_dump(), "env": args.env}}
    save(model.eval(), tokenizer, prompter.end_of_turn_id, record, args.out)
    print(f"{args.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
