"""What the agent loop takes from an engine."""

import asyncio
from types import SimpleNamespace

import pytest
from verl.workers.rollout.replica import TokenOutput

from verl_bpo.config.schema import build
from verl_bpo.integration.agent_loop import TreeAgentLoop
from verl_bpo.sandbox.base import NoTaskCanWork, SnapshotUnsupported
from verl_bpo.sandbox.loading import EnvironmentUnavailable
from verl_bpo.tree.rollout import TreeRollout
from verl_bpo.tree.topology import Tree


def sample(output: TokenOutput, **bpo):
    """One action from an engine that answers with ``output``."""

    class Engine:
        async def generate(self, **request):
            return output

    loop = object.__new__(TreeAgentLoop)
    loop.bpo, loop.rollout_config, loop.server_manager = build(bpo, "paper"), SimpleNamespace(name="x"), Engine()
    return asyncio.run(loop._generator({}, "1/0/0")([5, 6, 7], 4, "0/0"))


def test_costs_fall_back_to_the_prompt_less_what_was_cached():
    found = sample(
        TokenOutput(
            token_ids=[1, 2], log_probs=[-0.5, -1.0], extra_fields={"num_cached_tokens": 2, "token_entropy": [1, 2]}
        )
    )
    assert (found.cached_tokens, found.prefill_tokens, found.logprobs) == (2, 1, [-0.5, -1.0])


@pytest.mark.parametrize("logprobs", [None, [-0.5]])
def test_an_engine_that_leaves_out_log_probs_is_refused(logprobs):
    with pytest.raises(NoTaskCanWork, match="rollout engine x returned [01] log-probs for 2 tokens"):
        sample(TokenOutput(token_ids=[1, 2], log_probs=logprobs, extra_fields={"token_entropy": [1.0, 1.0]}))


def test_entropies_are_needed_only_where_branching_goes_by_them():
    output = TokenOutput(token_ids=[1, 2], log_probs=[-0.5, -1.0], extra_fields={})
    assert sample(output, branch={"selector": "every"}).entropy == []
    with pytest.raises(NoTaskCanWork, match="bpo.branch.selector=most_uncertain needs the entropy"):
        sample(output)


def test_seeds_of_a_place_are_the_same_in_every_run_and_differ_between_places():
    loop = object.__new__(TreeAgentLoop)
    loop.bpo = build({"seed": 3}, "paper")
    assert loop._hash("1/0/0/0/1") == loop._hash("1/0/0/0/1") != loop._hash("1/0/0/0/2")
    loop.bpo = build({}, "paper")
    assert loop._hash("1/0/0/0/1") != loop._hash("1/0/0/0/1")


@pytest.mark.parametrize(
    "error, fatal, lost",
    [
        (ValueError("the prompt leaves no room"), None, ["ValueError: the prompt leaves no room"]),
        (KeyError("x"), None, ["KeyError: 'x'"]),
        (SnapshotUnsupported("use replay"), "task a: use replay", []),
        (EnvironmentUnavailable("install it"), "task a: install it", []),
        (NoTaskCanWork("no log-probs"), "task a: no log-probs", []),
    ],
)
def test_a_fault_costs_its_task_unless_no_task_can_work(monkeypatch, error, fatal, lost):
    """One odd item must not end a run that has trained for hours."""
    tree = rolled(monkeypatch, error)
    assert (tree.fatal, [str(failure) for failure in tree.failures]) == (fatal, lost)
    assert tree.counters.get("failed", 0) == len(lost)


def rolled(monkeypatch, error):
    """The tree of a task whose rollout raises ``error``."""

    async def run(self, task, seed, row=None):
        raise error

    monkeypatch.setattr(TreeRollout, "run", run)
    loop = object.__new__(TreeAgentLoop)
    bpo = build({"env": {"name": "x"}}, "paper")
    play = SimpleNamespace(
        prompter=lambda *parts, **options: SimpleNamespace(stop_ids={1}, windowed=False),
        max_prompt_tokens=9,
        max_response_tokens=9,
        config=bpo,
    )
    world = SimpleNamespace(open=lambda: SimpleNamespace(close=lambda: None))
    loop.shared = SimpleNamespace(play=play, slots=asyncio.Semaphore(1), executor=None, pools={"x": world})
    loop.bpo, loop.tokenizer = bpo, SimpleNamespace(eos_token_id=0)
    loop.loop = asyncio.new_event_loop()
    (output,) = loop.loop.run_until_complete(
        loop.run({"_validate": False, "_models": ()}, extra_info={"task": "a"}, session_id=0, global_steps=3)
    )
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (2, 2)
    return Tree.from_dict(output.extra_fields["tree"])
