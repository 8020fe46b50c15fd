"""Chat templates with tools in the forms that model families write: what is around messages, calls and results, and how a
call ends. Small ones of our own, and real ones where a folder of them is named (``VERL_BPO_CHAT_TEMPLATES``, such as the
``chat_templates`` of an unpacked trl)."""

import os
import re
from pathlib import Path

import tokenizers
import transformers

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Walk.",
            "parameters": {
                "type": "object",
                "properties": {
                    "direction": {"type": "string", "description": "Where to."},
                    "steps": {"type": "integer", "description": "How far."},
                },
                "required": ["direction"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look around.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
)


def chat(call, result, *, end="<|im_end|>\n", role="<|im_start|>{}\n", result_role="user", merge=True):
    """A template of messages in ``role`` and ``end``, with ``call`` and ``result`` as jinja that writes one of each."""
    begin = {name: f"{{{{ {role.format(name)!r} }}}}" for name in ("system", "user", "assistant", result_role)}
    finish = f"{{{{ {end!r} }}}}"
    grouped = "(loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool')" if merge else "true"
    last = "(loop.last or messages[loop.index0 + 1].role != 'tool')" if merge else "true"
    return (
        f"{{%- if tools %}}{begin['system']}{{{{ tools | tojson }}}}{finish}{{% endif %}}"
        "{%- for m in messages %}"
        f"{{%- if m.role == 'tool' %}}{{%- if {grouped} %}}{begin[result_role]}{{% endif %}}{result}"
        f"{{%- if {last} %}}{finish}{{% endif %}}"
        f"{{%- elif m.role == 'assistant' %}}{begin['assistant']}{{{{ m.content }}}}"
        f"{{%- for c in m.tool_calls or [] %}}{{%- set c = c.function %}}{call}{{% endfor %}}{finish}"
        f"{{%- elif m.role == 'system' %}}{begin['system']}{{{{ m.content }}}}{finish}"
        f"{{%- else %}}{begin['user']}{{{{ m.content }}}}{finish}{{% endif %}}{{% endfor %}}"
        f"{{%- if add_generation_prompt %}}{begin['assistant']}{{% endif %}}"
    )


_JSON_CALL = (
    '<tool_call>\\n{{ \'{\' }}"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}{{ \'}\' }}\\n</tool_call>'
)
_XML_CALL = (
    "{{ '<tool_call>\\n<function=' + c.name + '>\\n' }}{%- for k, v in c.arguments.items() %}"
    "{{ '<parameter=' + k + '>\\n' ~ v ~ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}"
)
_KEYED_CALL = (
    "{{ '<tool_call>' + c.name + '\\n' }}{%- for k, v in c.arguments.items() %}"
    "{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' ~ v ~ '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>' }}"
)
_RESULT = "{{ '<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
OWN = {
    "hermes": (chat(_JSON_CALL.replace("\\n", "{{ '\\n' }}"), _RESULT), "<|im_end|>"),
    "qwen3_coder": (chat(_XML_CALL, _RESULT), "<|im_end|>"),
    # The next message's first token is what ends a turn.
    "glm": (chat(_KEYED_CALL, _RESULT, end="", role="<|{}|>\n", result_role="observation"), "<|endoftext|>"),
    # A call ends in a token of its own, and its result stands in the same turn.
    "gemma4": (
        "{%- if tools %}{{ '<|turn>system\\n' }}{{ tools | tojson }}{{ '<turn|>\\n' }}{% endif %}"
        "{%- for m in messages %}{%- if m.role == 'tool' %}"
        "{{ '<|tool_response>response:' + m.name + '{' + m.content + '}<tool_response|>' }}"
        "{%- else %}{{ '<|turn>' + m.role + '\\n' + m.content }}{%- for c in m.tool_calls or [] %}{%- set c = c.function %}"
        "{{ '<|tool_call>call:' + c.name + '{' }}{%- for k, v in c.arguments.items() %}{{ k ~ ':' }}"
        "{{ '<|\"|>' + v + '<|\"|>' if v is string else v }}{{ \",\" if not loop.last }}{% endfor %}"
        "{{ '}<tool_call|>' }}{% endfor %}{{ '<turn|>\\n' if not m.tool_calls }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>assistant\\n' }}{% endif %}",
        "<turn|>",
    ),
}
REAL = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "nemotron_3_nano": "<|im_end|>",
    "glm4moe": "<|endoftext|>",
    "gemma4_v5": "<turn|>",
    "gptoss": "<|return|>",
    "llama3_1": "<|eot_id|>",
    "lfm2_v2": "<|im_end|>",
    "muse_glimmer": "<|eot|>",
}
"""Ten families by the file of their template, with the token that ends a turn."""
_MARKS = re.compile(r"<\|[^<>|\s]{1,40}\|>|<\|[a-z_]+>|<[a-z_]+\|>|</?tool_call>|</?tool_response>|</?think>|<\|\"\|>")
_PLAIN = re.compile(r"</?(?:tool_call|tool_response|think)>")
"""Marks that are tokens, and no special ones."""


def real_template(name):
    """Its text; None where no folder is named."""
    folder = os.environ.get("VERL_BPO_CHAT_TEMPLATES")
    return (Path(folder) / f"{name}.jinja").read_text() if folder else None


def make_tokenizer(template, eos):
    """A byte-level tokenizer with the template's marks as tokens."""
    marks = sorted({*_MARKS.findall(template), eos})
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<pad>", *(mark for mark in marks if not _PLAIN.fullmatch(mark))],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["You move north. Use the tools, move or look.", "name arguments direction"], trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in marks if _PLAIN.fullmatch(mark)])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<pad>")
    wrapped.chat_template = template
    return wrapped
