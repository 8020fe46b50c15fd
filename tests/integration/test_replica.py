import asyncio

import numpy as np
import pytest
import torch
from tiny import EOS, prompts, reference, tiny_model
from transformers import PreTrainedTokenizerFast
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode

from verl_bpo.integration.replica import HFOptions, TransformersServer, WeightLoader

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    from tokenizers import Tokenizer, models

    folder = str(tmp_path_factory.mktemp("model"))
    tiny_model(tie_word_embeddings=True).save_pretrained(folder)
    inner = Tokenizer(models.BPE(vocab={chr(0x4E00 + i): i for i in range(97)}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.eos_token, tokenizer.pad_token = chr(0x4E00 + EOS), chr(0x4E00)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_config(checkpoint) -> HFModelConfig:
    return HFModelConfig(path=checkpoint)


def rollout_config(**overrides) -> RolloutConfig:
    values = {
        "name": "hf",
        "dtype": "float32",
        "prompt_length": 64,
        "response_length": 32,
        "tensor_model_parallel_size": 1,
        "max_num_seqs": 8,
        "engine_kwargs": {"hf": {"threads": 1}},
    }
    return RolloutConfig(**{**values, **overrides})


@pytest.fixture
def server(model_config):
    started = []

    def start(**overrides) -> TransformersServer:
        config = rollout_config(**overrides)
        started.append(TransformersServer(config, model_config, RolloutMode.HYBRID, replica_rank=0))
        return started[-1]

    yield start
    for each in started:
        each.thread.close()


def weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """As a trainer sends them: tied parameters under both names."""
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_rollouts_report_the_trainers_logprobs_and_true_entropies(server):
    actor = tiny_model(seed=7, tie_word_embeddings=True)

    async def run():
        rollout = server()
        await rollout.load_weights(weights(actor), last=True)
        await rollout.set_global_steps(5)
        asked = prompts(4)
        return asked, await asyncio.gather(*[rollout.generate(p, dict(SAMPLING), f"r{i}") for i, p in enumerate(asked)])

    for prompt, output in zip(*asyncio.run(run())):
        logprobs, entropies = reference(actor, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.log_probs), logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(output.extra_fields["token_entropy"]), entropies, atol=1e-4, rtol=0)
        assert output.stop_reason == "completed"
        assert output.extra_fields["global_steps"] == 5
        assert output.extra_fields["num_prefill_tokens"] == len(prompt)


def test_logprobs_and_entropies_come_only_when_asked_for(server):
    output = asyncio.run(server().generate([5, 6], {**SAMPLING, "logprobs": False}, "r"))
    assert output.log_probs is None
    assert "token_entropy" not in output.extra_fields


def test_a_weight_update_forgets_the_prefixes_of_the_old_weights(server):
    async def run():
        rollout = server()
        prompt = prompts(1, 60, 60)[0]
        cached = []
        for _ in range(2):
            cached.append((await rollout.generate(prompt, dict(SAMPLING), "r")).extra_fields["num_cached_tokens"])
        await rollout.load_weights(weights(tiny_model(seed=1, tie_word_embeddings=True)), last=True)
        cached.append((await rollout.generate(prompt, dict(SAMPLING), "r")).extra_fields["num_cached_tokens"])
        return cached

    assert asyncio.run(run()) == [0, 48, 0]


def test_lengths_are_kept_within_the_configs_limits(server):
    params = {**SAMPLING, "ignore_eos": True}

    async def run():
        rollout = server(max_model_len=80)
        default = await rollout.generate([5] * 10, dict(params), "a")
        squeezed = await rollout.generate([5] * 75, {**params, "max_tokens": 50}, "b")
        sglang_style = await rollout.generate([5] * 10, {**params, "max_new_tokens": 3}, "c")
        with pytest.raises(ValueError, match="80 tokens.*max_model_len"):
            await rollout.generate([5] * 80, dict(params), "d")
        return [len(o.token_ids) for o in (default, squeezed, sglang_style)]

    assert asyncio.run(run()) == [32, 5, 3]


def test_without_a_limit_the_models_positions_are_the_limit(server):
    with pytest.raises(ValueError, match="512 tokens"):
        asyncio.run(server().generate([5] * 512, dict(SAMPLING), "r"))
    with pytest.raises(ValueError, match="max_model_len=600.*512"):
        server(max_model_len=600)


def test_aborted_requests_return_what_they_have_and_later_ones_wait(server):
    params = {**SAMPLING, "ignore_eos": True, "max_tokens": 400}

    async def run():
        rollout = server()
        running = asyncio.create_task(rollout.generate([5, 6], dict(params), "a"))
        while not rollout.batcher.running or len(rollout.batcher.running[0].output) < 3:
            await asyncio.sleep(0.01)
        report = await rollout.abort_all_requests()
        aborted = await running
        waiting = asyncio.create_task(rollout.generate([5, 6], {**params, "max_tokens": 4}, "b"))
        await asyncio.sleep(0.2)
        waited = not waiting.done()
        await rollout.sleep()
        await rollout.wake_up(tags=["weights"])
        await rollout.resume_generation()
        return report, aborted, waited, await waiting

    report, aborted, waited, resumed = asyncio.run(asyncio.wait_for(run(), 60))
    assert report == {"aborted_count": 1, "request_ids": ["a"]}
    assert aborted.stop_reason == "aborted"
    assert 3 <= len(aborted.token_ids) == len(aborted.log_probs) < 400
    assert waited
    assert (resumed.stop_reason, len(resumed.token_ids)) == ("completed", 4)


def test_a_rejecting_server_sends_waiting_and_new_requests_back(server):
    async def run():
        rollout = server()
        await rollout.abort_all_requests()
        waiting = asyncio.create_task(rollout.generate([5, 6], dict(SAMPLING), "a"))
        await asyncio.sleep(0.05)
        await rollout.abort_all_requests(reject_request=True)
        return [await waiting, await rollout.generate([5, 6], dict(SAMPLING), "b")]

    for output in asyncio.run(asyncio.wait_for(run(), 30)):
        assert (output.stop_reason, output.token_ids) == ("aborted", [])


def test_one_request_can_be_aborted(server):
    async def run():
        rollout = server()
        params = {**SAMPLING, "ignore_eos": True}
        one = asyncio.create_task(rollout.generate([5, 6], {**params, "max_tokens": 400}, "a"))
        other = asyncio.create_task(rollout.generate([5, 7], {**params, "max_tokens": 20}, "b"))
        while len(rollout.batcher.running) < 2:
            await asyncio.sleep(0.01)
        assert (await rollout.abort_request("a"))["aborted"]
        assert not (await rollout.abort_request("gone"))["aborted"]
        return await one, await other

    one, other = asyncio.run(run())
    assert (one.stop_reason, other.stop_reason) == ("aborted", "completed")
    assert len(other.token_ids) == 20


def test_lifecycle_calls_of_verls_managers_are_answered(server):
    async def run():
        rollout = server()
        for call in ("sleep", "wake_up", "clear_kv_cache", "release_kv_cache", "resume_kv_cache"):
            await getattr(rollout, call)()
        await rollout.start_profile(global_step=1)
        await rollout.stop_profile()
        return await rollout.generate([5, 6], dict(SAMPLING), "r")

    assert asyncio.run(run()).token_ids


def test_a_server_without_a_trainer_loads_the_checkpoint(model_config, checkpoint):
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    for mode, config in ((RolloutMode.COLOCATED, {}), (RolloutMode.HYBRID, {"load_format": "auto"})):
        started = TransformersServer(rollout_config(**config), model_config, mode, replica_rank=0)
        started.thread.close()
        for name, tensor in started.model.state_dict().items():
            torch.testing.assert_close(tensor, saved[name])


# --- weights ---------------------------------------------------------------------------------------------------------


def test_weights_may_come_in_buckets_and_tied_ones_under_one_name():
    source, target = (tiny_model(seed=s, tie_word_embeddings=True) for s in (1, 2))
    sent = [item for item in weights(source).items() if item[0] != "lm_head.weight"]
    loader = WeightLoader(target)
    for _ in range(2):  # a second update starts afresh
        for item in sent:
            loader.load([item])
        loader.finish()
    for name, tensor in target.state_dict().items():
        torch.testing.assert_close(tensor, source.state_dict()[name])


def test_an_update_that_leaves_weights_out_names_them():
    model = tiny_model()
    loader = WeightLoader(model)
    sent = weights(model)
    for name in ("model.norm.weight", "lm_head.weight"):
        del sent[name]
    loader.load(sent.items())
    with pytest.raises(ValueError, match=r"did not bring model\.norm\.weight, lm_head\.weight"):
        loader.finish()


def test_a_half_update_does_not_count_for_the_next_one():
    model = tiny_model()
    loader = WeightLoader(model)
    items = list(weights(model).items())
    loader.load(items[:5])
    with pytest.raises(ValueError, match="did not bring"):
        loader.finish()
    loader.load(items[5:])
    with pytest.raises(ValueError, match="did not bring"):
        loader.finish()


def test_weights_that_do_not_fit_are_named_and_nothing_is_copied():
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sent = {
        "model.norm.weight": np.zeros(32, dtype=np.float32),
        "v_head.weight": np.zeros(3, dtype=np.float32),
        "model.embed_tokens.weight": np.zeros((5, 32), dtype=np.float32),
    }
    with pytest.raises(ValueError, match=r"v_head\.weight \(not in the model\), model\.embed.*\(5, 32\).*\(97, 32\)"):
        WeightLoader(model).load(sent.items())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name])


