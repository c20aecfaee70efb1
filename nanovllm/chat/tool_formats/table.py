"""All formats of tool calls by name, and which of them a chat template shows."""

import re

from nanovllm.chat.tool_formats.base import ToolFormat
from nanovllm.chat.tool_formats.hermes import Hermes
from nanovllm.chat.tool_formats.llama3_json import Llama3Json
from nanovllm.chat.tool_formats.mistral import Mistral, MistralArgs
from nanovllm.chat.tool_formats.pythonic import Pythonic
from nanovllm.chat.tool_formats.qwen3_coder import Qwen3Coder

FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(), "llama3_json": Llama3Json(), "mistral": Mistral(),
    "mistral_args": MistralArgs(), "pythonic": Pythonic(), "qwen3_coder": Qwen3Coder(),
}  # fmt: skip
# The first one that a template matches; an empty name is a format that is not here.
SIGNS = (
    (r"(?s)<tool_call>.*<function=", "qwen3_coder"),
    (r"<function=|<arg_key>", ""),
    (r"<tool_call>", "hermes"),
    (r"\[ARGS\]", "mistral_args"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"func_name1?\(|<\|python_start\|>\[", "pythonic"),
    (r"<\|python_tag\|>|parameters\\?\": dictionary", "llama3_json"),
)


def shown_format(template: str) -> str | None:
    """The name of the format that a chat template shows; None if there is none that is here."""
    names = (name for sign, name in SIGNS if re.search(sign, template))
    return next(names, "") or None
