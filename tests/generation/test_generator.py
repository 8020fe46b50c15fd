from concurrent.futures import Future

import pytest
import torch
from tiny import EOS, prompts, reference, tiny_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from verl_bpo.generation.generator import BatcherThread, Completion, ContinuousBatcher
from verl_bpo.generation.sampling import SamplingParams


@pytest.fixture
def model():
    return tiny_model()


def assert_exact(model, prompt: list[int], completion: Completion, temperature: float = 1.0) -> None:
    logprobs, entropies = reference(model, prompt, completion.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(completion.entropies), entropies, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (Qwen2Config, Qwen2ForCausalLM),
        (Qwen3Config, Qwen3ForCausalLM),
        (LlamaConfig, LlamaForCausalLM),
    ],
)
def test_a_mixed_batch_reports_what_plain_forward_passes_compute(config, architecture):
    """Joins, leaves, prefix hits, temperatures and lengths all differ; 24 requests share 5 rows and a small cache."""
    model = tiny_model(config, architecture)
    batcher = ContinuousBatcher(
        model, range(1, 9), max_num_seqs=5, max_batched_tokens=64, prefix_cache_tokens=160, block_size=4
    )
    shared = prompts(1, 40, 40)[0]
    requests = [shared[: 5 * (i % 8)] + p for i, p in enumerate(prompts(24, 1, 30, seed=1))]
    params = [SamplingParams(temperature=0.5 + 0.1 * (i % 7), max_tokens=1 + (7 * i) % 23) for i in range(24)]
    completions = batcher.generate(requests, params)
    assert sum(c.num_cached_tokens > 0 for c in completions) >= 5
    assert {c.stop_reason for c in completions} == {"stop", "length"}
    for prompt, p, completion in zip(requests, params, completions):
        assert_exact(model, prompt, completion, p.temperature)
        assert completion.num_cached_tokens + completion.num_prefill_tokens == len(prompt)


def test_requests_that_end_in_one_step_all_end_there(model):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 5, 5, 3, 3, 1, 1, 9)]
    completions = ContinuousBatcher(model, [EOS]).generate(prompts(8), params)
    assert [len(c.token_ids) for c in completions] == [p.max_tokens for p in params]
    assert [len(c.entropies) for c in completions] == [p.max_tokens for p in params]


def test_greedy_output_is_that_of_generate(model):
    for prompt in prompts(4, seed=2):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        (completion,) = ContinuousBatcher(model, [EOS]).generate(
            [prompt], SamplingParams(temperature=0.0, max_tokens=20)
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


def test_ordinary_calls_of_the_model_stay_as_they_were(model):
    ids = torch.tensor([prompts(1)[0]])
    with torch.no_grad():
        before = model(ids).logits
        padded = torch.nn.functional.pad(ids, (3, 0))
        mask = (padded != 0).long()
        before_padded = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0)).logits
        ContinuousBatcher(model, [EOS])
        torch.testing.assert_close(model(ids).logits, before)
        after_padded = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0)).logits
    torch.testing.assert_close(after_padded[:, 3:], before_padded[:, 3:])


def test_a_seeded_request_gives_the_same_tokens_whatever_runs_beside_it(model):
    prompt, *others = prompts(9, seed=3)
    params = SamplingParams(seed=11, max_tokens=24, ignore_eos=True)
    (alone,) = ContinuousBatcher(model, [EOS]).generate([prompt], params)
    noise = [SamplingParams(temperature=1.3, max_tokens=3 + 4 * i) for i in range(len(others))]
    batcher = ContinuousBatcher(model, [EOS], max_num_seqs=4, seed=5)
    crowd = batcher.generate([*others[:4], prompt, *others[4:]], [*noise[:4], params, *noise[4:]])
    assert crowd[4].token_ids == alone.token_ids
    (other,) = ContinuousBatcher(model, [EOS]).generate(
        [prompt], SamplingParams(seed=12, max_tokens=24, ignore_eos=True)
    )
    assert other.token_ids != alone.token_ids


def test_unseeded_requests_differ_from_each_other_and_repeat_with_the_batchers_seed(model):
    prompt = prompts(1)[0]
    params = SamplingParams(max_tokens=16, ignore_eos=True)

    def run(seed: int) -> list[list[int]]:
        return [c.token_ids for c in ContinuousBatcher(model, [EOS], seed=seed).generate([prompt] * 4, params)]

    first = run(0)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert run(0) == first
    assert run(1) != first


# --- prefix cache ----------------------------------------------------------------------------------------------------


