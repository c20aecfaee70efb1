"""Stop strings and streams, through the whole engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from audits import audit_scheduler
from reference import SMALL_POOL, make_llm, make_prompts

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.engine.requests.detokenizer import Detokenizer
from nanovllm.engine.requests.request import ending
from nanovllm.engine.run.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

PROMPTS = make_prompts()[:24]
MIXED = [
    SamplingParams(
        temperature=i % 3 / 2, seed=i, max_tokens=4 + i % 20, ignore_eos=i % 5 == 0,
        stop=[None, ["\ufffd"], ["A", "q"]][i % 3], skip_special_tokens=i % 2 == 0,
    )
    for i in range(24)
]  # fmt: skip


@pytest.fixture
def llm(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir, **SMALL_POOL, max_num_batched_tokens=64) as llm:
        yield llm


def collect(llm: LLM, prompts: Any, params: Any) -> list[dict[str, Any]]:
    got: dict[int, dict[str, Any]] = {}
    for event in llm.stream(prompts, params):
        out = got.setdefault(
            event["index"], dict(text="", token_ids=[], finish_reason=None, stop_reason=None)
        )
        assert out["finish_reason"] is None, "an event comes after the last one"
        assert event["token_ids"] or event["finish_reason"], "an empty event"
        out["text"] += event["text"]
        out["token_ids"] += event["token_ids"]
        out |= dict(finish_reason=event["finish_reason"], stop_reason=event["stop_reason"])
    return [got[index] for index in sorted(got)]


def test_a_stream_gives_the_results_of_generate(llm: LLM) -> None:
    """With stops, draws, special tokens and preemptions."""
    outputs = llm.generate(PROMPTS, MIXED, use_tqdm=False)
    preemptions = llm.scheduler.num_preemptions
    streamed = collect(llm, PROMPTS, MIXED)
    assert llm.scheduler.num_preemptions > preemptions
    assert streamed == [{key: out[key] for key in streamed[0]} for out in outputs]  # type: ignore[literal-required]
    assert {out["finish_reason"] for out in streamed} == {"stop", "length"}
    assert llm.is_finished()


def test_tokens_come_as_they_are_generated() -> None:
    with make_llm(EMBEDDED_MODEL, max_model_len=512) as llm:
        prompts, answers = zip(*sample_problems(5), strict=True)
        events = list(llm.stream(list(prompts), SamplingParams(temperature=0, max_tokens=12)))
        assert len(events) > 3 * 5
        for index, answer in enumerate(answers):
            assert "".join(e["text"] for e in events if e["index"] == index) == answer


def test_closing_a_stream_aborts_its_requests(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    assert llm.is_finished(), "queued before the first event was asked for"
    for _, _ in zip(range(30), stream, strict=False):
        pass
    assert not llm.is_finished()
    stream.close()  # type: ignore[attr-defined]
    assert llm.is_finished()
    audit_scheduler(llm.scheduler)
    manager = llm.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks


def test_streams_and_other_calls_get_their_own_outputs(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = [out["token_ids"] for out in llm.generate(PROMPTS[:6], greedy, use_tqdm=False)]
    one, other = llm.stream(PROMPTS[:2], greedy), llm.stream(PROMPTS[2:4], greedy)
    got: dict[tuple[str, int], list[int]] = {}

    def take(name: str, stream: Any) -> None:
        for event in [next(stream, None)]:
            if event is not None:
                got.setdefault((name, event["index"]), []).extend(event["token_ids"])

    take("one", one)
    request = llm.add_request(PROMPTS[4], greedy)
    done = []
    for _ in range(40):
        take("one", one)
        take("other", other)
        done += llm.step()
    (between,) = llm.generate(PROMPTS[5], greedy, use_tqdm=False)
    assert [out["request_id"] for out in done] == [request]
    assert [done[0]["token_ids"], between["token_ids"]] == expected[4:6]
    assert [got["one", 0], got["one", 1], got["other", 0], got["other", 1]] == expected[:4]
    assert llm.is_finished()


def test_an_aborted_request_ends_in_its_stream(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    stream = llm.stream(PROMPTS[:2], params)
    first = next(stream)
    llm.abort_request(first["request_id"])
    rest = list(stream)
    aborted = [event for event in rest if event["index"] == first["index"]]
    assert [event["finish_reason"] for event in aborted] == ["abort"], (
        "the reader does not see its end"
    )
    assert llm.is_finished()
    alone = llm.stream(PROMPTS[0], params)
    llm.abort_request(next(alone)["request_id"])
    (end,) = alone
    assert (end["text"], end["token_ids"], end["finish_reason"]) == ("", [], "abort")
    assert llm.is_finished()


def test_requests_of_a_paused_stream_run_to_their_end(llm: LLM) -> None:
    """`step` computes them but does not return them; the stream still has all their events."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    stream = llm.stream(PROMPTS[:2], params)
    first = next(stream)
    for _ in range(50):
        if llm.is_finished():
            break
        assert llm.step() == []
    assert llm.is_finished()
    tokens = [*first["token_ids"], *(t for e in stream if e["index"] == 0 for t in e["token_ids"])]
    assert tokens == llm.generate(PROMPTS[0], params, use_tqdm=False)[0]["token_ids"]


