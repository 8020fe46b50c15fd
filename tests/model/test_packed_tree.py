"""Packed trees give what the rows give: log-probs, entropies, losses, every gradient."""

from __future__ import annotations

import random
import threading
from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from verl_bpo.config.schema import PackedBackend
from verl_bpo.model.packed_tree import (
    BACKENDS,
    HiddenReads,
    PackedTreeUnsupported,
    attention,
    choose_backend,
    chunked_outputs,
    pack_rows,
    packed_forward,
    place_rows,
    plan_micro_batches,
    row_outputs,
    tree_outputs,
    wanted_logits,
)
from verl_bpo.model.packed_tree.attach import attach
from verl_bpo.model.packed_tree.chunks import cut_tree
from verl_bpo.model.packed_tree.likelihood import edge_outputs
from verl_bpo.model.support import PACKED, UnsupportedModel, check_config

VOCABULARY = 61
MODELS = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Float64Norm(nn.Module):
    """RMS norm in the input's own precision; transformers' norms round to float32 on the way."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def make_model(name: str = "qwen2", dtype: torch.dtype = torch.float64, **overrides) -> nn.Module:
    torch.manual_seed(0)
    config, model = MODELS.get(name, (MistralConfig, MistralForCausalLM))
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "attn_implementation": "sdpa",
    }
    net = model(config(**{**values, **overrides})).to(dtype).train()
    if dtype == torch.float64:
        for module in list(net.modules()):
            for key, child in module.named_children():
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(module, key, Float64Norm(child))
    return net


def make_rows(seed: int) -> list[list[int]]:
    """A random tree of several levels, and the odd cases: see the comments."""
    rng = random.Random(seed)

    def run(low=1, high=12):
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    rows = [run(5, 20)]
    rows[0] += run(20, 30)
    for _ in range(rng.randint(4, 8)):  # forks of forks
        base = rng.choice(rows)
        rows.append(base[: rng.randint(1, len(base))] + run())
    rows.append(list(rows[1]))  # an equal row
    rows.append(rows[2][: len(rows[2]) // 2])  # a strict prefix of another
    rows.append(run(2, 9))  # a tree of one row
    rows.append([0] * 7)  # padding: no mask anywhere, shares nothing
    rows.append([3])  # nothing to predict
    rng.shuffle(rows)
    return rows


def reference(model: nn.Module, rows: list[list[int]], temperature: float = 1.0):
    """Log-probs of the next tokens and entropies from each row alone, one after another as in ``RowOutputs``."""
    log_probs, entropies = [], []
    for row in rows:
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0] / temperature
        full = logits.log_softmax(-1)
        chosen = full[:-1].gather(1, torch.tensor(row)[1:, None])[:, 0]
        log_probs.append(F.pad(chosen, (0, 1)))
        entropies.append(-(full.exp() * full).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def packed(model: nn.Module, rows: list[list[int]], temperature: float = 1.0, backend: str = "auto"):
    tree = pack_rows(rows)
    logits = packed_forward(model, tree, backend).logits[0]
    out = row_outputs(*tree_outputs(logits, tree, temperature, entropy=True), tree)
    return out.log_probs, out.entropy


def chunked(model: nn.Module, rows: list[list[int]], temperature: float = 1.0):
    tree = pack_rows(rows)
    out = chunked_outputs(model, tree, temperature, entropy=True, chunks=max(2, tree.unique_tokens // 24))
    return out.log_probs, out.entropy


def clipped_loss(log_probs: torch.Tensor, entropy: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    """PPO's surrogate with an entropy bonus: not linear, different on every copy of a shared token."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda: torch.randn(log_probs.shape, generator=generator, dtype=torch.float64).to(log_probs.dtype)  # noqa: E731
    ratio = (log_probs - log_probs.detach() - 0.15 * draw()).exp()
    advantage, mask = draw(), torch.ones_like(log_probs)
    mask[np.cumsum([len(r) for r in rows]) - 1] = 0
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.01 * entropy
    return (loss * mask).sum() / mask.sum()


def evaluate(model: nn.Module, rows: list[list[int]], compute=packed, temperature: float = 1.0):
    model.zero_grad()
    log_probs, entropy = compute(model, rows, temperature)
    loss = clipped_loss(log_probs, entropy, rows)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return log_probs.detach(), entropy.detach(), loss.detach(), grads


def assert_same(ours, theirs, tolerance: float) -> None:
    for name, a, b in zip(("log_probs", "entropy", "loss"), ours, theirs):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    assert ours[3].keys() == theirs[3].keys()
    for name, grad in theirs[3].items():
        scale = float(grad.abs().max())
        difference = float((ours[3][name] - grad).abs().max())
        assert difference <= tolerance * max(scale, 1.0), f"gradient of {name} differs by {difference}"


