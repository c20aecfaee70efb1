"""What `nanovllm chat` and `generate --chat` show of an answer.

No markers, and reasoning apart from the rest.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.chat.chat_format import ChatFormat
from nanovllm.command import generate
from nanovllm.command.chat import Conversation
from nanovllm.command.main import main
from nanovllm.outputs import CompletionOutput, RequestOutput
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

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

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
            yield {
                "text": text,
                "token_ids": [token_id],
                "finish_reason": reason,
                "index": 0,
                "sample": 0,
            }

    def stream_chat(self, talks: Any, params: SamplingParams, **options: Any) -> Any:
        return ChatFormat.with_deltas(self.chat_turns(talks, params, **options), self.stream())

    def chat(self, talks: Any, params: SamplingParams, use_tqdm: bool, **options: Any) -> Any:
        del use_tqdm
        outputs = []
        for turn in self.chat_turns(talks, params, **options):
            sample = CompletionOutput(
                index=0,
                text=self.answer,
                token_ids=tokens_of(self.answer, self.tokenizer),
                finish_reason="stop",
                stop_reason=None,
            )
            outputs.append(RequestOutput(outputs=[sample], **sample))
            turn.answer.add_messages(outputs[-1])
        return outputs


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


@pytest.mark.parametrize("prompts", [["How many?"], ["How many?", "Sure?"]])
@pytest.mark.parametrize(("template", "answer"), [(TEMPLATE, HARMONY), (THINKS, THINKING)])
def test_generate_chat_shows_no_markers(
    template: str, answer: str, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer is streamed; several are written when all are there."""
    monkeypatch.setenv("TERM", "xterm")
    llm = Answering(template, answer)
    monkeypatch.setattr(generate, "open_llm", lambda _: contextlib.nullcontext(llm))
    for stdout, expected in ((Terminal(), SHOWN), (io.StringIO(), "It is 5.\n")):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["generate", "--chat", *prompts]) == 0
        assert stdout.getvalue() == len(prompts) * expected


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