def test_the_next_turn_computes_only_what_the_last_one_did_not(model):
    batcher = ContinuousBatcher(model, [EOS], block_size=4)
    prompt = prompts(1, 30, 30)[0]
    params = SamplingParams(max_tokens=11, ignore_eos=True, seed=0)
    (turn,) = batcher.generate([prompt], params)
    observation = [7, 8, 9]
    longer = prompt + turn.token_ids + observation
    (next_turn,) = batcher.generate([longer], params)
    # The last sampled token was never run: 40 of 41 tokens are known, which is ten whole blocks.
    assert next_turn.num_cached_tokens == 40
    assert next_turn.num_prefill_tokens == len(longer) - 40
    assert_exact(model, longer, next_turn)


def test_siblings_that_come_together_compute_their_prompt_once(model):
    batcher = ContinuousBatcher(model, [EOS], block_size=4)
    prompt = prompts(1, 42, 42)[0]
    completions = batcher.generate([prompt] * 6, SamplingParams(max_tokens=5))
    assert sorted(c.num_prefill_tokens for c in completions) == [2, 2, 2, 2, 2, 42]
    for completion in completions:
        assert_exact(model, prompt, completion)


def test_a_whole_prompt_in_the_cache_still_gets_its_last_token_computed(model):
    batcher = ContinuousBatcher(model, [EOS], block_size=4)
    prompt = prompts(1, 32, 32)[0]
    for _ in range(2):
        (completion,) = batcher.generate([prompt], SamplingParams(max_tokens=3))
    assert completion.num_cached_tokens == 28
    assert_exact(model, prompt, completion)


def test_the_same_tokens_after_other_tokens_are_not_the_same_prefix(model):
    batcher = ContinuousBatcher(model, [EOS], block_size=4)
    a, b, c, d, end = prompts(5, 4, 4, seed=8)
    batcher.generate([a + b, c + d], SamplingParams(max_tokens=1))
    (completion,) = batcher.generate([a + d + end], SamplingParams(max_tokens=4))
    assert completion.num_cached_tokens == 4
    assert_exact(model, a + d + end, completion)


def test_the_cache_keeps_its_budget_and_drops_what_was_used_least_recently(model):
    batcher = ContinuousBatcher(model, [EOS], prefix_cache_tokens=64, block_size=4)
    first, second, third = prompts(3, 28, 28, seed=4)
    one = SamplingParams(max_tokens=1)
    batcher.generate([first], one)
    batcher.generate([second], one)
    batcher.generate([first], one)  # now `second` is the older one
    batcher.generate([third], one)
    assert len(batcher.prefixes.index) <= 16
    (again,) = batcher.generate([first], one)
    assert again.num_cached_tokens == 24
    (again,) = batcher.generate([second], one)
    assert again.num_cached_tokens < 24
    assert_exact(model, second, again)


def test_a_prompt_larger_than_the_cache_is_computed_all_the_same(model):
    batcher = ContinuousBatcher(model, [EOS], prefix_cache_tokens=16, block_size=4)
    prompt = prompts(1, 50, 50)[0]
    for completion in batcher.generate([prompt] * 3, SamplingParams(max_tokens=4)):
        assert completion.num_cached_tokens <= 16
        assert_exact(model, prompt, completion)


def test_without_a_cache_every_prompt_is_computed_whole(model):
    batcher = ContinuousBatcher(model, [EOS], prefix_cache_tokens=0)
    prompt = prompts(1, 40, 40)[0]
    for completion in batcher.generate([prompt] * 3, SamplingParams(max_tokens=4)):
        assert (completion.num_cached_tokens, completion.num_prefill_tokens) == (0, 40)
        assert_exact(model, prompt, completion)


def test_new_weights_are_not_mixed_with_old_keys(model):
    batcher = ContinuousBatcher(model, [EOS], block_size=4)
    prompt = prompts(1, 30, 30)[0]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    batcher.generate([prompt], params)
    in_flight = batcher.submit(prompt, params)
    batcher.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    batcher.weights_changed()
    while not in_flight.done():
        batcher.step()
    # Neither what was kept nor what was in flight may serve the new weights.
    (completion,) = batcher.generate([prompt], params)
    assert completion.num_cached_tokens == 0
    assert_exact(model, prompt, completion)


def test_released_memory_comes_back_on_demand(model):
    batcher = ContinuousBatcher(model, [EOS])
    prompt = prompts(1)[0]
    batcher.generate([prompt], SamplingParams(max_tokens=4))
    batcher.release_memory()
    assert batcher.rows.memory == 0
    (completion,) = batcher.generate([prompt], SamplingParams(max_tokens=4))
    assert_exact(model, prompt, completion)


# --- rows of keys and values -----------------------------------------------------------------------------------------