# --- packing


@pytest.mark.parametrize("seed", range(5))
def test_packing_gives_every_row_back_and_stores_each_prefix_once(seed):
    rows = make_rows(seed)
    tree = pack_rows(rows)
    for row, (a, b) in zip(rows, zip(tree.row_offsets[:-1].tolist(), tree.row_offsets[1:].tolist())):
        index = tree.row_index[a:b]
        assert tree.token_ids[index].tolist() == row
        assert tree.position_ids[index].tolist() == list(range(len(row)))
        assert tree.parent[index].tolist() == [-1, *index[:-1].tolist()]
    prefixes = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert tree.unique_tokens == len(prefixes)
    assert tree.total_tokens == sum(map(len, rows))


@pytest.mark.parametrize("seed", range(5))
def test_paths_and_subtrees_agree_with_the_parents(seed):
    tree = pack_rows(make_rows(seed))
    parent = tree.parent.tolist()
    ancestors = []
    for i, p in enumerate(parent):
        assert p < i
        ancestors.append([*(ancestors[p] if p >= 0 else []), i])
    for node, (a, b) in enumerate(zip(tree.cu_nodes[:-1].tolist(), tree.cu_nodes[1:].tolist())):
        start, end = tree.cu_paths[node].item(), tree.cu_paths[node + 1].item()
        assert tree.path_index[start:end].tolist() == ancestors[b - 1]
        assert ancestors[b - 1][-(b - a) :] == list(range(a, b))
    below = [max(j for j, path in enumerate(ancestors) if i in path) + 1 for i in range(len(parent))]
    assert tree.subtree_end.tolist() == below


def test_a_nested_tensor_packs_like_its_rows():
    rows = make_rows(1)
    nested = torch.nested.as_nested_tensor([torch.tensor(r) for r in rows], layout=torch.jagged)
    ours, theirs = pack_rows(nested), pack_rows(rows)
    assert torch.equal(ours.row_index, theirs.row_index)
    assert torch.equal(ours.path_index, theirs.path_index)


@pytest.mark.parametrize("rows", [[], [[]], [[1, -2]]])
def test_rows_that_hold_no_valid_tokens_are_refused(rows):
    with pytest.raises(ValueError, match="token"):
        pack_rows(rows)


# --- equality with the rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_rows_in_float64(name, seed):
    rows, model = make_rows(seed), make_model(name)
    assert_same(evaluate(model, rows), evaluate(model, rows, reference), 1e-12)


@pytest.mark.parametrize("heads", [1, 4])
def test_packed_equals_rows_for_other_numbers_of_key_value_heads(heads):
    rows, model = make_rows(3), make_model(num_key_value_heads=heads)
    assert_same(evaluate(model, rows), evaluate(model, rows, reference), 1e-12)


def test_packed_equals_rows_in_float32():
    rows, model = make_rows(0), make_model(dtype=torch.float32)
    assert_same(evaluate(model, rows), evaluate(model, rows, reference), 1e-5)


def test_packed_equals_rows_at_another_temperature():
    rows, model = make_rows(0), make_model()
    assert_same(evaluate(model, rows, temperature=0.7), evaluate(model, rows, reference, temperature=0.7), 1e-12)


@pytest.mark.parametrize("compute", [packed, chunked])
def test_nodes_longer_than_a_query_block_equal_rows(compute, monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 4)
    rows, model = make_rows(2), make_model()
    assert_same(evaluate(model, rows, compute), evaluate(model, rows, reference), 1e-12)


@pytest.mark.parametrize("compute", [packed, chunked])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant, compute):
    rows, model = make_rows(1), make_model()
    expected = evaluate(model, rows, reference)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(evaluate(model, rows, compute), expected, 1e-12)
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("compute", [packed, chunked])
def test_adapters_get_the_same_gradients(compute):
    peft = pytest.importorskip("peft")
    model = make_model()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    adapted.to(torch.float64)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at the start, which would hide lora_A's gradients
            nn.init.normal_(parameter, std=0.1)
    ours, theirs = evaluate(adapted, make_rows(4), compute), evaluate(adapted, make_rows(4), reference)
    assert len(theirs[3]) == 3 * 3 * 2
    assert_same(ours, theirs, 1e-12)


