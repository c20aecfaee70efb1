"""What `nanovllm chat` shows of an answer: no markers, and reasoning apart from the rest."""

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.chat.chat_format import ChatFormat
from nanovllm.command.chat import Conversation
from tests.chat.harmony_words import TEMPLATE, TOKENIZER, answer_of, tokens_of
from tests.grammar_words import words_tokenizer

HARMONY = answer_of("<|channel|>analysis<|message|>Hm, 5?", "<|channel|>final<|message|>It is 5.")
THINKING = "<think>Hm, 5?</think>It is 5."
SHOWN = "\x1b[2mHm, 5?\x1b[0m\n\nIt is 5.\n"


class Terminal(io.StringIO):
    """A stdout that is a terminal."""

    def isatty(self) -> bool:
        return True


class Answering:
    """In an LLM's place: prompts by a chat template; answers that are known, token for token."""

    def __init__(self, template: str, answer: str, stopped_at: int | None = None) -> None:
        self.tokenizer = words_tokenizer() if template != TEMPLATE else TOKENIZER
        self.tokenizer.chat_template = template
        self.answer, self.stopped_at = answer, stopped_at
        self.prompts: list[str] = []

    def chat_turns(self, talks: Any, params: SamplingParams, **options: Any) -> Any:
        turns = ChatFormat(self.tokenizer, None, None, 4096).turns(
            talks, lambda number: [params] * number, **options
        )
        self.prompts += [turn.prompt["prompt"] for turn in turns]
        return turns

    def stream(self, *_: Any) -> Iterator[dict[str, Any]]:
        token_ids = tokens_of(self.answer, self.tokenizer)
        for number, token_id in enumerate(token_ids):
            if number == self.stopped_at:
                raise KeyboardInterrupt
            reason = "stop" if number == len(token_ids) - 1 else None
            text = self.tokenizer.decode([token_id])
            yield {"text": text, "token_ids": [token_id], "finish_reason": reason}


def shown(llm: Answering, stdout: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is written for two questions."""
    monkeypatch.setattr(sys, "stdout", stdout)
    talk = Conversation(llm, SamplingParams(), {}, None)  # type: ignore[arg-type]
    talk.handle("How many?")
    talk.handle("Sure?")
    return stdout.getvalue()


THINKS = "{{ messages | map(attribute='content') | join(';') }}{# </think> #}"


@pytest.mark.parametrize(("template", "answer"), [(TEMPLATE, HARMONY), (THINKS, THINKING)])
def test_markers_are_not_shown(template: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning is dim on a terminal, and goes into no pipe or next prompt."""
    monkeypatch.setenv("TERM", "xterm")
    llm = Answering(template, answer)
    assert shown(llm, Terminal(), monkeypatch) == 2 * SHOWN
    assert shown(llm, io.StringIO(), monkeypatch) == 2 * "It is 5.\n"
    assert all("Hm" not in prompt for prompt in llm.prompts)
    assert "It is 5." in llm.prompts[1]
    monkeypatch.setenv("TERM", "dumb")
    assert shown(llm, Terminal(), monkeypatch) == 2 * "It is 5.\n"


def test_reasoning_that_is_stopped_leaves_the_terminal_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    llm = Answering(TEMPLATE, HARMONY, stopped_at=12)
    assert shown(llm, Terminal(), monkeypatch) == 2 * "\x1b[2mHm\x1b[0m ...\n"


def test_an_interrupt_before_the_answer_goes_to_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the template runs, say, there is no answer to keep."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    llm = Answering(TEMPLATE, HARMONY)
    monkeypatch.setattr(llm, "chat_turns", interrupted)
    talk = Conversation(llm, SamplingParams(), {}, None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        talk.handle("How many?")
    assert talk.messages == []
