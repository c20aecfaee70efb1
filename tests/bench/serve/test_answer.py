"""What is measured of one answer, by hand: the clock is the test's."""

import pytest
from fake_server import event, text_chunk, usage

from nanovllm.bench.serve.answer import Answer, AnswerError, error_text
from nanovllm.bench.serve.response import Head
from nanovllm.bench.serve.run import Run
from nanovllm.bench.serve.summary import percentile, statistics_ms, summarize, text

OK = Head("HTTP/1.1", 200, "OK", {"content-type": "text/event-stream"})
DONE = event(b"[DONE]")


def answer_of(*received: tuple[float, bytes], start: float = 10.0) -> Answer:
    answer = Answer()
    answer.start = start
    for now, data in received:
        answer.receive(now, OK, data)
    return answer


def times(answer: Answer) -> list[float | None]:
    tpot = answer.tpot
    values = [answer.ttft, *answer.gaps, answer.e2el]
    return [round(value, 6) for value in values] + [tpot and round(tpot, 6)]


def test_times_of_a_stream() -> None:
    answer = answer_of(
        (10.5, text_chunk("a")), (10.7, text_chunk("b")), (11.0, text_chunk("c", "length")),
        (11.1, usage(7, 6)), (11.2, DONE),
    )  # fmt: skip
    answer.check(OK)
    assert times(answer) == [0.5, 0.2, 0.3, 1.0, 0.1], "6 tokens: 5 of them in half a second"
    assert (answer.input_tokens, answer.output_tokens) == (7, 6)


def test_a_role_alone_is_no_first_token() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    answer = answer_of((10.1, role), (10.5, text_chunk("a", chat=True)), (10.9, end), (11, DONE))
    answer.check(OK)
    assert times(answer) == [0.5, 0.9, None], "the end of the text is no token"
    assert answer.output_tokens == 1


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "tool_calls"])
def test_reasoning_and_tool_calls_are_text(name: str) -> None:
    one = event({"choices": [{"delta": {name: ["x"], "content": None}}]})
    answer = answer_of((10.5, one), (10.9, text_chunk("a", "stop", chat=True)))
    assert times(answer) == [0.5, 0.4, 0.9, 0.4]


def test_a_chunk_without_text_is_a_token_between_others() -> None:
    """Such as the first bytes of a character."""
    answer = answer_of(
        (10.5, text_chunk("a")), (10.6, text_chunk("")), (10.8, text_chunk("ä", "length")),
    )  # fmt: skip
    assert times(answer)[:3] == [0.5, 0.1, 0.2]


def test_events_that_arrive_together_have_one_time() -> None:
    answer = answer_of((10.5, text_chunk("a") + text_chunk("b") + usage(1, 2) + DONE))
    answer.check(OK)
    assert times(answer) == [0.5, 0.0, 0.5, 0.0]


def test_an_empty_answer_ends_with_its_reason() -> None:
    answer = answer_of((10.5, text_chunk("", "stop") + usage(1, 1) + DONE))
    answer.check(OK)
    assert times(answer) == [0.5, 0.5, None]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (text_chunk("a"), "ended without a finish_reason and without [DONE]"),
        (usage(1, 1) + DONE, "no text and no finish_reason"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(data: bytes, words: str) -> None:
    with pytest.raises(AnswerError) as caught:
        answer_of((10.5, data)).check(OK)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (event({"error": {"message": "out of memory"}}), "error in the stream: out of memory"),
        (event(b"{"), "not a JSON object in the stream: '{'"),
        (event(b"5"), "not a JSON object in the stream: '5'"),
    ],
)
def test_an_error_in_a_stream_ends_it(data: bytes, words: str) -> None:
    with pytest.raises(AnswerError) as caught:
        answer_of((10.5, data))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "too long", "type": "x"}}', "too long"),
        (b'{"message": "too long"}', "too long"),
        (b'{"detail": [{"loc": 1}]}', '[{"loc": 1}]'),
        (b'{"error": "too long"}', "too long"),
        (b"<html>\nBad  Gateway</html>", "<html> Bad Gateway</html>"),
        (b"\xff", "\ufffd"),
        (b"", "no further description"),
    ],
)
def test_errors_of_several_forms_are_read(body: bytes, words: str) -> None:
    assert error_text(body) == words


