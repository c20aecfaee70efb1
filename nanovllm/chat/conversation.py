"""Conversations: checked, and turned into prompts by the tokenizer's chat template."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.chat.harmony.history import (
    check_effort,
    harmony_messages,
    harmony_tools,
    shows_harmony,
)
from nanovllm.chat.message_fields import CALL, FUNCTION, MESSAGE, PART, check_fields
from nanovllm.chat.template_fields import check_template_options, reads, template_keywords
from nanovllm.chat.unseen import check_calls_seen, check_results_seen
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import (
    as_list,
    check_bool,
    check_choice,
    check_text,
    did_you_mean,
    shorten,
)
from nanovllm.utils.json_text import parse_json
from nanovllm.utils.option import options_of

# Parameters of transformers' `apply_chat_template` that are not variables of the template.
TEMPLATE_OPTIONS = ("chat_template", "continue_final_message", "documents")
ROLES = ("system", "developer", "user", "assistant", "tool")
CHAT_OPTIONS = (
    "messages", "sampling_params", "use_tqdm", "tools", "tool_choice", "parallel_tool_calls",
    "add_generation_prompt", "chat_template_kwargs",
)  # fmt: skip


def chat_texts(
    tokenizer: Any,
    template: str,
    messages: Any,
    tools: list[Any] | None,
    add_generation_prompt: bool,
    keywords: Mapping[str, Any],
) -> list[str]:
    """The texts of one conversation or of several, by the chat template with this text.

    `keywords` also go to the template. A keyword that the template does not mention is a TypeError,
    but the keyword `chat_template_kwargs` is a dict that may have any names.
    """
    given = dict(keywords)
    more = check_template_options(given.pop("chat_template_kwargs", None))
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt, **more}
    prompts = check_bool("add_generation_prompt", options["add_generation_prompt"])
    _check_template(tokenizer, {**more, **given})
    given = template_keywords(template, given)
    template_options = {**options, **given}
    if prompts and template_options.get("continue_final_message"):
        raise ValueError("continue_final_message needs add_generation_prompt to be False")
    _check_keywords(template, given)
    conversations = _check_conversations(messages, template)
    if shows_harmony(template):
        check_effort(template_options)
        template_options["tools"] = harmony_tools(tools)
        conversations = [
            harmony_messages(_place(index, conversations), one)
            for index, one in enumerate(conversations)
        ]
    texts = []
    for index, conversation in enumerate(conversations):
        place = _place(index, conversations)
        apply = functools.partial(_apply_template, tokenizer, place, options=template_options)
        texts.append(apply(conversation))
        if not _mentions(template, "tool"):
            check_results_seen(place, conversation, texts[-1], apply)
    return texts


def own_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a chat without vLLM's, whose values must ask for what is always done."""
    if not given:
        return {}
    from nanovllm.from_vllm.names.calls import CHAT

    for name in given.keys() & CHAT.keys():
        CHAT[name].check(name, given[name])
    return {name: value for name, value in given.items() if name not in CHAT}


def _check_conversations(messages: Any, template: str) -> list[list[Any]]:
    """A list of conversations from one or several; parts of text become one text."""
    items = as_list("messages", messages, "a list of messages, or of such lists")
    conversations = [items] if items and isinstance(items[0], Mapping) else items
    return [
        _check_conversation(_place(index, conversations), conversation, template)
        for index, conversation in enumerate(conversations)
    ]


def _place(index: int, conversations: Sequence[Any]) -> str:
    """How errors name a conversation: `messages` if it is the only one, as in a request."""
    is_only = len(conversations) == 1 and isinstance(conversations[0], list)
    return "messages" if is_only else f"conversations[{index}]"


def _check_conversation(name: str, conversation: Any, template: str) -> list[Any]:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        raise TypeError(f"{name} must be a list of messages, got {shorten(conversation)}")
    if not conversation:
        raise ValueError(f"{name} must have a message or more, got none")
    for index, message in enumerate(conversation):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(
                f'{name}[{index}] must be a dict with a "role", got {shorten(message)}'
            )
    return [
        _for_template(f"{name}[{i}]", message, template) for i, message in enumerate(conversation)
    ]


