"""Responses of HTTP/1.1 and server-sent events, cut anywhere."""

import pytest
from fake_server import END, chunk, event, head, pieces, stream_head
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm.bench.serve.events import EventReader
from nanovllm.bench.serve.response import BadResponseError, ResponseReader

CUTS = st.lists(st.integers(0, 10_000), max_size=30)
EVERYWHERE = list(range(300))
CHUNKED = stream_head() + chunk(b"one ") + b"3;name=value\r\ntwo\r\n" + chunk(b"\r\n3") + END


def read(data: bytes, cuts: list[int]) -> tuple[ResponseReader, bytes]:
    reader, body = ResponseReader(), b""
    for piece in pieces(data, cuts):
        assert not reader.is_done
        body += reader.feed(piece)
    return reader, body


@settings(deadline=None)
@given(CUTS)
@example(EVERYWHERE)
def test_a_chunked_body_can_be_cut_anywhere(cuts: list[int]) -> None:
    reader, body = read(CHUNKED, cuts)
    assert (body, reader.is_done) == (b"one two\r\n3", True)
    assert reader.head is not None
    assert (reader.head.status, reader.head.reason, reader.head.keeps_alive) == (200, "OK", True)
    assert reader.head.headers["content-type"] == "text/event-stream; charset=utf-8"


@settings(deadline=None)
@given(CUTS)
@example(EVERYWHERE)
def test_trailers_end_a_chunked_body(cuts: list[int]) -> None:
    data = stream_head() + chunk(b"one") + b"0\r\nA: b\r\nC: d\r\n\r\n"
    reader, body = read(data, cuts)
    assert (body, reader.is_done) == (b"one", True)


@settings(deadline=None)
@given(CUTS)
@example(EVERYWHERE)
def test_an_interim_response_is_skipped(cuts: list[int]) -> None:
    data = (
        b"HTTP/1.1 100 Continue\r\n\r\n" + head("404 Not Found", "x", "Content-Length: 2") + b"no"
    )
    reader, body = read(data, cuts)
    assert (body, reader.is_done) == (b"no", True)
    assert reader.head is not None and reader.head.status == 404


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (head("204 No Content"), b""),
        (head("200 OK", "x", "Content-Length: 0"), b""),
        (head("200 OK", "x", "Content-Length: 3") + b"abc", b"abc"),
        (stream_head() + END, b""),
    ],
)
def test_a_response_ends_without_the_connection(data: bytes, body: bytes) -> None:
    reader, found = read(data, [])
    assert (found, reader.is_done) == (body, True)


def test_a_body_without_length_ends_with_the_connection() -> None:
    reader, body = read(head() + b"abc", [40])
    assert (body, reader.is_done) == (b"abc", False)
    reader.end()
    assert reader.is_done


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"HTTP/1.1 204 x\r\nA: b\r\n\r\n", True),
        (b"HTTP/1.1 204 x\r\nConnection: Close\r\n\r\n", False),
        (b"HTTP/1.0 204 x\r\nA: b\r\n\r\n", False),
        (b"HTTP/1.0 204 x\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_headers_say_whether_a_connection_is_kept(data: bytes, kept: bool) -> None:
    reader, _ = read(data, [])
    assert reader.head is not None and reader.head.keeps_alive is kept


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-x\r\n\r\n", "not a response of HTTP/1.1: 'SSH-2.0-x'"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "not a response"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "not a header of HTTP: 'no colon'"),
        (head("200 OK", "x", "Content-Length: -1"), "content-length must be a number, got '-1'"),
        (stream_head() + b"-5\r\n", "not the size of a chunk: b'-5'"),
        (stream_head() + b"zz\r\n", "not the size of a chunk"),
        (stream_head() + b"2\r\nabcd", "a chunk is longer than its size says"),
        (stream_head() + b"1" * 2000, "a chunk has no size"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * 70_000, "more than 65536 bytes"),
    ],
)
def test_what_is_not_http_is_an_error(data: bytes, words: str) -> None:
    with pytest.raises(BadResponseError) as caught:
        read(data, [])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "before its answer"),
        (b"HTTP/1.1 200", "before its answer"),
        (stream_head() + chunk(b"one"), "in the middle"),
        (head("200 OK", "x", "Content-Length: 3") + b"ab", "in the middle"),
    ],
)
def test_a_connection_that_ends_early_is_an_error(data: bytes, words: str) -> None:
    reader, _ = read(data, [])
    with pytest.raises(BadResponseError, match=words):
        reader.end()


@settings(deadline=None)
@given(CUTS, st.sampled_from([b"\n", b"\r\n"]))
@example(EVERYWHERE, b"\r\n")
def test_events_can_be_cut_anywhere(cuts: list[int], line_end: bytes) -> None:
    """Also inside a character, and between the two halves of a line's end."""
    text = '{"text": "ä😀"}'.encode()
    data = b": note\n\n" + event(text) + b"id: 1\ndata:a\ndata:  b\n\n\n" + event(b"[DONE]")
    data = data.replace(b"\n", line_end)
    reader = EventReader()
    found = [one for piece in pieces(data, cuts) for one in reader.feed(piece)]
    assert found == [text, b"a\n b", b"[DONE]"]


def test_an_event_that_is_not_whole_is_kept() -> None:
    reader = EventReader()
    assert reader.feed(b"data: one\n") == []
    assert reader.feed(b"\ndata: two") == [b"one"]
    assert reader.feed(b"\n\n") == [b"two"]