def test_a_stream_collected_in_a_step_aborts_its_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    streams = [llm.stream(PROMPTS[:3], params)]
    next(streams[0])
    begin = llm.model_runner.begin

    def collecting(batch: Any) -> Any:
        streams.clear()
        return begin(batch)

    monkeypatch.setattr(llm.model_runner, "begin", collecting)
    llm.generate(PROMPTS[3], params, use_tqdm=False)
    llm.generate(PROMPTS[3], params, use_tqdm=False)
    assert llm.is_finished() and not llm.requests._streaming and not llm.requests.finished


def test_an_interrupted_stream_leaves_no_output(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests end in one step; the second one's output is interrupted."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    stream = llm.stream([[1], [2]], params)
    calls = []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return ending(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("nanovllm.engine.requests.stream.ending", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert llm.is_finished() and llm.step() == [] and not llm.requests._streaming


def test_text_after_an_interrupt_is_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes between a token and its text, and the request goes on."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop="never, ever")
    (expected,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    llm.add_request(PROMPTS[1], params)
    for _ in range(5):
        llm.step()
    add = Detokenizer.add

    def interrupted(self: Detokenizer, token_id: int) -> str:
        raise KeyboardInterrupt

    for struck in (interrupted, add):
        monkeypatch.setattr(Detokenizer, "add", struck)
        if struck is interrupted:
            with pytest.raises(KeyboardInterrupt):
                llm.step()
    outputs = [out for _ in range(60) if not llm.is_finished() for out in llm.step()]
    assert [(o["text"], o["token_ids"]) for o in outputs] == [
        (expected["text"], expected["token_ids"])
    ]


def test_stream_checks_prompts_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]"):
        llm.stream([[1], [999]])
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.stream([[1]])


def test_a_failing_step_aborts_the_requests_of_the_stream(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(PROMPTS[:3], SamplingParams(max_tokens=9, ignore_eos=True))
    next(stream)

    def failing(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "begin", failing)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert llm.is_finished()
    assert len(llm.generate(PROMPTS[0], use_tqdm=False)) == 1


def test_a_stop_cuts_the_text_at_its_first_occurrence(llm: LLM) -> None:
    """The stop of each output is the last character of its free text."""
    options: dict[str, Any] = dict(seed=1, max_tokens=30, ignore_eos=True)
    free = llm.generate(PROMPTS, SamplingParams(**options), use_tqdm=False)
    found = 0
    for prompt, out in zip(PROMPTS, free, strict=True):
        stop = out["text"][-1:]
        if not stop or stop == "\ufffd":
            continue
        (cut,) = llm.generate(prompt, SamplingParams(stop=stop, **options), use_tqdm=False)
        assert cut["text"] == out["text"][: out["text"].index(stop)]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
        assert out["token_ids"][: len(cut["token_ids"])] == cut["token_ids"]
        found += 1
    assert found >= 5


def test_a_stream_reports_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True, logprobs=2)
    (out,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    events = [event["logprobs"] or [] for event in llm.stream(PROMPTS[:1], params)]
    ids = [[entry["token_id"] for entry in likely] for event in events for likely in event]
    assert ids == [[entry["token_id"] for entry in likely] for likely in out["logprobs"] or []]
    (event, *_) = llm.stream(PROMPTS[:1], SamplingParams(max_tokens=1))
    assert event["logprobs"] is None