def test_keys_along_the_paths_are_not_kept_for_the_backward(monkeypatch):
    """They are several times the tree's own keys."""
    sdpa, seen = attention._sdpa, []

    def spy(query, key, value, tree, scale):
        seen.extend(StorageWeakRef(x.untyped_storage()) for x in (key, value))
        return sdpa(query, key, value, tree, scale)

    monkeypatch.setattr(attention, "_sdpa", spy)
    rows, model = make_rows(0), make_model()
    attach(model)  # which tries the first layer
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        seen.clear()
        ours = packed(model, rows)
        assert len(seen) == 6 and all(ref.expired() for ref in seen)
        ours[0].sum().backward()


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("heads", [2, 4])
def test_every_kernel_of_torch_gets_its_keys_back(kernel, heads):
    rows, model = make_rows(0), make_model(num_key_value_heads=heads)
    theirs = evaluate(model, rows, reference)
    with sdpa_kernel(kernel):
        assert_same(evaluate(model, rows), theirs, 1e-12)


def test_activations_may_be_kept_elsewhere():
    rows, model = make_rows(0), make_model()
    theirs = evaluate(model, rows, reference)
    with torch.autograd.graph.save_on_cpu():
        assert_same(evaluate(model, rows), theirs, 1e-12)


def test_bfloat16_is_as_close_to_the_truth_as_the_rows_are():
    rows = make_rows(0)
    exact = reference(make_model(dtype=torch.float32), rows)[0].detach()
    model = make_model(dtype=torch.bfloat16)
    with torch.no_grad():
        ours = (packed(model, rows)[0].float() - exact).square().mean().sqrt()
        theirs = (reference(model, rows)[0].float() - exact).square().mean().sqrt()
    assert ours < 1.5 * theirs