def test_percentiles_are_interpolated() -> None:
    """As NumPy's are."""
    assert [percentile([1.0, 2.0, 4.0], p) for p in (0, 25, 50, 90, 100)] == [1, 1.5, 2, 3.6, 4]
    assert percentile([3.0], 99) == 3.0
    found = statistics_ms([0.003, 0.001, 0.002])
    assert found == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98}
    assert statistics_ms([]) is None


def run_of_three() -> Run:
    """Two whole answers, one that failed, in two seconds."""
    quick = answer_of((10.1, text_chunk("a")), (10.2, text_chunk("b", "length") + usage(5, 2)))
    slow = answer_of((10.5, text_chunk("a")), (11.5, text_chunk("b", "length") + usage(5, 3)))
    failed = Answer()
    failed.error = "503 Busy: later"
    return Run([quick, slow, failed], num_sent=3, start=10.0, end=12.0, cpu_seconds=1.9)


def test_the_figures_of_a_run() -> None:
    result = summarize(run_of_three(), {"ttft": 200, "tpot": 400})
    assert (result["completed"], result["failed"], result["seconds"]) == (2, 1, 2.0)
    assert result["errors"] == [{"message": "503 Busy: later", "count": 1}]
    assert (result["input_tokens"], result["output_tokens"]) == (10, 5)
    assert result["requests_per_second"] == 1.0
    assert result["output_tokens_per_second"] == 2.5
    assert result["total_tokens_per_second"] == 7.5
    assert result["goodput_requests_per_second"] == 0.5
    assert result["ttft_ms"] == {"mean": 300.0, "p50": 300.0, "p90": 460.0, "p99": 496.0}
    assert result["tpot_ms"]["mean"] == 300.0  # 100 and 500
    assert result["itl_ms"]["p50"] == 550.0  # 100 and 1000
    assert result["e2el_ms"]["mean"] == 850.0
    assert result["tokens_counted_by"] == "server"


@pytest.mark.parametrize(
    ("limits", "good"),
    [({"ttft": 100.001}, 0.5), ({"ttft": 99}, 0.0), ({"e2el": 1500.001}, 1.0), ({"tpot": 99}, 0)],
)
def test_goodput_counts_answers_within_all_limits(limits: dict[str, float], good: float) -> None:
    assert summarize(run_of_three(), limits)["goodput_requests_per_second"] == good


def test_the_text_has_the_figures_and_the_doubts() -> None:
    shown = text(summarize(run_of_three(), {"ttft": 200}))
    assert "2 answers in 2.00 s: 1.00 requests/s, 2.5 output tok/s, 7.5 total tok/s" in shown
    assert "goodput: 0.50 requests/s with ttft <= 200 ms" in shown
    assert "used 95% of a core" in shown
    assert "1 requests have failed:\n    1 x 503 Busy: later" in shown
    row = next(line for line in shown.splitlines() if "time to first token" in line)
    assert row.split()[-4:] == ["300.00", "300.00", "460.00", "496.00"]


def test_an_answer_in_one_chunk_has_no_time_per_token() -> None:
    """It would be 0, and pull the percentiles down; how many there were is said."""
    quick = answer_of((10.1, text_chunk("a")), (10.2, text_chunk("b", "length") + usage(5, 2)))
    at_once = answer_of((11.0, text_chunk("a b c", "length")), (11.2, usage(5, 3)))
    ends_later = answer_of(
        (11.0, text_chunk("a b c")), (11.5, text_chunk("", "stop") + usage(5, 3))
    )
    single = answer_of((10.3, text_chunk("a", "length") + usage(5, 1)))
    assert [one.tpot for one in (at_once, ends_later, single)] == [None] * 3
    run = Run([quick, at_once, ends_later, single], num_sent=4, start=10.0, end=12.0)
    result = summarize(run, {})
    assert result["tpot_ms"]["p50"] == 100.0
    assert result["answers_in_one_chunk"] == 2, "one token has no time per token anyway"
    assert "2 answers of several tokens came in one chunk: they have no tpot" in text(result)
    assert "in one chunk" not in text(summarize(run_of_three(), {}))


def test_a_run_without_answers_has_figures() -> None:
    failed = Answer()
    failed.error = "x"
    result = summarize(Run([failed], start=1.0, end=1.0), {})
    assert result["ttft_ms"] is None and result["requests_per_second"] == 0
    assert "time to first token (ttft)               -" in text(result)
