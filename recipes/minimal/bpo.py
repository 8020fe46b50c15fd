"""BPO (Branching Policy Optimization) from top to bottom: a tiny policy learns to find a number in three guesses.

    python recipes/minimal/bpo.py             # BPO and RLOO at equal environment steps: a table and bpo.png
    python recipes/minimal/bpo.py --forks 4   # any option of Args

Guessing at random wins 30% of the games, binary search 7 of 9. Trees are rolled and siblings compared by the parts that train
language models too: verl_bpo.sandbox, verl_bpo.tree, verl_bpo.advantages. No verl, no Ray. Both methods learn the game; which
one is ahead changes with --seed.
"""

import argparse
import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.distributions import Categorical

from verl_bpo.advantages.bpo import BPO
from verl_bpo.sandbox import SandboxPool
from verl_bpo.tree.branching import Branching
from verl_bpo.tree.budget import Budget
from verl_bpo.tree.forest import Forest
from verl_bpo.tree.prompting import Answer, Conversation
from verl_bpo.tree.rollout import Generation, TreeRollout
from verl_bpo.tree.selectors import Threshold

GAME = f"{Path(__file__).resolve().parents[1]}/own_env/number_game.py:NumberGame"
WORDS = ["", *(f"guess {i}" for i in range(1, 10)), "Higher.", "Lower.", "Right."]  # a token is a place in this list


@dataclass
class Args:
    env_steps: int = 20000  # guesses that each method may make
    games: int = 16  # games a step, one tree each
    leaves: int = 8  # N: trajectories a tree
    forks: int = 2  # K: alternative guesses at a branch point
    threshold: float = 1.0  # branch where the entropy of the guess is at least this many nats
    lr: float = 1e-2  # of Adam
    epochs: int = 4  # updates a step
    clip: float = 0.2  # PPO's epsilon
    entropy_bonus: float = 0.03  # keeps guesses open that look equally good
    seed: int = 0  # of weights, samples and secrets
    out: str = "bpo.png"  # the curves


class Policy(nn.Module):
    """States int64 [N, 4], the last two guesses and answers -> N distributions over the 9 guesses, all alike at first."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(len(WORDS), 16), nn.Flatten(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 9)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, states):
        return Categorical(logits=self.head(self.body(states)))


class Prompter:
    """From observations to the policy's tokens, and from its tokens to actions."""

    windowed = True  # each turn has a prompt of its own

    def first(self, observation):
        return Conversation([0] * 4)

    def observe(self, conversation, action_ids, observation, action):
        return Conversation([*conversation.ids[2:], *action_ids, WORDS.index(observation.text)])

    def read(self, conversation, action_ids, admissible):
        guess = WORDS[action_ids[0]]
        return Answer(text=guess, action=guess, valid=True)


async def roll(policy, args, branch, games, pool, executor):
    """One tree per game: the backbone's sandbox is snapshot where the policy is unsure, K alternatives are forked there and
    rolled to their ends. What is then left of N leaves starts at the root."""

    async def tree(game):
        async def generate(prompt_ids, max_tokens, place):
            with torch.no_grad():
                guess = policy(torch.tensor([prompt_ids]))
            # By the place in the tree, so that a run can be repeated whatever of it happens first.
            (index,) = random.Random(f"{game}/{place}").choices(range(9), guess.probs[0].tolist())
            return Generation([index + 1], guess.log_prob(torch.tensor([index])).tolist(), guess.entropy().tolist())

        budget = Budget("leaves", args.leaves, max_turns=3, max_action_tokens=1)
        with pool.open() as world:
            rollout = TreeRollout(generate, world, executor, Prompter(), branch, budget, 4, 1)
            return await rollout.run("game", seed=game)

    return await asyncio.gather(*map(tree, games))


def compare(trees):
    """The turns that something can be learned from: states, guesses, their old log-probabilities, their advantages."""
    # A_i = R_i - mean of R_j over the other siblings j, for every turn of sibling i up to the next branch point.
    named = {str(i): tree for i, tree in enumerate(trees)}
    found = BPO(baseline="loo")(Forest.of(named, prompts={name: name for name in named}))
    # Every turn of a tree once, however many leaves share it; not at all if it has no siblings to be compared with.
    turns = [node for tree in trees for node in tree.nodes]
    states = torch.tensor([turn.prompt_ids for turn in turns])
    guesses = torch.tensor([turn.action_ids[0] - 1 for turn in turns])
    logprobs = torch.tensor([turn.action_logprobs[0] for turn in turns])
    return [x[found.valid] for x in (states, guesses, logprobs, found.advantage.float())]


def loss_of(policy, args, states, guesses, old_logprobs, advantages):
    """PPO's clipped loss, a mean over turns (arXiv 1707.06347, eq. 7 and 9)."""
    guess = policy(states)
    ratio = (guess.log_prob(guesses) - old_logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - args.clip, 1 + args.clip) * advantages)
    return -(gain + args.entropy_bonus * guess.entropy()).mean()


def train(args, branch):
    """Returns (environment steps so far, share of the backbones that won) after each step."""
    torch.manual_seed(args.seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    curve, steps, game = [], 0, args.seed * 10**6
    with SandboxPool(GAME, size=args.games, isolation="none") as pool, ThreadPoolExecutor(1) as executor:
        while steps < args.env_steps:
            trees = asyncio.run(roll(policy, args, branch, range(game, game + args.games), pool, executor))
            game += args.games
            steps += sum(tree.counters["env_steps"] for tree in trees)
            curve.append((steps, sum(tree.won(tree.trajectories[0]) for tree in trees) / len(trees)))
            batch = compare(trees)
            for _ in range(args.epochs):
                optimizer.zero_grad()
                loss_of(policy, args, *batch).backward()
                optimizer.step()
    return curve


def report(curves, args, parts=8):
    """Games won in each eighth of the environment steps, as a table and as curves."""
    edges = [args.env_steps * part / parts for part in range(parts + 1)]
    means = {}
    for name, curve in curves.items():
        won = [[win for steps, win in curve if low < steps <= high] for low, high in zip(edges, edges[1:])]
        means[name] = [100 * sum(part) / max(len(part), 1) for part in won]
        plt.plot(edges[1:], means[name], marker="o", label=name)
    print("environment steps" + "".join(f"{name:>8}" for name in means))
    for row in zip(edges[1:], *means.values()):
        print(f"{row[0]:17,.0f}" + "".join(f"{mean:7.0f}%" for mean in row[1:]))
    plt.axhline(100 * 7 / 9, color="grey", linestyle=":", label="binary search")
    plt.xlabel("environment steps")
    plt.ylabel("games won (%)")
    plt.legend()
    plt.savefig(args.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Args):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    args = Args(**vars(parser.parse_args()))
    bpo = Branching(selector=Threshold(threshold=args.threshold), forks=args.forks)
    rloo = Branching(root_samples=args.leaves)  # a tree that branches at its root only
    report({"BPO": train(args, bpo), "RLOO": train(args, rloo)}, args)


if __name__ == "__main__":
    main()