def _for_template(name: str, message: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    """A message as templates expect it: a text as content, and arguments of calls as objects.

    Templates ignore roles that they do not know. So the role developer, OpenAI's name for system,
    becomes system, and other unknown roles are errors.
    """
    role = message["role"]
    if role not in ROLES and not _mentions(template, role):
        check_choice(f"{name}.role", role, ROLES)
    check_fields(name, message, MESSAGE, template)
    if role == "developer" and role not in template:
        message = {**message, "role": "system"}
    content = message.get("content")
    if isinstance(content, list):
        kinds = ("text", "refusal") if role == "assistant" else ("text",)
        content = _joined(f"{name}.content", content, kinds, template)
    elif content is None and role == "assistant":  # it calls tools, or refuses to answer
        content = message.get("refusal") or ""
    if not isinstance(content, str):
        raise TypeError(f"{name}.content must be a text or parts of text, got {shorten(content)}")
    message = {**message, "content": content}
    if message.get("tool_calls"):
        check_calls_seen(name, template)
        calls = as_list(f"{name}.tool_calls", message["tool_calls"], "a list of calls")
        parsed = [
            _call(f"{name}.tool_calls[{index}]", call, template) for index, call in enumerate(calls)
        ]
        message = {**message, "tool_calls": parsed}
    return message


def _mentions(template: str, role: Any) -> bool:
    """Whether a template has this role between quotation marks."""
    return isinstance(role, str) and any(f"{mark}{role}{mark}" in template for mark in "'\"")


def _call(name: str, call: Any, template: str) -> Any:
    """A tool call with its arguments, JSON text in OpenAI's API, as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f'{name} must be {{"type": "function", "function": {{"name": ..., "arguments": ...}}}},'
            f" got {shorten(call)}"
        )
    check_fields(name, call, CALL, template)
    check_fields(f"{name}.function", function, FUNCTION, template)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = parse_json(arguments or "{}")
    except ValueError as error:
        raise ValueError(f"{name}.function.arguments is not valid JSON: {error}") from None
    return {**call, "function": {**function, "arguments": parsed}}


def _joined(name: str, parts: list[Any], kinds: Sequence[str], template: str) -> str:
    """The text of a content in parts `{"type": "text", "text": ...}`: one line for each part."""
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") not in kinds:
            raise ValueError(f"{name}[{index}] must be a part of text, got {shorten(part)}")
        kind = part["type"]  # a part's text has the name of its type
        if not isinstance(part.get(kind), str):
            raise TypeError(f"{name}[{index}].{kind} must be a text, got {shorten(part.get(kind))}")
        check_fields(f"{name}[{index}]", part, (*PART, kind), template)
    return "\n".join(part[part["type"]] for part in parts)


def given_template(keywords: Mapping[str, Any]) -> str | None:
    """The chat template that replaces the tokenizer's, if there is one in the keywords."""
    more = keywords.get("chat_template_kwargs") or {}
    inner = more.get("chat_template") if isinstance(more, Mapping) else None
    template: str | None = keywords.get("chat_template") or inner
    return template


def has_chat_template(tokenizer: Any) -> bool:
    """Whether there is a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def _check_template(tokenizer: Any, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if there is no template, neither the tokenizer's nor one in `options`."""
    if options.get("chat_template") is None and not has_chat_template(tokenizer):
        lacks = (
            "the model directory has no tokenizer"
            if tokenizer is None
            else "the tokenizer has no chat template"
        )
        raise ValueError(f"{lacks}; make prompts yourself, and pass them to generate()")


def _apply_template(
    tokenizer: Any, place: str, conversation: list[Any], options: Mapping[str, Any]
) -> str:
    """The text of the conversation at `place`; the template writes the special tokens."""
    try:
        text: str = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    except Exception as error:  # a template is a program that may raise anything
        raise ValueError(f"the chat template fails for {place}: {_described(error)}") from error
    check_text(place, text)
    return text


def _described(error: Exception) -> str:
    """The error of a template. Those of functions that it calls have their type."""
    from jinja2 import TemplateError

    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"


def _check_keywords(template: str, given: Mapping[str, Any]) -> None:
    """Raise for a keyword of `chat` that neither transformers nor the template knows."""
    for name in given:
        if name in TEMPLATE_OPTIONS or reads(template, name):
            continue
        if name in options_of(SamplingParams):
            hint = "; it is a field of SamplingParams"
        else:
            hint = did_you_mean(name, (*CHAT_OPTIONS, *TEMPLATE_OPTIONS))
        raise TypeError(
            f"unknown keyword {name!r}{hint or '; the chat template does not mention it either'}"
        )
