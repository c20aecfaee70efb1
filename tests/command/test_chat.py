"""Conversations become exactly the prompts that the tokenizer's chat template makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference import make_llm

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TEMPLATE = (
    "{{ '<|im_start|>' }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if tools %}{{ tools | length }} tools;{% endif %}{% if shout %}LOUD;{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@pytest.fixture
def llm(copy_of_model: Callable[[], Path]) -> LLM:
    path = copy_of_model()
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return make_llm(path)


@pytest.mark.parametrize("several", [False, True])
def test_the_trained_model_answers_chats(several: bool) -> None:
    with make_llm(EMBEDDED_MODEL, max_model_len=512) as llm:
        problems = sample_problems(20)
        conversations = [[user(prompt)] for prompt, _ in problems]
        outputs = (
            llm.chat(conversations, GREEDY, use_tqdm=False)
            if several
            else [llm.chat(talk, GREEDY, use_tqdm=False)[0] for talk in conversations]
        )
    assert [out["text"] for out in outputs] == [answer for _, answer in problems]


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "user:Hi;assistant:"),
        (dict(add_generation_prompt=False), "user:Hi;"),
        (
            dict(tools=[dict(type="function", function=dict(name="f"))]),
            "user:Hi;1 tools;assistant:",
        ),
        (dict(shout=True), "user:Hi;LOUD;assistant:"),
    ],
)
def test_options_reach_the_template(options: dict[str, Any], prompt: str, llm: LLM) -> None:
    (out,) = llm.chat([user("Hi")], GREEDY, use_tqdm=False, **options)
    ids = llm.tokenizer.encode(prompt, add_special_tokens=False)
    (expected,) = llm.generate([258, *ids], GREEDY, use_tqdm=False)
    assert out["token_ids"] == expected["token_ids"]
    assert out["num_prompt_tokens"] == 1 + len(prompt), "the special token was encoded as text"


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        ("Hi", TypeError, "messages must be a list of messages, or of such lists, got 'Hi'"),
        (["Hi"], TypeError, "conversations[0] must be a list of messages, got 'Hi'"),
        ([[user("Hi")], []], ValueError, "conversations[1] must have a message or more"),
        ([[user("Hi")], ["Hi"]], ValueError, "conversations[1][0] must be a dict with"),
        ([{"content": "Hi"}], ValueError, 'messages[0] must be a dict with a "role"'),
        ([[]], ValueError, "messages must have a message or more, got none"),
        ([user("Hi"), user([{"type": "image_url"}])], ValueError, "messages[1].content[0] must"),
        ([user([{"type": "text", "text": 5}])], TypeError, "content[0].text must be a text, got 5"),
        (
            [[user("Hi")], [user(["Hi"])]],
            ValueError,
            "conversations[1][0].content[0] must",
        ),
    ],
)
def test_bad_conversations_are_refused(
    messages: Any, error: type[Exception], words: str, llm: LLM
) -> None:
    with pytest.raises(error) as caught:
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert words in str(caught.value)
    assert llm.is_finished()


def test_a_content_of_parts_is_one_text(llm: LLM) -> None:
    """With a line for each part, as in vLLM."""
    parts = [{"type": "text", "text": "12+"}, {"type": "text", "text": "34="}]
    whole, joined = llm.chat([[user("12+\n34=")], [user(parts)]], GREEDY, use_tqdm=False)
    assert joined.prompt == whole.prompt == "<|im_start|>user:12+\n34=;assistant:"
    assert joined.prompt_token_ids == whole.prompt_token_ids


@pytest.mark.parametrize("message", [{}, {"content": None}])
def test_an_answer_that_only_calls_tools_has_an_empty_content(
    llm: LLM, message: dict[str, Any]
) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    answer = {"role": "assistant", "tool_calls": calls, **message}
    template = TEMPLATE + "{{ messages[1].tool_calls[0].function.name }}"
    messages = [user("Hi"), answer, user("Ho")]
    (out,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
    assert out.prompt == "<|im_start|>user:Hi;assistant:;user:Ho;assistant:f"


@pytest.mark.parametrize(
    ("message", "got"),
    [({}, "None"), ({"content": None}, "None"), ({"content": 5}, "5"), ({"content": {}}, "{}")],
)
def test_a_message_without_a_text_is_refused_by_its_place(
    llm: LLM, message: dict[str, Any], got: str
) -> None:
    words = rf"^messages\[1\].content must be a text or parts of text, got {got}$"
    with pytest.raises(TypeError, match=words):
        llm.chat([user("Hi"), {"role": "user", **message}], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("template", "role", "written"),
    [
        (TEMPLATE, "developer", "system"),
        ("{# or developer #}" + TEMPLATE, "developer", "developer"),
        (TEMPLATE, "tool", "tool"),
        ("{{ '' and 'expert' }}" + TEMPLATE, "expert", "expert"),
    ],
)
def test_a_role_is_one_that_the_template_knows(
    llm: LLM, template: str, role: str, written: str
) -> None:
    """OpenAI's clients write developer in place of system, which most templates pass over."""
    llm.tokenizer.chat_template = template
    (out,) = llm.chat([{"role": role, "content": "Hi"}], GREEDY, use_tqdm=False)
    assert out.prompt == f"<|im_start|>{written}:Hi;assistant:"