def test_autocast_gives_the_rows_result():
    rows, model = make_rows(0), make_model(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, theirs = packed(model, rows)[0].float(), reference(model, rows)[0].float()
    exact = reference(model, rows)[0].detach()
    assert (ours - exact).square().mean() < 2 * (theirs - exact).square().mean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_chunked_equals_rows_in_float64(name, seed):
    rows, model = make_rows(seed), make_model(name)
    assert_same(evaluate(model, rows, chunked), evaluate(model, rows, reference), 1e-12)


@pytest.mark.parametrize("chunks", [1, 2, 7, None])
def test_any_number_of_chunks_gives_the_same(chunks):
    """``None``: a chunk for each token."""
    rows, model = make_rows(2), make_model()
    count = chunks or pack_rows(rows).unique_tokens

    def compute(model, rows, temperature):
        out = chunked_outputs(model, pack_rows(rows), temperature, entropy=True, chunks=count)
        return out.log_probs, out.entropy

    assert_same(evaluate(model, rows, compute), evaluate(model, rows, reference), 1e-12)


def test_chunked_equals_rows_in_float32():
    rows, model = make_rows(0), make_model(dtype=torch.float32)
    assert_same(evaluate(model, rows, chunked), evaluate(model, rows, reference), 1e-5)


def test_chunked_under_autocast_gives_the_packed_gradients():
    rows, model = make_rows(0), make_model(dtype=torch.float32)
    exact = evaluate(model, rows, reference)[3]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = evaluate(model, rows, chunked)[3], evaluate(model, rows, packed)[3]
    error = lambda grads: sum(float((grads[n] - exact[n]).square().sum()) for n in exact)  # noqa: E731
    assert error(ours) < 2 * error(theirs)


def test_numbers_read_inside_the_model_come_back_where_they_were_asked_for():
    """A value head on the final hidden states, read at two lists of tokens in any order, one of them with repeats."""
    rows, model = make_rows(1), make_model()
    tree = pack_rows(rows)
    head = torch.linspace(-1, 1, 32, dtype=torch.float64, requires_grad=True)
    draw = torch.Generator().manual_seed(0)
    positions = (torch.randperm(tree.unique_tokens, generator=draw)[:20], torch.tensor([5, 0, 5]))
    asked, found = [None], [None]

    def hook(module, args):
        found[0] = tuple((args[0][0] @ head)[at] for at in asked[0])

    model.lm_head.register_forward_pre_hook(hook)

    def begin(at, tokens):
        assert all((x < tokens).all() for x in at)
        asked[0] = at

    def result(values, log_probs):
        model.zero_grad()
        head.grad = None
        loss = sum((v * torch.linspace(1, 2, len(v))).sum() for v in values) + log_probs.sum()
        loss.backward()
        return [*(v.detach() for v in values), head.grad, *(p.grad for p in model.parameters())]

    begin(positions, tree.unique_tokens)
    logits = packed_forward(model, tree).logits[0]
    theirs = result(found[0], row_outputs(*tree_outputs(logits, tree), tree).log_probs)
    theirs = [x.clone() for x in theirs]
    reads = HiddenReads(positions, begin, lambda: found[0])
    for wanted in (None, torch.arange(tree.unique_tokens)):
        out = chunked_outputs(model, tree, chunks=5, reads=reads, wanted=wanted)
        for a, b in zip(result(out.reads, out.log_probs), theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    few = torch.unique(torch.cat([*positions, torch.arange(0, tree.unique_tokens, 3)]))
    out = chunked_outputs(model, tree, chunks=5, reads=reads, wanted=few)
    for a, b in zip(out.reads, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def picked(model: nn.Module, rows: list[list[int]], wanted: torch.Tensor, chunks: int, temperature: float = 1.0):
    """With the logits ``wanted``, in so many chunks, 0: in one piece."""
    tree = pack_rows(rows)
    if chunks:
        count = min(chunks, tree.unique_tokens)
        return chunked_outputs(model, tree, temperature, entropy=True, chunks=count, wanted=wanted)
    logits = packed_forward(model, tree, wanted=wanted).logits[0]
    return row_outputs(*tree_outputs(logits, tree, temperature, entropy=True, wanted=wanted), tree)


@pytest.mark.parametrize("chunks", [0, 1, 5, 200])
@pytest.mark.parametrize("seed", range(3))
def test_logits_of_what_is_learned_alone_give_the_same_there(seed, chunks):
    """Most tokens aren't learned, some of several rows in one of them only, and many chunks hold none."""
    rows, model = make_rows(seed), make_model()
    learned = torch.rand(sum(map(len, rows)), generator=torch.Generator().manual_seed(seed)) < 0.2
    before = torch.cat([F.pad(part[1:], (0, 1)) for part in learned.split([len(row) for row in rows])])
    tree = pack_rows(rows)
    wanted = wanted_logits(tree, learned)
    assert wanted.tolist() == sorted(set(tree.row_index[before].tolist()))
    computed = []
    model.lm_head.register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[1]))

    def compute(model, rows, temperature):
        out = picked(model, rows, wanted, chunks, temperature)
        assert sum(computed) == len(wanted)
        return out.log_probs * before, out.entropy * before

    def rows_alone(model, rows, temperature):
        return tuple(x * before for x in reference(model, rows, temperature))

    assert_same(evaluate(model, rows, compute), evaluate(model, rows, rows_alone), 1e-12)


@pytest.mark.parametrize("chunks", [0, 3])
def test_nothing_learned_gives_zeros_and_no_gradient(chunks):
    rows, model = make_rows(0), make_model()
    tree = pack_rows(rows)
    wanted = wanted_logits(tree, torch.zeros(tree.total_tokens, dtype=torch.bool))
    out = picked(model, rows, wanted, chunks)
    (out.log_probs.sum() + out.entropy.sum()).backward()
    assert not out.log_probs.any() and not out.entropy.any()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_a_second_backward_says_that_it_is_one_too_many():
    out = chunked_outputs(make_model(), pack_rows(make_rows(0)), chunks=3)
    out.log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        out.log_probs.sum().backward()


@pytest.mark.parametrize("leaves", [8, 24])
def test_chunked_holds_a_chunk_and_not_the_tree(leaves):
    """Saved activations are counted at their peak, at a fixed length of chunks: however wide the tree, no more than a row."""
    rng = random.Random(0)
    run = lambda n: [rng.randrange(VOCABULARY) for _ in range(n)]  # noqa: E731
    prompt = run(20)
    many = [prompt + run(40) for _ in range(leaves)]

    def compute(model, rows, temperature):
        tree = pack_rows(rows)
        out = chunked_outputs(model, tree, temperature, entropy=True, chunks=-(-tree.unique_tokens // 60))
        return out.log_probs, out.entropy

    model = make_model()
    assert peak_saved(model, many, compute) < 1.2 * peak_saved(model, many[:1], packed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [1, 4, 19])
def test_chunks_describe_the_tree(seed, count):
    tree = pack_rows(make_rows(seed))
    parent = tree.parent.tolist()
    paths = []
    for i, p in enumerate(parent):
        paths.append([*(paths[p] if p >= 0 else []), i])
    chunks = cut_tree(tree, count)
    assert len(chunks) == count
    assert [c.start for c in chunks[1:]] == [c.stop for c in chunks[:-1]]
    assert (chunks[0].start, chunks[-1].stop) == (0, len(parent))
    assert sorted(t for c in chunks for t in c.targets.tolist()) == [i for i, p in enumerate(parent) if p >= 0]
    for c in chunks:
        assert c.past.tolist() == paths[c.start][:-1]
        keys = [*c.past.tolist(), *range(c.start, c.stop)]
        bounds, ends = c.cu_nodes.tolist(), c.cu_paths.tolist()
        assert (bounds[-1], ends[-1]) == (c.stop - c.start, len(c.path_index))
        for m, (a, b) in enumerate(zip(bounds, bounds[1:])):
            seen = [keys[k] for k in c.path_index[ends[m] : ends[m + 1]].tolist()]
            assert seen == paths[c.start + b - 1] and seen[-(b - a) :] == list(range(c.start + a, c.start + b))
        for q in range(c.stop - c.start):
            flex = [k for k in range(len(keys)) if k <= len(c.past) + q and q < c.subtree_end[k]]
            assert [keys[k] for k in flex] == paths[c.start + q]
        assert c.wanted.tolist() == list(range(c.start, c.stop))
        assert [parent[t] for t in c.targets.tolist()] == c.wanted[c.sources].tolist()


def test_more_chunks_than_tokens_are_refused():
    with pytest.raises(ValueError, match="3 tokens can't be cut into 4 chunks"):
        cut_tree(pack_rows([[1, 2, 3]]), 4)


def peak_saved(model: nn.Module, rows: list[list[int]], compute) -> int:
    """Most tensor elements held for a backward at any time."""
    held, peak = 0, 0

    class Handle:
        def __init__(self, tensor):
            nonlocal held, peak
            self.tensor = tensor
            held += tensor.numel()
            peak = max(peak, held)

        def __del__(self):
            nonlocal held
            held -= self.tensor.numel()

    parameters = {p.data_ptr() for p in model.parameters()}
    pack = lambda t: t if t.data_ptr() in parameters else Handle(t)  # noqa: E731
    unpack = lambda h: h.tensor if isinstance(h, Handle) else h  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        evaluate(model, rows, compute)
    return peak


# --- other users of the model


def test_ordinary_calls_of_an_attached_model_are_untouched():
    rows, model = make_rows(0), make_model()
    before = reference(model, rows)[0].detach()
    packed(model, rows)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(reference(model, rows)[0].detach(), before)


def test_the_config_is_restored_when_attention_fails():
    model = make_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5  # as if set after the check of the config
    with pytest.raises(PackedTreeUnsupported, match="dropout"):
        packed(model, make_rows(0))
    assert model.config._attn_implementation == "sdpa"


# --- half precision


@pytest.mark.parametrize("compute", [packed, chunked])
def test_gradients_of_many_forks_add_up_in_bfloat16(compute):
    """1,500 forks of one trunk that are nearly alike, so that they all pull its keys and values the same way."""
    rows = [list(range(3, 9)) + [fork % VOCABULARY, fork // VOCABULARY] for fork in range(1500)]
    half = make_model(num_hidden_layers=1, dtype=torch.bfloat16)
    with torch.no_grad():
        embeddings = half.get_input_embeddings().weight
        embeddings.copy_(embeddings[:1] + 0.05 * embeddings)
    exact = make_model(num_hidden_layers=1)
    exact.load_state_dict(half.state_dict())
    grads = []
    for model in (half, exact):
        compute(model, rows)[1].mean().backward()
        grads.append(model.model.layers[0].self_attn.v_proj.weight.grad.double())
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 0.02


# --- log-probs and entropies in blocks


@pytest.mark.parametrize("block", [1, 3, 100, None])
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_and_entropies_in_blocks_equal_those_at_once(block, entropy):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 13, generator=draw, dtype=torch.float64).requires_grad_()
    sources, tokens = torch.tensor([7, 0, 0, 4, 9, 4, 4]), torch.tensor([1, 2, 12, 5, 0, 5, 6])

    def plain(logits):
        full = (logits / 0.7).log_softmax(-1)
        return full[sources, tokens], -(full.exp() * full).sum(-1)

    def loss(found):
        weight = torch.arange(1.0, 8.0, dtype=torch.float64)
        return (found[0] * weight).sum() + ((found[1] * torch.arange(10.0)).sum() if entropy else 0)

    found = edge_outputs(logits, sources, tokens, 0.7, entropy, block)
    for ours, theirs in zip(found[: 1 + entropy], plain(logits)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(loss(x), logits)[0] for x in (found, plain(logits)))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert (found[1] is None) == (not entropy)


def test_no_float32_copy_of_all_logits_is_made():
    """Forward and backward of half-precision logits allocate one gradient of them, and otherwise blocks."""
    logits = torch.zeros(512, 4096, dtype=torch.bfloat16, requires_grad=True)
    sources, tokens = torch.arange(512), torch.arange(512)
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple) else (out,):
                if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                    largest.append(x.numel())
            return out

    with Watch():
        log_probs, entropy = edge_outputs(logits, sources, tokens, 0.5, True, 16)
        (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.dtype == entropy.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16
    assert max(largest) == 16 * 4096


# --- what can't be supported


def test_a_path_longer_than_the_sliding_window_is_refused_and_a_shorter_one_equals_rows():
    rows = make_rows(0)
    longest = max(map(len, rows))
    with pytest.raises(UnsupportedModel, match="sliding window"):
        packed(make_model("mistral", sliding_window=longest - 1), rows)
    model = make_model("mistral", sliding_window=longest)
    assert_same(evaluate(model, rows), evaluate(model, rows, reference), 1e-12)


def test_a_config_tells_beforehand_whether_rows_fit_its_sliding_window():
    window = MistralConfig(sliding_window=100)
    check_config(window, PACKED, longest=100)
    with pytest.raises(UnsupportedModel, match="rows of up to 101 tokens exceed mistral's sliding window of 100"):
        check_config(window, PACKED, longest=101)
    check_config(Qwen2Config(sliding_window=100, use_sliding_window=False), PACKED, longest=101)


def test_linear_attention_is_refused():
    model = make_model()
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        packed(model, make_rows(0))


def test_a_model_without_the_attention_interface_is_refused():
    model = make_model()
    model.model.layers[1].self_attn = nn.Identity()
    with pytest.raises(UnsupportedModel, match="2 modules"):
        packed(model, make_rows(0))


class Dropping(nn.Module):
    """A layer's MLP with dropout, by a module or by a function."""

    def __init__(self, mlp: nn.Module, functional: bool) -> None:
        super().__init__()
        self.mlp, self.functional, self.drop = mlp, functional, nn.Dropout(0.0 if functional else 0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.mlp(x))
        return F.dropout(x, 0.4, self.training) if self.functional else x


@pytest.mark.parametrize("functional", [False, True], ids=["module", "function"])
def test_chunks_draw_the_same_dropout_in_both_passes(functional):
    """The gradient along a random direction is the derivative of the loss under the masks of one seed."""
    model, rows = make_model(), make_rows(0)
    for layer in model.model.layers:
        layer.mlp = Dropping(layer.mlp, functional)
    draw = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in model.parameters()]

    def loss(step: float) -> torch.Tensor:
        with torch.no_grad():
            for parameter, way in zip(model.parameters(), direction):
                parameter += step * way
        torch.manual_seed(7)
        log_probs, entropy = chunked(model, rows)
        with torch.no_grad():
            for parameter, way in zip(model.parameters(), direction):
                parameter -= step * way
        return (log_probs * torch.linspace(0, 1, len(log_probs))).sum() + entropy.sum()

    with torch.no_grad():
        slope = float(loss(1e-6) - loss(-1e-6)) / 2e-6
    loss(0.0).backward()
    after = torch.get_rng_state()
    found = sum(float((p.grad * way).sum()) for p, way in zip(model.parameters(), direction))
    assert found == pytest.approx(slope, rel=1e-4)
    torch.manual_seed(7)
    chunked(model, rows)
    assert torch.equal(after, torch.get_rng_state())  # the second pass leaves the generator where it found it


# --- backends


@pytest.mark.parametrize("name", ["flash_attn", "torch_varlen"])
def test_gpu_backends_are_refused_on_a_cpu(name, monkeypatch):
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: True)
    with pytest.raises(PackedTreeUnsupported, match="GPU"):
        choose_backend(torch.device("cpu"), torch.bfloat16, name)


@pytest.mark.parametrize(
    ("device", "dtype", "flash", "varlen", "expected"),
    [
        ("cuda", torch.bfloat16, True, True, "flash_attn"),
        ("cuda", torch.bfloat16, False, True, "torch_varlen"),
        ("cuda", torch.bfloat16, False, False, "sdpa"),
        ("cuda", torch.float32, True, True, "sdpa"),
        ("cpu", torch.bfloat16, True, True, "sdpa"),
    ],
)
def test_the_backend_is_chosen_by_device_precision_and_packages(device, dtype, flash, varlen, expected, monkeypatch):
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: flash)
    monkeypatch.setattr(attention, "_has_torch_varlen", lambda: varlen)
    assert choose_backend(torch.device(device), dtype) == expected


def test_the_config_knows_every_backend():
    assert ("auto", *BACKENDS) == get_args(PackedBackend)


def test_an_unknown_backend_is_named_with_its_alternatives():
    with pytest.raises(ValueError, match="'xformers'.*sdpa"):
        choose_backend(torch.device("cpu"), torch.float32, "xformers")


def test_the_choice_is_named_in_the_log(caplog):
    attention._log_choice.cache_clear()
    with caplog.at_level("INFO", logger=attention.__name__):
        choose_backend(torch.device("cpu"), torch.float32)
    assert "sdpa" in caplog.text


@pytest.mark.parametrize("name", ["flash_attn", "torch_varlen"])
def test_what_varlen_kernels_are_given_describes_the_tree(name, monkeypatch):
    """A plain implementation of the kernels' documented contract stands in for them: lengths of q and k per sequence,
    causal from the lower right corner, grouped queries."""

    def kernel(q, k, v, tree, scale):
        parts = []
        for node in range(len(tree.node_lengths)):
            a, b = tree.cu_nodes[node : node + 2].tolist()
            c, d = tree.cu_paths[node : node + 2].tolist()
            mask = torch.arange(d - c) <= torch.arange(b - a)[:, None] + (d - c) - (b - a)
            args = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            out = F.scaled_dot_product_attention(*args, attn_mask=mask, scale=scale, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setitem(attention.VARLEN, name, kernel)
    monkeypatch.setattr(attention, "choose_backend", lambda *a: name)
    rows, model = make_rows(0), make_model()
    assert_same(evaluate(model, rows), evaluate(model, rows, reference), 1e-12)


def test_flex_equals_rows_without_gradients():
    rows, model = make_rows(0), make_model(dtype=torch.float32, head_dim=16)
    with torch.no_grad():
        ours, theirs = packed(model, rows, backend="flex"), reference(model, rows)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(PackedTreeUnsupported, match="backward"):
        packed(model, rows, backend="flex")


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        ("flash_attn", torch.bfloat16, 4e-2),
        ("torch_varlen", torch.bfloat16, 4e-2),
        ("flex", torch.bfloat16, 4e-2),
        ("flex", torch.float32, 1e-3),
    ],
)
def test_gpu_backends_equal_sdpa(backend, dtype, tolerance):
    try:
        choose_backend(torch.device("cuda"), dtype, backend)
    except PackedTreeUnsupported as error:
        pytest.skip(str(error))
    rows = [r for seed in range(4) for r in make_rows(seed)]
    model = make_model(dtype=dtype, head_dim=64, initializer_range=0.05).cuda()
    results = {}
    for name in ("sdpa", backend):
        model.zero_grad()
        tree = pack_rows(rows).to("cuda")
        log_probs, _ = tree_outputs(packed_forward(model, tree, name).logits[0].float(), tree)
        out = row_outputs(log_probs, None, tree).log_probs
        (out * torch.linspace(-1, 1, len(out), device="cuda")).mean().backward()
        grads = torch.cat([p.grad.float().flatten() for p in model.parameters()])
        results[name] = (out.detach(), grads)
    (a, ga), (b, gb) = results.values()
    assert (a - b).abs().max() < tolerance
    assert (ga - gb).norm() < tolerance * ga.norm()


