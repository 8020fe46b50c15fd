"""Which model families are computed right: every causal language model of the installed transformers, built small.

    python benchmarks/model_families.py [--families qwen2 llama] [--out benchmarks/results/model_families.json]

For each family, in float32 on a CPU: log-probs, entropies and gradients of a packed tree and of the same tree in chunks
against the rows one by one; the generator with neighbours against plain forward passes; the value readout against the
hidden states under the output embedding. A family that verl_bpo.model.support refuses says so; one that can't be built
small is left out with the reason. Needs torch and transformers only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl_bpo.advantages.sapo import turn_boundaries
from verl_bpo.generation.generator import ContinuousBatcher
from verl_bpo.generation.sampling import SamplingParams
from verl_bpo.model.packed_tree import chunked_outputs, pack_rows, packed_forward, row_outputs, tree_outputs
from verl_bpo.model.support import UnsupportedModel, longest_sequence
from verl_bpo.model.value_readout import attach_value_readout, boundary_positions

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 97
WEIGHTS = 3_000_000
"""A family whose smallest model found here has more parameters is left out."""
TOLERANCE = 2e-3
"""Largest difference of log-probs, entropies and values, and of gradients relative to their norm. Families that are computed
wrongly are off by far more; float32 sums in another order by less."""
SIZES = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "emb_dim": 32, "embedding_size": 32, "embedding_dim": 32,
    "input_embedding_size": 32, "output_embedding_size": 32, "attention_hidden_size": 32, "lru_width": 32,
    "word_embed_proj_dim": 32, "hidden_size_per_layer_input": 8, "pronunciation_embed_dim": 8, "shape_embed_dim": 8,
    "intermediate_size": 48, "ffn_dim": 48, "ffn_hidden_size": 48, "dff": 48, "dim_ff": 48, "d_inner": 64, "n_inner": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "intermediate_size_mlp": 48, "expert_ffn_hidden_size": 16,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "block_ff_dim": 48, "feed_forward_size": 48,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "attention_heads": 4, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "dim_head": 8, "d_head": 8, "kv_channels": 8,
    "global_head_dim": 8, "attention_head_dim": 8, "attention_head_size": 8, "swa_head_dim": 8, "rotary_dim": 4,
    "num_global_key_value_heads": 2, "query_pre_attn_scalar": 8,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "zero_expert_num": 2,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "num_shared_experts": 1, "n_shared_experts": 1,
    "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_expert_groups": 1,
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "pronunciation_vocab_size": 20, "shape_vocab_size": 20,
    "sliding_window": 64, "attention_window_size": 8, "window_size": 8, "attention_chunk_size": 8, "chunk_size": 8,
    "n_positions": 128, "max_position_embeddings": 128, "max_seq_len": 128, "context_length": 128, "n_ctx": 128,
    "max_target_positions": 128,
    "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 8, "mamba_head_dim": 8, "mamba_d_state": 8,
    "ssm_state_size": 8, "state_size": 8, "n_mamba_heads": 2, "mamba_d_ssm": 64, "mamba_chunk_size": 8, "mamba_ngroups": 1,
    "n_groups": 1, "time_step_rank": 4, "mamba_dt_rank": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "conv_dim": 32, "expand": 2,
    "decoder_start_token_id": 2, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8, "o_groups": 2, "o_lora_rank": 8,
    "num_kv_shared_layers": 5, "laurel_rank": 8, "altup_num_inputs": 2,
}  # fmt: skip
"""What a config's key becomes. Keys that it hasn't are left alone."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks",
          "num_encoder_layers", "num_decoder_layers")  # fmt: skip
LAYER_COUNT = {"bamba": 2, "granitemoehybrid": 2, "jamba": 5, "recurrent_gemma": 3, "gemma3n_text": 10}
"""Families whose default config doesn't list its layers' kinds."""
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "attention_layers", "no_rope_layers", "attn_layers")