def cell_bytes(batcher: ContinuousBatcher) -> int:
    layers, heads, width = batcher.rows.cell
    return 2 * layers * heads * width * batcher.rows.dtype.itemsize


def test_memory_and_attention_follow_the_sum_of_the_lengths_not_the_longest(model):
    """One request of 420 tokens among 23 of about 90; all but the shortest grow over several shelves."""
    batcher = ContinuousBatcher(model, max_num_seqs=24)
    asked = [*prompts(12, 80, 100, seed=5), *prompts(1, 420, 420, seed=6), *prompts(11, 80, 100, seed=7)]
    params = [SamplingParams(max_tokens=4 + 3 * i, ignore_eos=True) for i in range(24)]
    futures = [batcher.submit(*request) for request in zip(asked, params)]
    attended = used = 0
    while batcher.busy:
        batcher.step()
        stored = [r.stored for r in batcher.running]
        assert batcher.rows.memory <= 1.5 * sum(stored) * cell_bytes(batcher)
        if batcher.running:
            attended += sum(len(d.tokens) * d.longest for d in batcher.rows.plan(stored, []).decodes)
            used += sum(stored) + len(stored)
    assert attended <= 1.25 * used
    for prompt, future in zip(asked, futures):
        assert_exact(model, prompt, future.result(timeout=0))


def test_many_requests_leave_no_memory_behind(model):
    batcher = ContinuousBatcher(model, [EOS], max_num_seqs=8, prefix_cache_tokens=64, block_size=4)
    asked = prompts(150, 1, 60, seed=9)
    for _ in range(2):
        batcher.generate(asked, [SamplingParams(max_tokens=1 + i % 9) for i in range(len(asked))])
        assert batcher.rows.memory == 0
        assert not batcher.rows.shelves
        assert not batcher.rows.places
        assert len(batcher.prefixes.index) + len(batcher.prefixes.free) == batcher.prefixes.capacity == 16


def test_a_failure_frees_the_rows(model):
    batcher = ContinuousBatcher(model, [EOS])
    future = batcher.submit(prompts(1)[0], SamplingParams(max_tokens=9, ignore_eos=True))
    batcher.step()
    batcher.fail(MemoryError("no memory"))
    assert isinstance(future.exception(timeout=0), MemoryError)
    assert batcher.rows.memory == 0


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_request_and_is_its_last_token(model):
    prompt = prompts(1)[0]
    long = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
    (free,) = ContinuousBatcher(model, [EOS]).generate([prompt], long)
    token = free.token_ids[10]
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, stop_token_ids=(token,))
    (stopped,) = ContinuousBatcher(model, [EOS]).generate([prompt], params)
    assert stopped.stop_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(token) + 1]


def test_the_end_of_sequence_token_ends_a_request_unless_ignored(model):
    prompt = prompts(1)[0]
    (free,) = ContinuousBatcher(model, []).generate([prompt], SamplingParams(max_tokens=20, seed=3))
    eos = free.token_ids[5]
    (stopped,) = ContinuousBatcher(model, [eos]).generate([prompt], SamplingParams(max_tokens=20, seed=3))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
    (ignored,) = ContinuousBatcher(model, [eos]).generate(
        [prompt], SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    )
    assert ignored.token_ids == free.token_ids
    assert ignored.stop_reason == "length"