# --- micro-batches


def forest(seed: int, count: int = 6) -> tuple[list[list[int]], list[int]]:
    rng = random.Random(seed)
    pairs = [(row, t) for t in range(count) for row in make_rows(100 * seed + t)]
    rng.shuffle(pairs)
    return [p[0] for p in pairs], [p[1] for p in pairs]


@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_hold_each_row_once_within_the_budget(seed):
    rows, trees = forest(seed)
    for budget in (max(map(len, rows)), 150, 400):
        plan = [part.rows for part in plan_micro_batches(rows, trees, budget)]
        assert sorted(r for batch in plan for r in batch) == list(range(len(rows)))
        assert all(pack_rows([rows[r] for r in batch]).unique_tokens <= budget for batch in plan)


def test_a_tree_that_fits_is_not_split():
    rows, trees = forest(0)
    sizes = {t: pack_rows([r for r, u in zip(rows, trees) if u == t]).unique_tokens for t in set(trees)}
    plan = [part.rows for part in plan_micro_batches(rows, trees, 2 * max(sizes.values()))]
    for tree in set(trees):
        assert sum(any(trees[r] == tree for r in batch) for batch in plan) == 1
    assert len(plan) <= len(sizes) / 2


def test_a_tree_that_does_not_fit_is_cut_where_little_is_shared_twice():
    rng = random.Random(0)
    run = lambda n: [rng.randrange(VOCABULARY) for _ in range(n)]  # noqa: E731
    prompt, left, right = run(10), run(50), run(50)
    rows = [prompt + side + run(5) for _ in range(4) for side in (left, right)]
    plan = [part.rows for part in plan_micro_batches(rows, [0] * 8, 100)]
    assert [len(p) for p in plan] == [4, 4]
    assert sum(pack_rows([rows[r] for r in p]).unique_tokens for p in plan) == 2 * (10 + 50 + 4 * 5)


