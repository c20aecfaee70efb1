"""JSON schemas of the fields of bodies, by name.

Those of `SamplingParams` are made from its fields. A field without a schema takes any value here;
the parser of its body decides.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.openai.pooling import STATES, VECTOR
from nanovllm.openai.vectors import FORMATS
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.option import NOTHING, Option, options_of
from nanovllm.utils.other_names import OtherName
from nanovllm.vectors.pooling import POOLINGS

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
SWITCH: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
IDS: Schema = {"type": "array", "items": NUMBER}
PROMPTS: Schema = {"$ref": "#/components/schemas/Prompts"}


def listed(items: Schema) -> Schema:
    """The schema of a list of these."""
    return {"type": "array", "items": items}


COMPONENTS: dict[str, Schema] = {
    "Prompt": {"description": "a text, or token ids", "anyOf": [TEXT, IDS]},
    "Prompts": {
        "description": "a text, token ids, or a list of either",
        "anyOf": [TEXT, IDS, listed({"$ref": "#/components/schemas/Prompt"})],
    },
    "Message": {
        "type": "object",
        "properties": {
            "role": TEXT,
            "content": {"anyOf": [TEXT, listed(OBJECT), {"type": "null"}]},
        },
        "required": ["role"],
    },
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": TEXT,
                    "type": TEXT,
                    "param": {"type": "null"},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type"],
            }
        },
        "required": ["error"],
    },
    "MessagesError": {  # of Anthropic's API
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["error"]},
            "error": {
                "type": "object",
                "properties": {"type": TEXT, "message": TEXT},
                "required": ["type", "message"],
            },
        },
        "required": ["type", "error"],
    },
}
COMMON: dict[str, Schema] = {
    "messages": listed({"$ref": "#/components/schemas/Message"}),
    "prompt": PROMPTS, "input": PROMPTS, "queries": PROMPTS, "documents": PROMPTS,
    "text_1": PROMPTS, "text_2": PROMPTS, "query": TEXT, "model": TEXT, "user": TEXT,
    "tools": listed(OBJECT), "tool_choice": {"anyOf": [TEXT, OBJECT]},
    "parallel_tool_calls": SWITCH, "chat_template_kwargs": OBJECT, "cache_salt": TEXT,
    "reasoning_effort": TEXT, "echo": SWITCH, "stream": SWITCH, "stream_options": OBJECT,
    "max_completion_tokens": NUMBER, "top_logprobs": NUMBER, "response_format": OBJECT,
    "metadata": OBJECT, "dimensions": NUMBER, "normalize": SWITCH, "prompt_name": TEXT,
    "instruction": TEXT, "method": TEXT, "top_n": NUMBER, "tokens": IDS,
    "pooling": {"type": "string", "enum": list(POOLINGS)},
    "task": {"type": "string", "enum": [STATES, VECTOR]},
    "encoding_format": {"type": "string", "enum": list(FORMATS)},
    "add_special_tokens": SWITCH, "return_token_strs": SWITCH, "lora_name": TEXT,
    "lora_path": TEXT, "load_inplace": SWITCH, "lora_int_id": NUMBER,
}  # fmt: skip
KINDS: dict[Any, Schema] = {
    int: NUMBER, float: {"type": "number"}, bool: SWITCH, str: TEXT, Iterable[int]: IDS,
    Iterable[str]: listed(TEXT), types.NoneType: {"type": "null"},
    Mapping[int, float]: {"type": "object", "additionalProperties": {"type": "number"}},
}  # fmt: skip


def field_schemas(names: Iterable[str]) -> dict[str, Schema]:
    """The schema of each name. Names that only calls in Python take are left out."""
    options, kinds = options_of(SamplingParams), _annotations()
    return {
        name: COMMON.get(name, {})
        if name in COMMON or name not in options
        else _of_option(options[name], kinds[name])
        for name in names
        if name not in options or not options[name].only_python
    }


def other_schemas(others: Mapping[str, OtherName]) -> dict[str, Schema]:
    """The schemas of fields that accept few values; null counts as a missing field."""
    return {
        name: {
            "description": other.why.replace("`", ""),
            "enum": [None, *(value for value in other.accepts if value is not None)],
        }
        for name, other in others.items()
    }


def _annotations() -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(SamplingParams)}


def _of_option(option: Option, annotation: Any) -> Schema:
    """The schema of a field: its type, and in words its range and what it does."""
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else [annotation]
    kinds = [KINDS.get(part, OBJECT) for part in parts]
    unique = [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]
    says = f"{option.help.replace('`', '')}; must be {option.rule.allowed}"
    if option.none not in (None, NOTHING):
        says += f"; null: {option.none}".replace("`", "")
    found: Schema = {"description": says}
    if option.rule.choices:
        found["enum"] = [*option.rule.choices, *([None] if types.NoneType in parts else ())]
        return found
    return found | (unique[0] if len(unique) == 1 else {"anyOf": unique})
