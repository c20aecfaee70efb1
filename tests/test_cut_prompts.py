"""Prompts that are cut to their last tokens, and outputs without text."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference import audit_at_rest, make_llm

from nanovllm import LLM, SamplingParams

GREEDY: dict[str, Any] = dict(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir, max_model_len=50) as llm:
        yield llm


def test_the_last_tokens_are_kept(llm: LLM) -> None:
    prompt = [*range(40)]
    for number in (1, 7, 39, 40, 41, 49):
        params = SamplingParams(**GREEDY, truncate_prompt_tokens=number)
        (cut,) = llm.generate(prompt, params, use_tqdm=False)
        (whole,) = llm.generate(prompt[-number:], SamplingParams(**GREEDY), use_tqdm=False)
        assert cut.prompt_token_ids == prompt[-number:]
        assert cut.token_ids == whole.token_ids


def test_minus_one_keeps_what_fits(llm: LLM) -> None:
    params = SamplingParams(**GREEDY, truncate_prompt_tokens=-1)
    long, short = llm.generate(["a" * 500 + "b" * 48, "ab"], params, use_tqdm=False)
    assert long.prompt_token_ids == llm.tokenizer.encode("a" + "b" * 48)
    assert long.prompt == "a" * 500 + "b" * 48
    assert len(long.token_ids) == 1 and short.num_prompt_tokens == 2


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, template = "ab" * 60_000, "{{ messages[0]['content'] }}"
    params = SamplingParams(**GREEDY, truncate_prompt_tokens=5)
    (cut,) = llm.generate(text, params, use_tqdm=False)
    assert cut.prompt_token_ids == llm.tokenizer.encode("babab")
    message = [{"role": "user", "content": text}]
    (cut,) = llm.chat(message, params, chat_template=template, use_tqdm=False)
    assert cut.prompt_token_ids == llm.tokenizer.encode("babab")

    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("the text is tokenized")

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    calls = {
        "prompts[0]: ": lambda: llm.generate(text),
        "": lambda: llm.chat(message, chat_template=template),
        "input[0]: ": lambda: llm.embed(text, name="input"),
        "queries[0]: ": lambda: llm.score(text, "a"),
    }
    for name, call in calls.items():
        most = 50 if name[:1] in ("i", "q") else 49
        words = rf"^{re.escape(name)}prompt must have 1 to {most} tokens .*got more: 120000"
        with pytest.raises(ValueError, match=words):
            call()
    audit_at_rest(llm)


def test_prompts_of_vectors_are_cut(llm: LLM) -> None:
    prompt = [*range(60)]
    (want,) = llm.embed([prompt[-9:]], use_tqdm=False)
    (cut,) = llm.embed([prompt], truncate_prompt_tokens=9, use_tqdm=False)
    assert cut.embedding == pytest.approx(want.embedding, abs=1e-6)
    (states,) = llm.encode([prompt], "all", truncate_prompt_tokens=9, use_tqdm=False)
    assert states.outputs.data.shape[0] == 9
    (score,) = llm.score([prompt], [prompt], truncate_prompt_tokens=9, use_tqdm=False)
    assert len(score.prompt_token_ids) == 18 and score.score == pytest.approx(1, abs=1e-5)
    with pytest.raises(
        ValueError, match="truncate_prompt_tokens must be None with method='yes_no'"
    ):
        llm.score("a", "b", method="yes_no", truncate_prompt_tokens=5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "truncate_prompt_tokens must be -1 or >= 1, got 0"),
        (-2, "truncate_prompt_tokens must be -1 or >= 1, got -2"),
        (True, "truncate_prompt_tokens must be an int"),
        (50, r"prompts\[0\]: truncate_prompt_tokens must be at most 49 .*, got 50"),
    ],
)
def test_bad_numbers_are_named_errors(llm: LLM, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        llm.generate("ab", SamplingParams(truncate_prompt_tokens=value), use_tqdm=False)
    audit_at_rest(llm)


def test_without_detokenize_there_is_no_text(llm: LLM) -> None:
    asked: dict[str, Any] = dict(GREEDY, logprobs=2, prompt_logprobs=0)
    (want,) = llm.generate("abc", SamplingParams(**asked), use_tqdm=False)
    params = SamplingParams(**asked, detokenize=False)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    assert (output.text, output.token_ids) == ("", want.token_ids)
    assert output.outputs[0].text == "" and output.finish_reason == "length"
    assert want.logprobs is not None and output.logprobs is not None
    for mine, theirs in zip(output.logprobs, want.logprobs, strict=True):
        assert [*mine] == [*theirs]
        assert {t.text for t in mine.values()} == {""}
    events = list(llm.stream("abc", params))
    assert [i for event in events for i in event.token_ids] == want.token_ids
    assert {event.text for event in events} == {""}


def test_stops_need_text() -> None:
    with pytest.raises(ValueError, match=r"stop must be None with detokenize=False, .* got .*'x'"):
        SamplingParams(stop=["x"], detokenize=False)
    assert SamplingParams(stop_token_ids=[5], stop=[], detokenize=False).stop_token_ids == (5,)
