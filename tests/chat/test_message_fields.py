"""Fields of messages: known ones, those that the chat template reads, and unknown ones."""

from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import Template

from nanovllm.chat.conversation import chat_texts
from nanovllm.chat.message_fields import NOTES
from nanovllm.chat.template_names import names_in, reads_whole

TEMPLATE = (
    "{# secret #}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m['mood'] }}"
    "{% if m.tool_plan %}plan {{ m.tool_plan }}{% endif %}"
    "{% for call in m.tool_calls or [] %} calls {{ call.function.name }}{% endfor %};{% endfor %}"
)
NO_CALLS = TEMPLATE.replace("tool_calls", "foo")
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.role }}:{{ m.content }};"
    "{% endif %}{% endfor %}"
)


def text_of(*messages: Any, template: str = TEMPLATE) -> str:
    def apply(conversation: Any, tokenize: bool, **options: Any) -> str:
        return Template(template).render(messages=conversation, **options)

    tokenizer = SimpleNamespace(chat_template=template, apply_chat_template=apply)
    (text,) = chat_texts(tokenizer, template, list(messages), None, True, {})
    return text


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "a", "foo": 1}, r"^messages\[0\]: unknown field 'foo'$"),
        ({"role": "user", "content": "a", "images": ["x"]}, r"images is not .*: models are text"),
        ({"role": "assistant", "content": "a", "prefix": True}, "use continue_final_message$"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "b"}]}, "a part of text"),
        ({"role": "user", "content": "a", "secret": 1}, r"^messages\[0\]: unknown field 'secret'"),
        ({"role": "user", "contents": "b", "content": "a"}, "did you mean 'content'"),
        ({"role": "user", "content": "a", "audio": {"id": "x"}}, r"^messages\[0\].audio is not"),
        (
            {"role": "assistant", "function_call": {"name": "f"}},
            r"\[0\].function_call .*: use tool_calls$",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "foo": 1}]},
            r"^messages\[0\].tool_calls\[0\]: unknown field 'foo'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "args": "{}"}}]},
            r"^messages\[0\].tool_calls\[0\].function: unknown field 'args'",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "foo": 1}]},
            r"^messages\[0\].content\[0\]: unknown field 'foo'",
        ),
    ],
)
def test_a_field_that_nothing_reads_is_refused(message: Any, words: str) -> None:
    """It was ignored: a typo was not noticed."""
    with pytest.raises(ValueError, match=words):
        text_of(message)


def test_what_clients_send_back_is_taken() -> None:
    """The messages of OpenAI's clients for Python and JavaScript, and of others that wrap them."""
    answer = {
        "role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None, "parsed": None, "reasoning": "r",
        "reasoning_content": "r", "name": "n", "provider_specific_fields": {"refusal": None},
    }  # fmt: skip
    calls = [{**CALL, "index": 0}]
    calls[0]["function"] = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    asked = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}
    called = {"role": "assistant", "content": None, "tool_calls": calls, "foo": None}
    result = {"role": "tool", "content": "c", "tool_call_id": "c"}
    wanted = "user:a;assistant:b;assistant: calls f;tool:c;"
    assert text_of(asked, answer, called, result) == wanted


def test_calls_and_results_that_the_template_drops_are_errors() -> None:
    """They vanished without a word: the model answered as if it had called nothing."""
    asked = {"role": "user", "content": "a"}
    called = {"role": "assistant", "content": "b", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "c", "tool_call_id": "c"}
    with pytest.raises(ValueError, match=r"^messages\[1\].tool_calls: the chat template reads no"):
        text_of(asked, called, result, template=NO_CALLS)
    assert text_of(asked, result, template=NO_CALLS) == "user:a;tool:c;", "it writes every role"
    with pytest.raises(ValueError, match=r"^messages\[1\]: the chat template leaves out messages"):
        text_of(asked, result, template=KNOWN_ROLES)
    assert text_of(asked, {**called, "tool_calls": []}, template=KNOWN_ROLES) == (
        "user:a;assistant:b;"
    )
    whole = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    assert '"f"' in text_of(asked, called, result, template=whole)


def test_a_refusal_is_what_the_assistant_said() -> None:
    assert text_of({"role": "assistant", "content": None, "refusal": "no"}) == "assistant:no;"


def test_a_part_with_a_refusal_is_what_the_assistant_said() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    assert text_of({"role": "assistant", "content": parts}) == "assistant:a\nno;"


@pytest.mark.parametrize("name", NOTES)
def test_notes_are_taken_at_every_level(name: str) -> None:
    """Caching of prompts, and what other servers write into answers."""
    note = {name: "x"}
    function = {"name": "f", "arguments": "{}", **note}
    calls = [{"type": "function", "function": function, **note}]
    asked = {"role": "user", "content": [{"type": "text", "text": "a", **note}], **note}
    assert text_of(asked, {"role": "assistant", "tool_calls": calls}).endswith(" calls f;")


@pytest.mark.parametrize("empty", [None, False, "", [], {}])
def test_an_empty_field_asks_for_nothing(empty: Any) -> None:
    assert text_of({"role": "user", "content": "a", "images": empty, "foo": empty}) == "user:a;"
    with pytest.raises(ValueError, match="unknown field 'foo'"):
        text_of({"role": "user", "content": "a", "foo": 0})


def test_a_name_that_is_no_text_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"^messages\[0\]: names of fields must be texts, got 1$"):
        text_of({"role": "user", "content": "a", 1: 2})


def test_texts_of_a_template_are_no_fields() -> None:
    """Only those that name an item."""
    found = names_in(
        "{{ 'secret' }}{% if m.a == 'user' %}{{ m.get('b', 'no') }}{% endif %}{{ 'c' in m }}"
        "{{ m['d'] }}{{ m | attr('e') }}{% for k in ['f'] %}{{ m[k] }}{% endfor %}"
    )
    assert found - {"get"} == set("abcdef")


@pytest.mark.parametrize(
    ("template", "whole"),
    [
        ("{% for m in messages %}{{ m | tojson }}{% endfor %}", True),
        ("{% set all = messages[1:] %}{% for m in all %}{{ m.items() }}{% endfor %}", True),
        ("{{ messages | tojson }}", True),
        ("{{ messages[0] }}", True),
        ("{% for m in messages %}{{ m.content | tojson }}{{ tools | tojson }}{% endfor %}", False),
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", False),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages | list %}{{ messages | length }}{% endfor %}", False),
        ("{% if %}", False),
    ],
)
def test_a_template_may_read_whole_messages(template: str, whole: bool) -> None:
    assert reads_whole(template) == whole


def test_the_template_may_read_fields_of_its_own() -> None:
    found = text_of({"role": "user", "content": "a", "mood": "!", "tool_plan": "p"})
    assert found == "user:a!plan p;"
    assert {"mood", "tool_plan", "role"} <= names_in(TEMPLATE)
    assert "secret" not in names_in(TEMPLATE)
    assert "b" in names_in("{% if %} a b"), "the words of a template that is not valid"