@pytest.mark.parametrize("role", ["bot", "Loud", 5, None, ["user"], ""])
def test_a_role_that_no_template_knows_is_refused(llm: LLM, role: Any) -> None:
    with pytest.raises(ValueError, match=r"^messages\[1\].role must be one of 'system', 'devel"):
        llm.chat([user("Hi"), {"role": role, "content": "Hi"}], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("samplng_params", "; did you mean 'sampling_params'?"),
        ("add_generation_promt", "; did you mean 'add_generation_prompt'?"),
        ("temperature", "; it is a field of SamplingParams"),
        ("tokenize", "; the chat template does not mention it either"),
        ("enable_thinking", "; the chat template does not mention it either"),
    ],
)
def test_an_unknown_keyword_is_refused(keyword: str, hint: str, llm: LLM) -> None:
    """Templates ignore what they do not know, so that a misspelled keyword would do nothing."""
    with pytest.raises(TypeError) as caught:
        llm.chat([user("Hi")], GREEDY, use_tqdm=False, **{keyword: True})
    assert str(caught.value) == f"unknown keyword {keyword!r}{hint}"


def test_template_keywords_in_a_dict_need_not_be_known(llm: LLM) -> None:
    """One dict serves several models, as in vLLM."""
    options = dict(chat_template_kwargs={"enable_thinking": False, "shout": True})
    (out,) = llm.chat([user("Hi")], GREEDY, use_tqdm=False, **options)
    assert out.prompt == "<|im_start|>user:Hi;LOUD;assistant:"


def test_a_template_can_be_given(model_dir: Path) -> None:
    """Also to a model without one; it may read keywords of its own."""
    template = "{% for m in messages %}{{ m.content }}{{ ending }}{% endfor %}"
    with make_llm(model_dir) as llm:
        (out,) = llm.chat([user("Hi")], GREEDY, use_tqdm=False, chat_template=template, ending="!")
    assert out.prompt == "Hi!"


def test_a_failing_template_is_an_error_with_its_place(llm: LLM) -> None:
    """It may be the template's own fault, so that the error does not begin with `messages`."""
    llm.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match=r"^the chat template fails for messages: no system"):
        llm.chat([user("Hi")], GREEDY, use_tqdm=False)
    llm.tokenizer.chat_template = (
        "{% if messages[0].content == 'b' %}{{ strftime_now(5) }}{% endif %}"
    )
    with pytest.raises(ValueError, match=r"fails for conversations\[1\]: TypeError: "):
        llm.chat([[user("a")], [user("b")]], GREEDY, use_tqdm=False)


def test_chat_without_a_template_is_refused(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        with pytest.raises(ValueError, match="the tokenizer has no chat template; make prompts"):
            llm.chat([user("Hi")], GREEDY, enable_thinking=False)
        llm.tokenizer = None
        with pytest.raises(ValueError, match="the model directory has no tokenizer; make prompts"):
            llm.chat([user("Hi")], GREEDY)
