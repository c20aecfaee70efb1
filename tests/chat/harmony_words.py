"""A tokenizer and a chat template with what harmony needs, for tests; and answers as tokens."""

import json
import re
from pathlib import Path
from typing import Any

from conftest import make_model
from transformers import PreTrainedTokenizerFast

from nanovllm.chat.harmony.marked_text import MARKERS
from tests.grammar_words import words_tokenizer

# What gpt-oss's template reads and refuses, in short.
TEMPLATE = """{{- '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort or 'medium') }}
{{- '<|end|>' }}
{%- set first = messages[0] if messages[0].role in ('system', 'developer') else none %}
{%- if first or tools %}{{- '<|start|>developer<|message|>' ~ (first.content if first else '') }}
{%- for tool in tools or [] %}{{- '// ' + tool.function.description + '\\n' + tool.function.name }}
{%- for name, part in ((tool.function.parameters or {}).properties or {}).items() %}
{{- '// ' + part.description + '\\n' + name }}{% endfor %}{% endfor %}{{- '<|end|>' }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for m in (messages[1:] if first else messages) %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- set later = namespace(found=false) %}
{%- for other in messages[loop.index + (1 if first else 0):] %}
{%- if other.role == 'assistant' and 'tool_calls' not in other %}{% set later.found = true %}
{%- endif %}{% endfor %}
{%- if (m.content or m.thinking) and not later.found %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
{%- endif %}
{%- set call = m.tool_calls[0].function %}{% set last.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""


def harmony_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and some longer tokens, with the markers as special tokens."""
    tokenizer = words_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


TOKENIZER = harmony_tokenizer()
IDS = TOKENIZER.get_added_vocab()
ENDS = (IDS["<|return|>"], IDS["<|call|>"])


def tokens_of(answer: str, tokenizer: Any = TOKENIZER) -> list[int]:
    """The tokens of an answer. A marker with `!` before it is ordinary text."""
    ids = tokenizer.get_added_vocab()
    found: list[int] = []
    for part in re.split(r"(!?<\|\w+\|>)", answer):
        if part in ids:
            found.append(ids[part])
        else:
            text = part.removeprefix("!") if part[1:] in ids else part
            found += text.encode()  # the ids of bytes are their values
    return found


def answer_of(*parts: str) -> str:
    """An answer: the rest of a first message after `<|start|>assistant`, and more messages."""
    return "<|end|><|start|>assistant".join(parts)


def make_harmony_model(path: Path) -> Path:
    """Random weights, and a tokenizer with the markers; `<|return|>` and `<|call|>` end outputs."""
    make_model(path, max_position_embeddings=2048, vocab_size=len(TOKENIZER))
    TOKENIZER.save_pretrained(path)
    file = path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": list(ENDS)}))
    return path
