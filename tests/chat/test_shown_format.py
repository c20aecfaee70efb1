"""Which format a chat template shows, by short models of what the templates of real models have.

Each of them also writes a call, as a conversation's earlier message: the format's parser reads it.
"""

import json
from typing import Any

import pytest

from nanovllm.chat.chat_format import ChatFormat
from nanovllm.chat.tool_formats.parser import parse
from nanovllm.chat.tool_formats.table import FORMATS, shown_format
from nanovllm.chat.tools import Tool, ToolChoice
from tests.grammar_words import words_tokenizer

CALLS_LOOP = "{% for call in message.tool_calls %}{% set call = call.function %}"
MESSAGES = """{% for message in messages %}<|start|>{{ message.role }}
{% if message.tool_calls %}CALLS{% else %}{{ message.content }}{% endif %}<|stop|>{% endfor %}"""


def template(system: str, calls: str) -> str:
    """A template with its words about tools, and how it writes calls."""
    return "{% if tools %}" + system + "{% endif %}" + MESSAGES.replace("CALLS", calls)


JSON_CALL = '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
PYTHON_WORDS = "put calls as [func_name1(params_name1=params_value1...), func_name2(params)]"
QWEN = template(
    r"""{{- "\n# Tools\n<tools>" }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- "</tools>\nWithin <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>,"
 ~ " \"arguments\": <args-json-object>}\n</tool_call>" }}""",
    CALLS_LOOP + "<tool_call>\n" + JSON_CALL + "\n</tool_call>\n{% endfor %}",
)
QWEN_CODER = template(
    r"""{{- "<tools>" }}{% for tool in tools %}{{- "\n<function>\n<name>" ~ tool.function.name }}
{% endfor %}{{- '\nReply in this format:\n\n<tool_call>\n<function=example_function_name>\n'
 ~ '<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>' }}""",
    CALLS_LOOP + "{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}"
    "{% for name, value in call.arguments | items %}{{- '<parameter=' + name + '>\\n' }}"
    "{{- value | tojson if value is mapping else value | string }}{{- '\\n</parameter>\\n' }}"
    "{% endfor %}{{- '</function>\\n</tool_call>' }}{% endfor %}",
)
HERMES = template(
    "For each call return a JSON object within <tool_call></tool_call> tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</tool_call>',
    CALLS_LOOP + "\n<tool_call>\n" + JSON_CALL + "\n</tool_call>{% endfor %}",
)
LLAMA_CALL = '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
LLAMA_WORDS = (
    """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument """
    """name and its value}. Do not use variables.' }}"""
)
LLAMA_31 = template(
    LLAMA_WORDS,
    CALLS_LOOP + "{% if builtin_tools is defined and call.name in builtin_tools %}"
    "{{- '<|python_tag|>' + call.name + '.call(' }}{% else %}" + LLAMA_CALL + "{% endif %}"
    "{% endfor %}",
)
LLAMA_32 = template(LLAMA_WORDS, CALLS_LOOP + LLAMA_CALL + "{% endfor %}")
LLAMA_4 = template(
    LLAMA_WORDS,
    CALLS_LOOP + "{% if message.content %}<|python_start|>{{ message.content }}<|python_end|>"
    "{% endif %}" + LLAMA_CALL + "{% endfor %}",
)
PYTHONIC = template(
    PYTHON_WORDS,
    "[" + CALLS_LOOP + "{{- call.name + '(' }}{% for name in call.arguments %}{{ name + '=' }}"
    "{{- call.arguments[name] | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}"
    "{{- ')' }}{% if not loop.last %}, {% endif %}{% endfor %}]",
)
MISTRAL = template(
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS] [{% for call in message.tool_calls %}{% set out = call.function | tojson %}"
    '{{ out[:-1] }}, "id": "abcdefghi"}{% if not loop.last %}, {% endif %}{% endfor %}]',
)
MISTRAL_ARGS = template(
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]",
    CALLS_LOOP + "{{- '[TOOL_CALLS]' + call.name + '[ARGS]' }}{{ call.arguments | tojson }}"
    "{% endfor %}",
)
MISTRAL_IDS = MISTRAL_ARGS.replace("+ '[ARGS]'", "+ '[CALL_ID]abcdefghi[ARGS]'")
PLAIN = template("", "")
SHOWN: list[tuple[str, Any, str]] = [
    ("Qwen2.5, Qwen3", QWEN, "hermes"),
    ("Qwen3-Coder", QWEN_CODER, "qwen3_coder"),
    ("Hermes 2 Pro", {"default": PLAIN, "tool_use": HERMES}, "hermes"),
    ("Hermes 3", {"default": PLAIN, "tool_use": HERMES, "rag": "[TOOL_CALLS]"}, "hermes"),
    ("Llama 3.1, 3.3", LLAMA_31, "llama3_json"),
    ("Llama 3.2", LLAMA_32, "llama3_json"),
    ("Llama 4", LLAMA_4, "llama3_json"),
    ("Llama 3.2 and 4, other templates; ToolACE", PYTHONIC, "pythonic"),
    ("Mistral 7B v0.3, Nemo, Small 3", MISTRAL, "mistral"),
    ("Devstral", MISTRAL_ARGS, "mistral_args"),
    ("Mistral Small 3.2", MISTRAL_IDS, "mistral_args"),
    ("one of a dict", {"default": MISTRAL}, "mistral"),
]
TOOL = Tool(
        "get_weather",
        {"properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "object"},
        }},
)  # fmt: skip
ARGUMENTS = {"city": "São \"x\" 'y'\n<Paris>", "days": 3, "at": {"hour": [1, None, True]}}


@pytest.mark.parametrize(("model", "written", "name"), SHOWN, ids=[shown[0] for shown in SHOWN])
def test_a_template_shows_the_format_that_it_writes(model: str, written: Any, name: str) -> None:
    tokenizer = words_tokenizer()
    tokenizer.chat_template = written
    used = tokenizer.get_chat_template(tools=[{}])
    assert ChatFormat(tokenizer, None, None, 64)._template(ToolChoice((TOOL,))) == used
    assert shown_format(used) == name
    call = {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call] * (1 if "Llama" in model else 2)},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    answer = text.split("<|start|>assistant\n")[1].removesuffix("<|stop|>")
    content, calls = parse(FORMATS[name], [TOOL], answer)
    assert content == ""
    assert len(calls) == len(messages[1]["tool_calls"])
    assert all(json.loads(found.arguments) == ARGUMENTS for found in calls)


@pytest.mark.parametrize(
    "other",
    [
        PLAIN,
        "",
        "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}",
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>x</arg_value>",
        "<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>",
        "<TOOLCALL>[{}]</TOOLCALL>",
        "'<\uff5ctool\u2581calls\u2581begin\uff5c>' + name + '<\uff5ctool\u2581sep\uff5c>'",
    ],
)
def test_other_templates_show_none(other: Any) -> None:
    assert shown_format(other) is None