# --- options ---------------------------------------------------------------------------------------------------------


def test_an_unknown_option_is_named():
    with pytest.raises(ValueError, match="thread; known: prefix_cache_tokens, threads"):
        HFOptions.from_config(rollout_config(engine_kwargs={"hf": {"thread": 2}}))


def test_threads_come_from_the_config_then_the_environment_then_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.delenv("VERL_BPO_THREADS", raising=False)
    assert HFOptions().thread_count(replicas_on_node=4) == 3
    assert HFOptions().thread_count(replicas_on_node=100) == 1
    monkeypatch.setenv("VERL_BPO_THREADS", "5")
    assert HFOptions().thread_count(replicas_on_node=4) == 5
    assert HFOptions(threads=2).thread_count(replicas_on_node=4) == 2


def test_a_replica_of_more_than_one_process_is_refused(model_config):
    from verl_bpo.integration.replica import TransformersReplica

    with pytest.raises(ValueError, match="tensor_model_parallel_size"):
        TransformersReplica(0, rollout_config(tensor_model_parallel_size=2), model_config)


# --- on Ray ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_replica_on_ray_gets_weights_from_its_adapter_and_generates(cluster, model_config, monkeypatch):
    import ray

    from verl_bpo.integration.replica import ServerAdapter, TransformersReplica

    monkeypatch.setenv("RANK", "0")
    actor = tiny_model(seed=3, tie_word_embeddings=True)
    buckets = CheckpointEngineConfig(update_weights_bucket_megabytes=0)  # a bucket per tensor
    config = rollout_config(checkpoint_engine=buckets)

    async def run():
        replica = TransformersReplica(0, config, model_config, gpus_per_node=1)
        replica.rollout_mode = RolloutMode.HYBRID
        await replica.launch_servers()
        assert ray.get_runtime_context().get_job_id() in replica.server_address
        adapter = ServerAdapter(config, model_config)
        await adapter.release()
        await adapter.resume(tags=["weights"])
        await adapter.update_weights(iter(actor.state_dict().items()), global_steps=2)
        for call in ("sleep", "wake_up", "abort_all_requests", "release_kv_cache", "resume_kv_cache"):
            await getattr(replica, call)()
        await replica.resume_generation()
        output = await replica.server_handle.generate.remote(
            request_id="r", prompt_ids=[5, 6, 7], sampling_params=dict(SAMPLING), image_data=None, video_data=None
        )
        short = ((name, tensor) for name, tensor in list(actor.state_dict().items())[1:3])
        with pytest.raises(ValueError, match="did not bring"):
            await adapter.update_weights(short)
        with pytest.raises(ValueError, match="merge=True"):
            await adapter.update_weights(iter(()), peft_config={})
        return output

    output = asyncio.run(run())
    logprobs, entropies = reference(actor, [5, 6, 7], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), logprobs, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(output.extra_fields["token_entropy"]), entropies, atol=1e-4, rtol=0)
    assert output.extra_fields["global_steps"] == 2


def test_a_value_readout_that_comes_with_the_weights_reads_every_prompt(server):
    actor = tiny_model(tie_word_embeddings=True)
    size = actor.config.hidden_size
    heads = {
        "value_readout.weight": torch.randn(2, size).numpy(),
        "value_readout.bias": np.array([0.5, 9.0], np.float32),
    }

    async def run():
        rollout = server()
        await rollout.load_weights(
            {**weights(actor), "value_readout.weight": heads["value_readout.weight"]}, last=False
        )
        await rollout.load_weights({"value_readout.bias": heads["value_readout.bias"]}, last=True)
        prompt = prompts(1)[0]
        return prompt, await rollout.generate(prompt, dict(SAMPLING), "r")

    prompt, output = asyncio.run(run())
    with torch.no_grad():
        state = actor.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
    expected = float(state @ torch.tensor(heads["value_readout.weight"][0]) + 0.5)
    assert output.extra_fields["state_value"] == pytest.approx(expected, abs=1e-5)