def test_a_row_beyond_the_budget_is_refused():
    with pytest.raises(ValueError, match="row of 9 tokens exceeds the budget of 8.*ppo_max_token_len_per_gpu"):
        plan_micro_batches([[1] * 9, [2]], [0, 1], 8)


def test_a_tree_beyond_the_budget_stays_whole_where_chunks_are_cheaper_than_cutting():
    rng = random.Random(0)
    run = lambda n: [rng.randrange(VOCABULARY) for _ in range(n)]  # noqa: E731
    prompt = run(60)
    rows = [prompt + run(10) for _ in range(9)]  # 150 tokens; cut for 100 into two pieces of 100 and one of 70
    chunks = lambda whole: [part.chunks for part in plan_micro_batches(rows, [0] * 9, 100, chunked_cost=whole)]  # noqa: E731
    assert chunks(None) == chunks(2) == [1, 1, 1]
    assert chunks(4 / 3) == chunks(1) == chunks(0) == [2]


def test_a_tree_that_fits_is_never_computed_in_chunks():
    rows, trees = forest(0)
    budget = 2 * max(pack_rows([r for r, u in zip(rows, trees) if u == t]).unique_tokens for t in set(trees))
    assert plan_micro_batches(rows, trees, budget, chunked_cost=0) == sorted(
        plan_micro_batches(rows, trees, budget), key=lambda p: -pack_rows([rows[r] for r in p.rows]).unique_tokens
    )