def small_config(family: str) -> Any:
    """The family's default config with every size cut down, and as many layers as show each kind once (two at least)."""
    default = CONFIG_MAPPING[family]()
    text = default.get_text_config()
    known = text.to_dict()
    layers, lists = 2, {k: known[k] for k in PER_LAYER if isinstance(known.get(k), (list, tuple))}
    for kinds in lists.values():
        layers = max(
            layers, next(n for n in range(1, len(kinds) + 1) if set(map(str, kinds[:n])) == set(map(str, kinds)))
        )
    layers = LAYER_COUNT.get(family, layers)
    unset = [
        k
        for k in ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_group", "topk_group")
        if k in known
    ]
    sizes = {
        k: v for k, v in SIZES.items() if (type(known.get(k)) is int and known[k]) or (k in unset and known[k] is None)
    }
    if "qk_rope_head_dim" in known:  # latent attention: heads of keys have a part with positions, and that is its width
        sizes["head_dim"], sizes["num_key_value_heads"] = SIZES["qk_rope_head_dim"], SIZES["num_attention_heads"]
    sizes.update({k: layers for k in LAYERS if k in known}, **{k: list(v[:layers]) for k, v in lists.items()})
    sizes.update({k: 0.0 for k, v in known.items() if "drop" in k and isinstance(v, float)})
    tokens = {k: v for k, v in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)) if k in known}
    return type(text)(**{**sizes, **tokens})


def small_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model in float32 whose distributions are far from uniform.

    Args:
        changes: attributes of its config.

    Raises:
        Exception: whatever stopped it from being built; see :func:`left_out`.
    """
    config = small_config(family)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if weights > WEIGHTS:
        raise ValueError(f"{weights} parameters, however small its config")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5 / max(parameter.shape[-1], 1) ** 0.5).mul_(2)
    return model


def rows_of_a_tree(seed: int = 0) -> list[list[int]]:
    """Four rows: a trunk, two forks of it at different places and a fork of a fork."""
    draw = torch.Generator().manual_seed(seed)
    token = lambda n: torch.randint(3, VOCABULARY, (n,), generator=draw).tolist()  # noqa: E731
    trunk = token(21)
    fork = trunk[:9] + token(8)
    return [trunk, fork, fork[:13] + token(6), trunk[:15] + token(4)]


# --- what is compared -----------------------------------------------------------------------------------------------


def loss(log_probs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """Any function in which every token and its entropy counts differently."""
    weights = torch.linspace(-1.0, 1.5, len(log_probs)).cos()
    return (weights * log_probs).sum() + 0.3 * (weights.flip(0) * entropies).sum()


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def one_by_one(
    model: PreTrainedModel, rows: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Log-prob of the next token (0 at each row's end), entropy there, and the gradients of :func:`loss`."""
    log_probs, entropies = [], []
    for row in rows:
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
        each = logits.log_softmax(-1)
        log_probs.append(torch.cat([each[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0], each.new_zeros(1)]))
        entropies.append(-(each.exp() * each).sum(-1))
    found = torch.cat(log_probs), torch.cat(entropies)
    loss(*found).backward()
    return *(x.detach() for x in found), gradients(model)


def on_the_tree(model: PreTrainedModel, rows: list[list[int]], chunks: int) -> tuple:
    """The same from the packed tree: in one piece, or in ``chunks``."""
    tree = pack_rows(rows)
    if chunks == 1:
        logits = packed_forward(model, tree).logits[0]
        out = row_outputs(*tree_outputs(logits, tree, entropy=True), tree)
    else:
        out = chunked_outputs(model, tree, entropy=True, chunks=chunks)
    loss(out.log_probs, out.entropy).backward()
    return out.log_probs.detach(), out.entropy.detach(), gradients(model)


def difference(ours: tuple, theirs: tuple) -> float:
    """Largest of log-probs' and entropies' absolute difference and gradients' relative one."""
    mine, others = ours[2], theirs[2]
    squares = sum(float((mine.get(n, torch.zeros_like(g)) - g).square().sum()) for n, g in others.items())
    norm = sum(float(g.square().sum()) for g in others.values())
    return max(*(float((a - b).abs().max()) for a, b in zip(ours[:2], theirs[:2])), (squares / norm) ** 0.5)


