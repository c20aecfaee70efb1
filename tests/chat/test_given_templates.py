"""Chat templates that a caller gives, and templates that know no tools."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference import make_llm
from transformers import PreTrainedTokenizerBase

from nanovllm import LLM, SamplingParams
from nanovllm.chat.chat_format import ChatFormat
from nanovllm.chat.conversation import TEMPLATE_OPTIONS
from nanovllm.chat.given_templates import check_templates, with_template_texts

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
TOOLS = PLAIN + "{% if tools %}{{ tools | length }} tools;{% endif %}"
GREEDY = SamplingParams(temperature=0, max_tokens=2)
HI = [{"role": "user", "content": "Hi"}]
TOOL = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir) as llm:
        llm.tokenizer.chat_template = {"default": TOOLS, "other": PLAIN}
        yield llm


def prompt_of(llm: LLM, **options: Any) -> str | None:
    (out,) = llm.chat(HI, GREEDY, use_tqdm=False, **options)
    return out.prompt


def test_tools_are_refused_by_a_template_that_knows_none(llm: LLM, model_dir: Path) -> None:
    """The model would never see them; the server refuses them too."""
    with pytest.raises(ValueError, match=r"^tools: the chat template knows no tools"):
        llm.chat(HI, GREEDY, use_tqdm=False, tools=TOOL, chat_template=PLAIN)
    with make_llm(model_dir, tool_parser="hermes") as other:  # it reads calls, and shows nothing
        other.tokenizer.chat_template = PLAIN
        with pytest.raises(ValueError, match=r"^tools: the chat template knows no tools"):
            other.chat(HI, GREEDY, use_tqdm=False, tools=TOOL)
    assert prompt_of(llm, tools=TOOL) == "user:Hi;1 tools;"
    assert prompt_of(llm, tools=TOOL, tool_choice="none", chat_template=PLAIN) == "user:Hi;"


@pytest.mark.parametrize("way", [str, Path])
@pytest.mark.parametrize("inner", [False, True])
def test_a_template_may_be_a_file(llm: LLM, tmp_path: Path, way: Any, inner: bool) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("file:" + PLAIN, encoding="utf-8")
    given: dict[str, Any] = {"chat_template": way(file)}
    assert prompt_of(llm, **{"chat_template_kwargs": given} if inner else given) == "file:user:Hi;"


def test_a_template_may_have_a_name(llm: LLM) -> None:
    assert prompt_of(llm, chat_template="other") == "user:Hi;"


@pytest.mark.parametrize("value", ["none.jinja", "Answer shortly.", "/", ""])
def test_a_text_that_is_no_template_is_refused(llm: LLM, value: str) -> None:
    """It would be the whole prompt, and the conversation would be lost."""
    with pytest.raises(ValueError, match=r"^chat_template must be a Jinja template"):
        prompt_of(llm, chat_template=value)
    with pytest.raises(ValueError, match=r"or a file with one, got ''$"):
        prompt_of(llm, chat_template="")
    with pytest.raises(TypeError, match=r"^chat_template must be a text, got 5"):
        prompt_of(llm, chat_template=5)


def test_a_server_reads_no_files(tmp_path: Path) -> None:
    """Its clients may send templates, and no paths of its machine."""
    file = tmp_path / "template.jinja"
    file.write_text(PLAIN, encoding="utf-8")
    for reads, words in ((False, "must be a Jinja template"), (True, "the chat template fails")):
        chat = ChatFormat(Tokenizer(), None, None, 100, reads_files=reads)
        with pytest.raises(ValueError, match=words):
            chat.turns([HI], lambda _: [GREEDY], chat_template=str(file))


class Tokenizer:
    """None that can apply templates."""

    chat_template = PLAIN


def test_keywords_without_a_template_are_the_same() -> None:
    given = {"enable_thinking": True, "chat_template_kwargs": {"a": 1}, "chat_template": None}
    assert check_templates(Tokenizer(), given) == with_template_texts(Tokenizer(), given) == given


ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    *TEMPLATE_OPTIONS, "add_generation_prompt", "kwargs",
}  # fmt: skip


@pytest.mark.parametrize("name", ["messages", *sorted(ARGUMENTS)])
def test_the_options_of_a_template_have_no_reserved_names(llm: LLM, name: str) -> None:
    """transformers said that an argument has several values, or changed nothing."""
    with pytest.raises(ValueError, match=rf"^chat_template_kwargs must not have '{name}': "):
        prompt_of(llm, chat_template_kwargs={"a": 1, name: None})


def test_the_generation_prompt_may_be_an_option_of_the_template(llm: LLM) -> None:
    """As in vLLM. Its value is checked: a text was taken as true."""
    template = PLAIN + "{{ add_generation_prompt }}"
    given = {"chat_template": template, "add_generation_prompt": False}
    assert prompt_of(llm, chat_template_kwargs=given) == "user:Hi;False"
    given["add_generation_prompt"] = "no"
    with pytest.raises(TypeError, match="add_generation_prompt must be True or False, got 'no'"):
        prompt_of(llm, chat_template_kwargs=given)


@pytest.mark.parametrize("inner", [False, True])
def test_a_message_is_continued_without_a_generation_prompt(llm: LLM, inner: bool) -> None:
    given: dict[str, Any] = {"continue_final_message": True}
    words = "^continue_final_message needs add_generation_prompt to be False$"
    with pytest.raises(ValueError, match=words):
        prompt_of(llm, **{"chat_template_kwargs": given} if inner else given)
    given["add_generation_prompt"] = False
    found = prompt_of(llm, **{"chat_template_kwargs": given} if inner else given)
    assert found == "user:Hi"
