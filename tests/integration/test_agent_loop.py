"""What the agent loop takes from an engine."""

import asyncio
from types import SimpleNamespace

import pytest
from verl.workers.rollout.replica import TokenOutput

from verl_bpo.config.schema import build
from verl_bpo.integration.agent_loop import TreeAgentLoop


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
    with pytest.raises(ValueError, match="rollout engine x returned [01] log-probs for 2 tokens"):
        sample(TokenOutput(token_ids=[1, 2], log_probs=logprobs, extra_fields={"token_entropy": [1.0, 1.0]}))


def test_entropies_are_needed_only_where_branching_goes_by_them():
    output = TokenOutput(token_ids=[1, 2], log_probs=[-0.5, -1.0], extra_fields={})
    assert sample(output, branch={"selector": "every"}).entropy == []
    with pytest.raises(ValueError, match="bpo.branch.selector=threshold needs the entropy"):
        sample(output)


def test_seeds_of_a_place_are_the_same_in_every_run_and_differ_between_places():
    loop = object.__new__(TreeAgentLoop)
    loop.bpo = build({"seed": 3}, "paper")
    assert loop._hash("1/0/0/0/1") == loop._hash("1/0/0/0/1") != loop._hash("1/0/0/0/2")
    loop.bpo = build({}, "paper")
    assert loop._hash("1/0/0/0/1") != loop._hash("1/0/0/0/1")
