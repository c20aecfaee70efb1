"""All formats of tool calls by name; find the format that a chat template shows."""

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
# The first pattern that matches a template gives its format; "" is an unsupported format.
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
    """The name of the format that a chat template shows; None if it shows no supported one."""
    names = (name for sign, name in SIGNS if re.search(sign, template))
    return next(names, "") or None