@torch.no_grad()
def generated(model: PreTrainedModel) -> float:
    """Largest difference between log-probs of tokens generated among neighbours and those of a plain forward pass of each
    sequence alone. Prompts of unlike lengths join and leave while others go on."""
    rows = rows_of_a_tree()
    prompts = [rows[0][:14], rows[1][:3], rows[1], rows[2][:14]]
    limits = [SamplingParams(max_tokens=n, logprobs=True, seed=n) for n in (7, 5, 3, 6)]
    batcher = ContinuousBatcher(model, max_num_seqs=3, block_size=4, max_model_len=longest_sequence(model.config))
    completions = batcher.generate(prompts, limits)
    worst = 0.0
    for prompt, completion in zip(prompts, completions):
        output = completion.token_ids
        logits = model(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        alone = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
        worst = max(worst, float((alone - torch.tensor(completion.logprobs)).abs().max()))
    return worst


@torch.no_grad()
def read_out(model: PreTrainedModel) -> float:
    """Largest difference between the readout's values and the same heads on the hidden states that give the logits."""
    seen: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    readout = attach_value_readout(model)
    readout.weight.normal_()
    ids = torch.tensor([rows_of_a_tree()[0]])
    mask = torch.zeros_like(ids)
    mask[0, 5:9] = mask[0, 12:] = 1
    with readout.reading(
        boundary_positions(turn_boundaries(mask), torch.zeros(1, dtype=torch.int64), tokens=21)
    ) as found:
        logits = model(input_ids=ids, use_cache=False).logits[0]
    handle.remove()
    hidden = seen[-1][0]
    assert hidden.shape[0] == len(logits) == 21
    state, action = hidden[[4, 11]] @ readout.weight[0], hidden[[8, 20]] @ readout.weight[1]
    return max(float((found.state - state).abs().max()), float((found.action - action).abs().max()))


CHECKS: dict[str, Callable[[PreTrainedModel], float]] = {
    "packed": lambda m: difference(on_the_tree(m, rows_of_a_tree(), 1), one_by_one(m, rows_of_a_tree())),
    "chunked": lambda m: difference(on_the_tree(m, rows_of_a_tree(), 4), one_by_one(m, rows_of_a_tree())),
    "readout": read_out,
    "generator": generated,
}
"""By use, the largest difference from what is right. The generator comes last: it changes the model's attention."""


# --- the table ------------------------------------------------------------------------------------------------------


def family_result(family: str) -> dict[str, Any]:
    """By check a difference or a refusal; or ``left_out`` with the reason."""
    try:
        model = small_model(family)
        model(input_ids=torch.tensor([rows_of_a_tree()[0]]))
    except Exception as error:  # whatever its own code does with a config that it wasn't made for
        return {"left_out": f"can't be built small: {type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    found: dict[str, Any] = {}
    for name, check in CHECKS.items():
        try:
            found[name] = check(model)
        except UnsupportedModel as error:
            found[name] = f"refused: {error}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    start, table = time.time(), {}
    for family in options.families:
        table[family] = result = family_result(family)
        print(family, *(f"{k}={v:.1e}" if isinstance(v, float) else f"{k}: {v}" for k, v in result.items()), sep=" | ")
    right = [f for f, r in table.items() if len(r) == len(CHECKS) and all(isinstance(v, float) for v in r.values())]
    summary = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "tolerance": TOLERANCE,
        "families": len(table),
        "left_out": sum("left_out" in r for r in table.values()),
        "computed_right_in_every_use": len(right),
        "wrong": [f for f, r in table.items() for v in r.values() if isinstance(v, float) and not v < TOLERANCE],
        "seconds": round(time.time() - start),
    }
    print(summary)
    if options.out:
        options.out.write_text(json.dumps(summary | {"table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