def test_a_row_beyond_the_budget_is_computed_in_chunks_where_that_is_allowed():
    assert [p.chunks for p in plan_micro_batches([[1] * 9, [2]], [0, 1], 4, chunked_cost=4 / 3)] == [3, 1]


@pytest.mark.parametrize("cells", [1, 2, 3, 5])
def test_cells_hold_each_row_once_and_about_as_many_each(cells):
    rows, trees = forest(0)
    placed = place_rows(rows, trees, cells)
    assert sorted(r for cell in placed for r in cell) == list(range(len(rows)))
    assert len(placed) == cells and max(map(len, placed)) <= 1.25 * len(rows) / cells + 1


def test_trees_of_equal_size_are_dealt_whole():
    rng = random.Random(0)
    run = lambda n: [rng.randrange(VOCABULARY) for _ in range(n)]  # noqa: E731
    prompts = [run(10) for _ in range(8)]
    rows = [prompts[i % 8] + run(5) for i in range(32)]
    for cells in (2, 4, 8):
        placed = place_rows(rows, [i % 8 for i in range(32)], cells)
        assert [len(cell) for cell in placed] == [32 // cells] * cells
        assert all(len({r % 8 for r in cell}) == 8 // cells for cell in placed)


def test_a_tree_larger_than_its_share_is_cut_so_that_no_rank_is_left_idle():
    rows = [[1, 2, 3, i] for i in range(20)]
    assert [len(cell) for cell in place_rows(rows, [0] * 20, 4)] == [5, 5, 5, 5]
    assert all(place_rows(rows[:7], [0] * 4 + [1] * 3, 4))


def _in_ranks(function, monkeypatch) -> list:
    """Run ``function(rank)`` on two threads whose agreement is a real maximum over both."""
    barrier, seen, lock = threading.Barrier(2, timeout=20), {}, threading.Lock()
    ranks = threading.local()

    def all_reduce(tensor, op, group):
        assert op == dist.ReduceOp.MAX
        with lock:
            seen[ranks.me] = tensor.clone()
        barrier.wait()
        tensor.copy_(torch.maximum(seen[0], seen[1]))
        barrier.wait()

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    results: list = [None, None]

    def run(rank):
        ranks.me = rank
        try:
            results[rank] = function(rank)
        except ValueError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_agree_on_the_number_of_micro_batches(monkeypatch):
    big, small = forest(0), forest(1, count=1)
    plans = _in_ranks(lambda r: plan_micro_batches(*(big, small)[r], 120, group=object()), monkeypatch)
    assert len(plans[0]) == len(plans[1]) > 1
    assert sorted(r for part in plans[1] for r in part.rows) == list(range(len(small[0])))
    assert all(part.rows for part in plans[1])


def test_ranks_agree_on_the_number_of_chunks(monkeypatch):
    """A forward more on one rank than on another would leave a sharded model waiting."""
    big, small = forest(0), forest(1, count=1)
    plans = _in_ranks(lambda r: plan_micro_batches(*(big, small)[r], 60, group=object(), chunked_cost=0), monkeypatch)
    counts = [[part.chunks for part in plan] for plan in plans]
    assert counts[0] == counts[1] and max(counts[0]) > 1
    for data, plan in zip((big, small), plans):
        assert sorted(r for part in plan for r in part.rows) == list(range(len(data[0])))
        for part in plan:
            most = pack_rows([data[0][r] for r in part.rows]).unique_tokens
            assert part.chunks <= most


def test_all_ranks_stop_when_one_has_too_few_rows(monkeypatch):
    big, small = forest(0), ([[1, 2, 3]], [0])
    results = _in_ranks(lambda r: plan_micro_batches(*(big, small)[r], 60, group=object()), monkeypatch)
    assert all(isinstance(r, ValueError) and "only 1 rows" in str(r) for r in results)
