"""`nanovllm bench serve` against a server whose delays are known."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_server import (
    END,
    FakeServer,
    Step,
    chunk,
    event,
    json_answer,
    stream,
    stream_head,
    text_chunk,
)
from waiting import FOREVER, LIMIT, wait_until

import nanovllm
from nanovllm.bench.serve import measure
from nanovllm.bench.serve.client import Address
from nanovllm.command.main import main
from nanovllm.command.parser import join_words, make_parser


def run(capsys: Any, *argv: str) -> tuple[int, str, str]:
    """The status, stdout and stderr of the command."""
    try:
        status = main(["bench", "serve", *argv])
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


def result_of(capsys: Any, server: FakeServer, *argv: str, status: int = 0) -> dict[str, Any]:
    got, out, err = run(capsys, "--base-url", server.url, "--json", *argv)
    assert (got, err) == (status, ""), out
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.parametrize("has_uvloop", [True, False])
def test_known_delays_are_what_is_measured(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, has_uvloop: bool
) -> None:
    if not has_uvloop:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    argv = ("--num-prompts", "5", "--num-warmups", "0")
    with FakeServer(lambda body: stream(0.04, 0.02, 0.02, 0.02, prompt_tokens=7)) as server:
        start = time.perf_counter()
        result = result_of(capsys, server, *argv)
        whole = time.perf_counter() - start
    assert (result["completed"], result["failed"], result["model"]) == (5, 0, "fake")
    assert (result["input_tokens"], result["output_tokens"]) == (35, 20)
    for name, least in (("ttft", 40), ("e2el", 100)):
        for figure in ("mean", "p50", "p99"):
            assert least - 2 <= result[f"{name}_ms"][figure] <= result["seconds"] * 1e3, name
    assert 0.098 <= result["seconds"] <= whole
    later = result["e2el_ms"]["mean"] - result["ttft_ms"]["mean"]  # three tokens
    for name in ("tpot", "itl"):
        assert result[f"{name}_ms"]["mean"] == pytest.approx(later / 3, abs=0.1)
    assert result["output_tokens_per_second"] == pytest.approx(20 / result["seconds"])


def test_several_tokens_in_a_chunk_are_counted_by_the_server(capsys: Any) -> None:
    with FakeServer(lambda body: stream(0.02, 0.04, tokens_per_chunk=3)) as server:
        result = result_of(capsys, server, "--num-prompts", "1")
    assert result["output_tokens"] == 6
    later = result["e2el_ms"]["p50"] - result["ttft_ms"]["p50"]
    assert result["itl_ms"]["p50"] == pytest.approx(later, abs=0.1)
    assert result["tpot_ms"]["p50"] == pytest.approx(later / 5, abs=0.1), "after the first one"


def test_without_usage_chunks_are_counted(capsys: Any) -> None:
    with FakeServer(lambda body: stream(0.0, 0.0, counts=False)) as server:
        argv = ("--base-url", server.url, "--num-prompts", "2")
        status, out, _ = run(capsys, *argv)
    assert status == 0 and "0 tokens in, 4 out" in out
    assert "the server sends no usage" in out


def test_all_requests_are_in_flight_at_once_unless_limited(capsys: Any) -> None:

    def together(number: int) -> FakeServer:
        """A server that answers when so many requests have been in flight."""
        server = FakeServer(lambda body: [lambda: server.max_in_flight >= number, *stream(0.01)])
        return server

    with together(8) as server:
        result_of(capsys, server, "--num-prompts", "8", "--num-warmups", "0")
        assert server.max_in_flight == 8
    with together(2) as server:
        argv = ("--num-prompts", "16", "--num-warmups", "0", "--max-concurrency", "2")
        result = result_of(capsys, server, *argv)
        assert server.max_in_flight == 2
        assert server.num_connections == 2
    in_flight = 16 * result["e2el_ms"]["mean"] / 1e3
    assert in_flight <= 2.01 * result["seconds"], "the time begins when a request is sent"


def test_connections_are_kept(capsys: Any) -> None:
    with FakeServer() as server:
        result_of(capsys, server, "--num-prompts", "20", "--max-concurrency", "1")
        assert server.num_connections == 1


def test_a_connection_that_the_server_has_closed_is_replaced(capsys: Any) -> None:
    with FakeServer() as server:
        server.drops_idle = True
        result = result_of(capsys, server, "--num-prompts", "5", "--max-concurrency", "1")
    assert result["completed"] == 5


def test_requests_arrive_at_the_asked_rate(capsys: Any) -> None:
    """The last one is sent after a tenth of a second, or later on a busy machine.

    Event loops round their timers to milliseconds.
    """
    with FakeServer() as server:
        result = result_of(capsys, server, "--num-prompts", "11", "--request-rate", "100")
    assert result["seconds"] >= 0.099


def test_the_body_has_the_options(capsys: Any) -> None:
    with FakeServer() as server:
        argv = (
            "--num-prompts", "2", "--num-warmups", "1", "--vocab-size", "9", "--input-len", "4",
            "--output-len", "6", "--ignore-eos", "--temperature", "0", "--model", "mine",
            "--extra-body", '{"top_p": 0.5, "stream_options": null}', "--api-key", "secret",
        )  # fmt: skip
        result_of(capsys, server, *argv)
    assert len(server.bodies) == 3, "one of them warms up"
    for body in server.bodies:
        prompt = body.pop("prompt")
        assert len(prompt) == 4 and set(prompt) <= set(range(9))
        assert body == {
            "model": "mine", "stream": True, "max_tokens": 6, "ignore_eos": True,
            "temperature": 0.0, "top_p": 0.5,
        }  # fmt: skip
    assert all("Authorization: Bearer secret" in text for text in server.heads)


def test_the_key_is_read_from_the_environment(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hidden")
    with FakeServer() as server:
        _, out, err = run(capsys, "--base-url", server.url, "--num-prompts", "1", "--json")
    assert all("Authorization: Bearer hidden" in text for text in server.heads)
    assert "hidden" not in out + err


def test_random_prompts_are_ids_of_the_servers_tokenizer(capsys: Any) -> None:
    with FakeServer(tokenize=json_answer({"tokens": [11, 12, 12, 13]})) as server:
        result_of(capsys, server, "--num-prompts", "5", "--input-len", "30")
    assert {token for body in server.bodies for token in body["prompt"]} == {11, 12, 13}
    assert {len(body["prompt"]) for body in server.bodies} == {30}


def test_random_prompts_are_words_where_there_is_no_tokenizer(capsys: Any) -> None:
    with FakeServer() as server:
        result_of(capsys, server, "--num-prompts", "2", "--input-len", "30")
    assert {len(body["prompt"].split()) for body in server.bodies} == {30}


def test_a_chat_is_measured(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}\n' * 2)
    role = chunk(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))

    def answer(body: dict[str, Any]) -> Sequence[Step]:
        first, *rest = stream(0.15, 0.0, chat=True)
        return [first, role, *rest]

    with FakeServer(answer) as server:
        argv = ("--endpoint", "chat", "--dataset", str(file), "--num-warmups", "0")
        result = result_of(capsys, server, *argv)
    assert result["completed"] == 2 and result["load"]["dataset"] == str(file)
    assert result["ttft_ms"]["mean"] >= 148, "the role alone is not a token"
    assert {"POST /v1/chat/completions", "GET /v1/models"} <= {
        " ".join(text.split()[:2]) for text in server.heads
    }
    assert all(body["messages"][0]["content"] == "hi" for body in server.bodies)
    assert all(body["max_completion_tokens"] == 3 for body in server.bodies)


def test_a_dataset_of_short_prompts_is_warmed_up_by_a_short_one(
    capsys: Any, tmp_path: Path
) -> None:
    """The server may refuse a long one. The warm-up is none of the lines: they may be cached."""
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "a b"}\n')
    with FakeServer() as server:
        result_of(capsys, server, "--dataset", str(file))
    warm_up, measured = (body["prompt"] for body in server.bodies)
    assert len(warm_up.split()) == 16 and measured == "a b"


def some_fail(body: dict[str, Any]) -> Sequence[Step]:
    error = {"error": {"message": "draining", "code": 503}}
    answers: dict[int, Sequence[Step]] = {
        1: json_answer(error, "503 Service Unavailable"),
        2: [stream_head(), chunk(text_chunk("a")), 0.0],
        3: [stream_head() + chunk(event({"error": {"message": "out of memory"}})) + END],
        4: json_answer({"choices": [{"text": "a"}]}),
        5: [b"SSH-2.0-x\r\n\r\n", 0.0],
        6: [stream_head() + chunk(text_chunk("a")) + chunk(event(b"{")) + END],
    }
    return answers.get(body["max_tokens"], stream(0.0))


FAILURES = {
    1: "503 Service Unavailable: draining",
    2: "the server closed the connection in the middle of its answer",
    3: "error in the stream: out of memory",
    4: "the answer is not a stream, but application/json: ",
    5: "not a response of HTTP/1.1: 'SSH-2.0-x'",
    6: "not a JSON object in the stream: '{'",
}


def test_failures_are_counted_and_the_others_are_measured(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    lengths = [*FAILURES, 1, 99, 99]
    file.write_text("".join(f'{{"prompt": "a", "max_tokens": {n}}}\n' for n in lengths))
    with FakeServer(some_fail) as server:
        result = result_of(capsys, server, "--dataset", str(file), status=1)
        status, out, _ = run(capsys, "--base-url", server.url, "--dataset", str(file))
    assert (result["completed"], result["failed"]) == (2, 7)
    messages = [error["message"] for error in result["errors"]]
    assert messages[0] == FAILURES[1] and result["errors"][0]["count"] == 2
    assert all(any(text.startswith(f) for f in FAILURES.values()) for text in messages)
    assert result["output_tokens"] == 2, "of whole answers alone"
    assert status == 1 and "7 requests have failed:\n    2 x 503 Service Unavailable" in out


@pytest.mark.parametrize("number", FAILURES)
def test_each_failure_has_its_message(capsys: Any, tmp_path: Path, number: int) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(f'{{"prompt": "a", "max_tokens": {number}}}\n')
    with FakeServer(some_fail) as server:
        result = result_of(capsys, server, "--dataset", str(file), status=1)
    assert result["errors"][0]["message"].startswith(FAILURES[number])


def test_a_server_that_stops_sending_is_a_failure(capsys: Any) -> None:
    def answer(body: dict[str, Any]) -> Sequence[Step]:
        return [stream_head(), chunk(text_chunk("a")), FOREVER]

    with FakeServer(answer) as server:
        argv = ("--num-prompts", "2", "--num-warmups", "0", "--timeout", "0.2")
        result = result_of(capsys, server, *argv, status=1)
    assert result["errors"] == [{"message": "no whole answer within 0.2 s", "count": 2}]


def test_a_failed_warm_up_ends_the_command(capsys: Any) -> None:
    error = json_answer({"error": {"message": "no such model"}}, "404 Not Found")
    with FakeServer(lambda body: error) as server:
        status, out, err = run(capsys, "--base-url", server.url)
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert "the first request to" in err and "failed: 404 Not Found: no such model" in err


def test_a_key_that_is_refused_is_named(capsys: Any) -> None:
    refused = json_answer({"error": {"message": "wrong key"}}, "401 Unauthorized")
    server = FakeServer()
    server.paths["/v1/models"] = refused
    with server:
        status, _, err = run(capsys, "--base-url", server.url)
    assert status == 1 and "/v1/models: 401 Unauthorized: wrong key" in err


@pytest.mark.slow
@pytest.mark.parametrize("has_uvloop", [True, False])
def test_ctrl_c_ends_the_command_and_its_requests(tmp_path: Path, has_uvloop: bool) -> None:
    if not has_uvloop:
        (tmp_path / "uvloop.py").write_text("raise ImportError")
    else:
        pytest.importorskip("uvloop")
    path = os.pathsep.join([str(tmp_path), str(Path(nanovllm.__file__).parents[1])])

    def answer(body: dict[str, Any]) -> Sequence[Step]:
        return [stream_head(), chunk(text_chunk("a")), FOREVER]

    with FakeServer(answer) as server:
        argv = [sys.executable, "-m", "nanovllm", "bench", "serve", "--base-url", server.url]
        process = subprocess.Popen(
            [*argv, "--num-warmups", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        wait_until("not all requests are sent", lambda: server.num_in_flight == 100)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    assert server.max_in_flight == 100
    assert (process.returncode, out, err) == (130, "", "nanovllm: interrupted\n")


def test_no_server_is_one_line(capsys: Any) -> None:
    status, out, err = run(capsys, "--base-url", "http://127.0.0.1:9")
    assert (status, out) == (1, "")
    assert err.startswith("nanovllm: error: cannot connect to http://127.0.0.1:9: ")


def test_the_text_is_for_people(capsys: Any) -> None:
    with FakeServer() as server:
        argv = ("--base-url", f"{server.url}/v1/", "--num-prompts", "2", "--goodput", "ttft:5000")
        status, out, err = run(capsys, *argv)
    assert (status, err) == (0, "")
    first, second, *_ = out.splitlines()
    assert first == f"{server.url}, fake, completions"
    assert second.startswith("  2 answers in ")
    assert "with ttft <= 5000 ms" in out and "inter-token latency (itl)" in out


def test_a_bar_is_drawn_on_a_terminal(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with FakeServer(lambda body: stream(1.0)) as server:
        _, _, err = run(capsys, "--base-url", server.url, "--num-prompts", "4")
    assert "Requests: 100%" in err and "4/4" in err and "4 in flight" in err


def test_the_picture_is_written(capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "run.png"
    with FakeServer(lambda body: stream(0.01, 0.01, 0.01)) as server:
        result_of(capsys, server, "--num-prompts", "5", "--plot", str(file))
        assert file.read_bytes().startswith(b"\x89PNG")
        for name, wanted, words in (
            ("run.xyz", 2, "--plot must end with one of"), ("no/x.png", 1, "no directory"),
        ):  # fmt: skip
            argv = ("--base-url", server.url, "--plot", str(tmp_path / name))
            status, out, err = run(capsys, *argv)
            assert (status, out) == (wanted, "") and words in err
    assert len(server.bodies) == 6, "a picture that cannot be written is noticed before the run"


def test_a_picture_needs_matplotlib(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = run(capsys, "--plot", "x.png")
    assert status == 1 and err.endswith("needs matplotlib: pip install 'nanovllm[plot]'\n")


def test_a_picture_of_failures_alone_is_written(capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "run.png"
    with FakeServer(lambda body: json_answer({}, "500 Oops")) as server:
        argv = ("--num-prompts", "1", "--num-warmups", "0", "--plot", str(file))
        result_of(capsys, server, *argv, status=1)
    assert file.exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--request-rate", "0"], "--request-rate must be finite and > 0, got 0.0"),
        (["--request-rate", "nan"], "--request-rate must be"),
        (["--burstiness", "2"], "--burstiness=2.0 needs a --request-rate"),
        (["--range-ratio", "1.5"], "--range-ratio must be finite and in [0, 1], got 1.5"),
        (["--max-concurrency", "0"], "--max-concurrency must be >= 1, got 0"),
        (["--endpoint", "chats"], "--endpoint must be one of 'completions', 'chat', got 'chats'"),
        (["--endpoint", "chat", "--vocab-size", "9"], "does not take"),
        (["--base-url", "localhost:8000"], "--base-url must be like http://"),
        (["--base-url", "http://x/?a=b"], "--base-url must be like http://"),
        (["--base-url", "http://x:99999"], "--base-url must be like http://"),
        (["--goodput", "itl:5"], "argument --goodput: must be NAME:MS"),
        (["--goodput", "ttft:0"], "must be NAME:MS"),
        (["--goodput", "ttft:1", "ttft:2"], "--goodput has two limits of one kind"),
        (["--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--extra-body", "{"], "as JSON"),
        (["--num-prompt", "3"], "did you mean '--num-prompts'?"),
        (["--shape", "qwen3-8b"], "unrecognized arguments: --shape qwen3-8b"),
    ],
)
def test_a_mistake_is_one_line(capsys: Any, argv: list[str], words: str) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "joined"),
    [
        (["bench", "serve", "x"], ["bench serve", "x"]),
        (["-v", "--debug", "bench", "serve"], ["-v", "--debug", "bench serve"]),
        (["bench", "-v", "serve"], ["bench", "-v", "serve"]),
        (["generate", "bench", "serve"], ["generate", "bench", "serve"]),
        (["bench"], ["bench"]),
        ([], []),
    ],
)
def test_a_command_may_have_two_words(argv: list[str], joined: list[str]) -> None:
    assert join_words(argv) == joined


def test_the_other_commands_are_as_before() -> None:
    assert make_parser().parse_args(["bench", "--num-seqs", "3"]).num_seqs == 3
    args = make_parser().parse_args(["generate", "bench", "serve"])
    assert args.prompts == ["bench", "serve"]


@pytest.mark.parametrize(
    ("url", "shown", "path"),
    [
        ("http://h", "http://h", ""),
        ("https://h:443/v1", "https://h", ""),
        ("http://[::1]:8000/a/v1/", "http://[::1]:8000/a", "/a"),
    ],
)
def test_a_base_url_may_have_a_path(url: str, shown: str, path: str) -> None:
    address = Address.parse(url)
    assert (str(address), address.path) == (shown, path)


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    set_to: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    measure.allow_connections(100)
    assert set_to == []
    measure.allow_connections(500)
    assert set_to == [(564, 1000)]
    with pytest.raises(ValueError, match="give --max-concurrency 936 or less"):
        measure.allow_connections(2000)