@pytest.fixture
def letters():
    """A tokenizer whose token i is a letter, so that a stop string spans tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(0x4E00 + i): i for i in range(97)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_a_stop_string_ends_a_request_with_the_token_that_completes_it(model, letters):
    prompt = prompts(1)[0]
    (free,) = ContinuousBatcher(model, []).generate([prompt], SamplingParams(max_tokens=40, seed=4))
    stop = letters.decode(free.token_ids[17:20])
    assert len(stop) == 3
    batcher = ContinuousBatcher(model, [], tokenizer=letters)
    (stopped,) = batcher.generate([prompt], SamplingParams(max_tokens=40, seed=4, stop=("never", stop)))
    assert stopped.stop_reason == "stop"
    text = letters.decode(stopped.token_ids)
    assert text.endswith(stop)
    assert text.count(stop) == 1
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def test_stop_strings_without_a_tokenizer_are_refused(model):
    with pytest.raises(ValueError, match="tokenizer"):
        ContinuousBatcher(model).submit([1, 2], SamplingParams(stop=("x",)))


def test_an_aborted_request_returns_what_it_has_and_the_others_go_on_unharmed(model):
    batcher = ContinuousBatcher(model, [EOS], max_num_seqs=3)
    asked = prompts(4, seed=6)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    futures = [batcher.submit(p, params, request_id=f"r{i}") for i, p in enumerate(asked)]
    for _ in range(7):
        batcher.step()
    assert batcher.abort("r0") == ["r0"]
    aborted = futures[0].result(timeout=0)
    assert (aborted.stop_reason, len(aborted.token_ids)) == ("aborted", 7)
    assert_exact(model, asked[0], aborted)
    while batcher.busy:
        batcher.step()
    for prompt, future in zip(asked[1:], futures[1:]):
        completion = future.result(timeout=0)
        assert (completion.stop_reason, len(completion.token_ids)) == ("length", 30)
        assert_exact(model, prompt, completion)


def test_abort_ends_waiting_requests_too(model):
    batcher = ContinuousBatcher(model, [EOS], max_num_seqs=1)
    futures = [batcher.submit(p, SamplingParams(max_tokens=9)) for p in prompts(3)]
    batcher.step()
    assert len(batcher.abort()) == 3
    assert [f.result(timeout=0).stop_reason for f in futures] == ["aborted"] * 3
    assert futures[2].result().token_ids == []
    assert not batcher.busy


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_request_that_cannot_fit_is_refused(model):
    batcher = ContinuousBatcher(model, max_model_len=20)
    with pytest.raises(ValueError, match="20"):
        batcher.submit([2] * 15, SamplingParams(max_tokens=6))
    with pytest.raises(ValueError, match="empty"):
        batcher.submit([], SamplingParams())


def test_a_sliding_window_is_refused():
    windowed = tiny_model(MistralConfig, MistralForCausalLM, sliding_window=16)
    with pytest.raises(ValueError, match="sliding window"):
        ContinuousBatcher(windowed)


def test_any_architecture_is_either_right_or_refused():
    """GPT-2 has learned positions and no grouped queries, and its attention module takes no extra arguments."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128)).eval()
    try:
        batcher = ContinuousBatcher(model)
    except ValueError:
        return
    asked = prompts(3)
    for prompt, completion in zip(asked, batcher.generate(asked, SamplingParams(max_tokens=6))):
        assert_exact(model, prompt, completion)


# --- thread ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def thread(model):
    runner = BatcherThread(ContinuousBatcher(model, [EOS]), threads=1)
    yield runner
    runner.close()


def submit(thread: BatcherThread, prompt: list[int], params: SamplingParams) -> Future:
    return thread.call(thread.batcher.submit, prompt, params).result(timeout=10)


def test_calls_run_between_steps_while_requests_are_in_flight(model, thread):
    prompt = prompts(1)[0]
    long = submit(thread, prompt, SamplingParams(max_tokens=400, ignore_eos=True))
    short = submit(thread, prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(short.result(timeout=10).token_ids) == 3
    steps = thread.call(lambda: len(thread.batcher.running[0].output)).result(timeout=10)
    assert 3 <= steps < 400
    assert_exact(model, prompt, long.result(timeout=60))


def test_an_error_of_a_call_reaches_its_caller_only(thread):
    with pytest.raises(ValueError, match="empty"):
        submit(thread, [], SamplingParams())
    assert submit(thread, [5, 6], SamplingParams(max_tokens=2, ignore_eos=True)).result(timeout=10).token_ids


def test_a_failing_step_fails_its_requests_and_later_ones_work(model, thread, monkeypatch):
    rows = thread.batcher.rows
    monkeypatch.setattr(rows, "forward", lambda *args: (_ for _ in ()).throw(MemoryError("no memory")))
    with pytest.raises(MemoryError, match="no memory"):
        submit(thread, [5, 6], SamplingParams(max_tokens=2)).result(timeout=10)
    monkeypatch.undo()
    completion = submit(thread, [5, 6], SamplingParams(max_tokens=2, ignore_eos=True)).result(timeout=10)
    assert_exact(model, [5, 6], completion)


def test_closing_ends_what_is_in_flight(model):
    runner = BatcherThread(ContinuousBatcher(model, [EOS]), threads=1)
    future = submit(runner, prompts(1)[0], SamplingParams(max_tokens=450, ignore_eos=True))
    runner.close()
    assert future.result(timeout=0).stop_reason == "aborted"


def test_with_a_value_head_each_prompt_gets_its_value(model):
    head = torch.randn(model.config.hidden_size), torch.tensor(0.25)
    batcher = ContinuousBatcher(model, [EOS], max_num_seqs=3, block_size=4)
    asked = prompts(7, 6, 30)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 1, 3, 8, 2, 4, 6)]
    assert {c.state_value for c in batcher.generate(asked, params)} == {None}
    batcher.value_head = head
    for prompt, completion in zip(asked, batcher.generate(asked, params)):
        with torch.no_grad():
            state = model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
        assert completion.state_value == pytest.approx(float(state @ head[0] + head[1]), abs=1e-5)
