"""Batch jobs in one process: lines, their records, and the journal."""

import base64
import errno
import io
import json
import math
import os
import re
import resource
import stat
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import make_llm
from waiting import little_work

from nanovllm import LLM, SamplingParams
from nanovllm.batch import lines as batch_lines
from nanovllm.batch.digests import Seen, digest_of
from nanovllm.batch.envelope import parse_line, parse_request
from nanovllm.batch.job import BatchJob
from nanovllm.batch.journal import Journal
from nanovllm.batch.lines import Line, count_lines, read_lines
from nanovllm.batch.records import result_record
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.openai.request import CHAT, COMPLETIONS
from nanovllm.openai.token_bytes import token_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm(EMBEDDED_MODEL, max_model_len=64, max_num_seqs=8) as llm:
        yield llm


def completion(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    body = {"model": "adder", "prompt": "12+34=", **GREEDY, **body}
    return dict(custom_id=custom_id, method="POST", url=COMPLETIONS, body=body)


def chat(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "12+34="}]
    body = {"model": "adder", "messages": messages, **GREEDY, **body}
    return dict(custom_id=custom_id, method="POST", url=CHAT, body=body)


def embedding(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    return dict(custom_id=custom_id, method="POST", url="/v1/embeddings", body=body)


def run(
    llm: LLM, output: Path, data: bytes, strict: bool = False, **defaults: Any
) -> list[dict[str, Any]]:
    """The records of a job, in the order of its lines."""
    with Journal(output) as journal:
        job = BatchJob(llm, journal, {**GREEDY, **defaults}, strict)
        tallies = list(job.run(read_lines(io.BytesIO(data))))
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert llm.is_finished()
    assert not tallies or tallies[-1] is job.tally
    return sorted(records, key=lambda record: int(record["id"].removeprefix("batch_req_")))


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def text_of(record: dict[str, Any]) -> str:
    (choice,) = record["response"]["body"]["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_records_have_openais_form(llm: LLM, tmp_path: Path) -> None:
    first, second = run(llm, tmp_path / "out", jsonl(completion("a"), chat("b")))
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert (first["custom_id"], first["error"]) == ("a", None)
    assert set(first["response"]) == {"status_code", "request_id", "body"}
    assert first["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "adder")
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["total_tokens"] == 9
    assert isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "46", "stop")
    answer = second["response"]["body"]
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "46"}


def test_embeddings_stand_beside_completions(llm: LLM, tmp_path: Path) -> None:
    """A line may have several inputs, of any kind; its record comes when all are computed."""
    texts = ["12+34=", "7+8="]
    many = [*texts] * 20
    ids = llm.tokenizer.encode(texts[1])
    lines = [
        completion("a"), embedding("b", input=texts[0]), embedding("c", input=many, dimensions=5),
        embedding("d", input=ids, encoding_format="base64"), embedding("e", input=[ids, ids]),
    ]  # fmt: skip
    first, *records = run(llm, tmp_path / "out", jsonl(*lines))
    assert text_of(first) == "46"
    bodies = [record["response"]["body"] for record in records]
    assert [len(body["data"]) for body in bodies] == [1, 40, 1, 2]
    assert [body["usage"]["total_tokens"] for body in bodies] == [6, 200, 4, 8]
    vectors = [output.embedding for output in llm.embed(texts, use_tqdm=False)]
    cut = [output.embedding for output in llm.embed(texts, use_tqdm=False, dimensions=5)]
    assert bodies[0]["data"][0]["embedding"] == pytest.approx(vectors[0], abs=1e-6)
    for index, item in enumerate(bodies[1]["data"]):
        assert item["index"] == index
        assert item["embedding"] == pytest.approx(cut[index % 2], abs=1e-6)
    decoded = np.frombuffer(base64.b64decode(bodies[2]["data"][0]["embedding"]), "<f4")
    assert decoded.tolist() == pytest.approx(vectors[1], abs=1e-6)


def test_plain_lines_are_answered(llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "7+8="}]}]
    data = jsonl({"prompt": "12+34="}, {"messages": messages, "custom_id": "mine", "top_k": 1})
    first, second = run(llm, tmp_path / "out", data)
    assert (first["custom_id"], text_of(first)) == ("line-1", "46")
    assert (second["custom_id"], text_of(second)) == ("mine", "15")
    assert first["response"]["body"]["model"] == EMBEDDED_MODEL


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (dict(max_completion_tokens=5), dict(max_tokens=5)),
        (dict(top_p=0.5, n=2, seed=4), dict(top_p=0.5, n=2, seed=4)),
        (dict(stop="x"), dict(stop="x")),
        (dict(stop=["x", "y"]), dict(stop=["x", "y"])),
        (dict(logprobs=True), dict(logprobs=0)),
        (dict(logprobs=True, top_logprobs=3), dict(logprobs=3)),
        (dict(logprobs=False), {}),
        (dict(logprobs=2), dict(logprobs=2)),
        (dict(response_format={"type": "text"}), {}),
        (
            dict(response_format={"type": "json_object"}),
            dict(structured_outputs=dict(json_object=True)),
        ),
        (
            dict(response_format=JSON_SCHEMA),
            dict(structured_outputs=dict(json={"type": "integer"})),
        ),
        (dict(presence_penalty=1), dict(presence_penalty=1)),
        (dict(frequency_penalty=-1), dict(frequency_penalty=-1)),
        (dict(logit_bias={"5": -100, "7": 1.5}), dict(logit_bias={5: -100, 7: 1.5})),
        (dict(min_p=0.1, ignore_eos=True), dict(min_p=0.1, ignore_eos=True)),
        (dict(seed=None, stop=None, stream=False), {}),
        (dict(user="me", metadata={"a": 1}), {}),
    ],
)
def test_fields_become_sampling_params(body: dict[str, Any], expected: dict[str, Any]) -> None:
    line = {"prompt": "x", "max_tokens": None, **body}
    request = parse_request(line, {"max_tokens": 9})
    assert request.params == SamplingParams(**{"max_tokens": 9, **expected})


def test_a_line_may_have_a_salt() -> None:
    for prompt, name in (("x", "prompt"), ([5], "prompt_token_ids")):
        request = parse_request({"prompt": prompt, "cache_salt": "a"}, {})
        assert request.prompts == [{name: prompt, "cache_salt": "a"}]
    chat = parse_request({"messages": [], "cache_salt": "a"}, {})
    assert chat.chat_options == {"cache_salt": "a"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "x", "max_token": 5}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
        ({"prompt": "x", "messages": []}, "a line must have a prompt or messages"),
        ({"prompt": "x", "model": 5}, "model must be a text, got 5"),
        ({"max_tokens": 1}, "a line must have a prompt or messages"),
        ({"prompt": "x", "tools": []}, "unknown field 'tools'"),
        ({"prompt": "x", "response_format": "json"}, "must be an object whose type is one of text"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "one of text, json_object, json_sch"),
        (
            {"prompt": "x", "response_format": {"type": "json_object", "schema": {}}},
            "response_format: unknown field 'schema'",
        ),
        (
            {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": 1}}},
            'response_format.json_schema must be {"name": ..., "schema": {...}}',
        ),
        (
            {
                "prompt": "x",
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": "yes"},
                },
            },
            'response_format.json_schema.strict must be true or false, got "yes"',
        ),
        (
            {"prompt": "x", "response_format": JSON_SCHEMA, "structured_outputs": {"regex": "a"}},
            "give one of response_format and structured_outputs",
        ),
        ({"messages": [], "tool_choise": "auto"}, "did you mean 'tool_choice'?"),
        (
            {"prompt": "x", "guided_decoding": {}},
            "unknown field 'guided_decoding': see structured_outputs",
        ),
        ({"prompt": "x", "stream": True}, "stream must be False here, got True"),
        ({"prompt": "x", "stream": 0}, "stream must be true or false, got 0"),
        ({"prompt": "x", "best_of": True}, "best_of must be an int >= 1, got True"),
        ({"prompt": ["x", "y"]}, "prompt must be one text or one list of token ids"),
        (chat("a", messages={"role": "user", "content": "x"}), "messages must be a list of messag"),
        (chat("a", messages="x"), 'messages must be a list of messages, got "x"'),
        ({"prompt": "x", "max_tokens": 1, "max_completion_tokens": 1}, "give one of them"),
        ({"prompt": "x", "top_logprobs": 2}, "top_logprobs needs logprobs to be true"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, 'token ids as keys, got "a"'),
        ({"prompt": "x", "temperature": -1}, "temperature must be finite and >= 0.0, got -1"),
        ({**completion(), "url": "/v1/score"}, "url must be one of '/v1/chat/completions',"),
        (embedding(inputs="a"), "unknown field 'inputs'"),
        (embedding(input=[]), "input must not be empty"),
        (embedding(input="a", encoding_format="hex"), "encoding_format must be one of"),
        ({**completion(), "method": "GET"}, "method must be 'POST', got 'GET'"),
        ({**completion(), "body": "x"}, "body must be an object, got 'x'"),
        ({**completion(), "custom_id": None}, "custom_id is missing"),
        ({**completion(), "boddy": {}}, "unknown field 'boddy'; did you mean 'body'?"),
        ({**completion(), "url": CHAT}, "a chat has messages"),
    ],
)
def test_a_bad_field_is_refused(line: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        parse_request(line, {})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b'{"prompt": "12+34="', "line 2: the line is not valid JSON"),
        (b"[1, 2]", "line 2: a line must be a JSON object, got [1, 2]"),
        (b'{"prompt": "\xff"}', "line 2: the line is not valid UTF-8"),
        (jsonl(completion("first"))[:-1], "custom_id 'first' is already the id of an earlier line"),
        (jsonl({**completion(), "custom_id": 7})[:-1], "custom_id must be a text, got 7"),
        (jsonl(completion("b", prompt="1" * 100))[:-1], "prompt must have 1 to 63 tokens"),
        (jsonl(completion("b", prompt=""))[:-1], "prompt must have 1 to 63 tokens"),
        (
            jsonl({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})[:-1],
            "content[0] must be a part of text, got {'type': 'image_url'}",
        ),
        (jsonl(completion("b", prompt=[10**9]))[:-1], "prompt token id must be in [0, 263]"),
        (jsonl(chat("b", messages=[]))[:-1], "must have a message or more"),
        (b'{"prompt": "\\ud800"}', "not valid Unicode"),
        (b'{"custom_id": "\\ud800", "prompt": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_a_bad_line_becomes_an_error_record(
    llm: LLM, tmp_path: Path, bad: bytes, words: str
) -> None:
    data = jsonl(completion("first")) + bad + b"\n" + jsonl(completion("last"))
    first, second, third = run(llm, tmp_path / "out", data)
    assert [text_of(first), text_of(third)] == ["46", "46"]
    assert second["response"] is None
    assert words in second["error"]["message"]
    assert second["error"]["line"] == 2
    assert len({record["custom_id"] for record in (first, second, third)}) == 3


def test_a_strict_job_stops_at_a_bad_line(llm: LLM, tmp_path: Path) -> None:
    """Nothing of the bad line or a later one is written; with a corrected input it resumes."""
    data = [jsonl(completion(f"r{i}")) for i in range(40)]
    bad = [*data[:30], b"{}\n", *data[31:]]
    with pytest.raises(ValueError, match="line 31: a line must have a prompt"):
        run(llm, tmp_path / "out", b"".join(bad), strict=True)
    for request_id in list(llm.requests.unfinished):
        llm.abort_request(request_id)
    done = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert 0 < len(done) <= 30
    assert all(record["error"] is None for record in done)
    records = run(llm, tmp_path / "out", b"".join(data), strict=True)
    assert [record["custom_id"] for record in records] == [f"r{i}" for i in range(40)]


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        (b"", []),
        (b"\n\r\n  \n", []),
        (b"\xef\xbb\xbf{}\r\n\r\n{}\r\n", [1, 3]),
        (b"{}\n{}", [1, 2]),
    ],
)
def test_line_ends_and_blank_lines_are_skipped(data: bytes, numbers: list[int]) -> None:
    assert list(read_lines(io.BytesIO(data))) == [Line(number, b"{}") for number in numbers]
    assert count_lines(io.BytesIO(data)) == len(data.splitlines())


def test_a_line_that_is_too_long_is_an_error(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(batch_lines, "CHUNK", 64)
    long = jsonl({"prompt": "1" * 1000})
    first, second, third = run(llm, tmp_path / "out", jsonl({"prompt": "7+8="}) * 2 + long)
    assert [text_of(first), text_of(second)] == ["15", "15"]
    assert "the line is too long" in third["error"]["message"]


def test_lines_are_read_as_there_is_room(llm: LLM, tmp_path: Path) -> None:
    """From an endless input a job reads only what keeps the engine busy."""
    taken = 0

    def endless() -> Iterator[Line]:
        nonlocal taken
        while True:
            taken += 1
            yield Line(taken, jsonl({"prompt": f"{taken % 10}+2=", "n": 1 + taken % 3}))

    with Journal(tmp_path / "out") as journal:
        job = BatchJob(llm, journal, GREEDY)
        for tally in job.run(endless()):
            assert taken - tally.lines <= 2 * llm.config.max_num_seqs
            assert sum(p.submitted.num_samples for p in job._pending.values()) <= 16 + 2
            if tally.computed > 100:
                break
    for request_id in list(llm.requests.unfinished):
        llm.abort_request(request_id)


def test_a_restarted_job_repeats_nothing(llm: LLM, tmp_path: Path) -> None:
    """Nor errors or lines without an id; only a half-written last record is computed again."""
    data = jsonl(completion("a"), {"prompt": "7+8="}, completion("a"), [], chat("b"))
    output = tmp_path / "out"
    records = run(llm, output, data)
    before = output.read_bytes()
    assert run(llm, output, data) == records
    assert output.read_bytes() == before
    for kept in (1, 10, len(before) - 40, len(before) - 1):
        output.write_bytes(before[:kept])
        again = run(llm, output, data)
        assert [record["custom_id"] for record in again] == [r["custom_id"] for r in records]
        assert output.read_bytes().count(b"\n") == 5


def test_samples_do_not_depend_on_other_lines(llm: LLM, tmp_path: Path) -> None:
    """Nor on a restart of the job: they depend on the line's own id."""
    hot = [completion(f"r{i}", temperature=3.0, n=2) for i in range(20)]
    whole = run(llm, tmp_path / "whole", jsonl(*hot))
    run(llm, tmp_path / "parts", jsonl(*hot[:7]))
    parts = run(llm, tmp_path / "parts", jsonl(*hot))
    ids = [
        [[c["token_ids"] for c in record["response"]["body"]["choices"]] for record in records]
        for records in (whole, parts)
    ]
    assert ids[0] == ids[1]
    assert len({str(samples) for samples in ids[0]}) > 3, "all lines have the same seed"


def test_a_default_seed_is_that_of_all_lines_without_one(llm: LLM, tmp_path: Path) -> None:
    lines = [completion(f"r{i}", temperature=3.0) for i in range(3)]
    lines.append(completion("own", temperature=3.0, seed=8))
    records = run(llm, tmp_path / "out", jsonl(*lines), seed=7)
    *alike, own = (record["response"]["body"]["choices"][0]["token_ids"] for record in records)
    assert alike[0] == alike[1] == alike[2] != own


def test_another_inputs_output_is_refused(llm: LLM, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(llm, output, jsonl(completion("a"), completion("b")))
    with pytest.raises(ValueError, match="where line 1 is not 'c'; choose another output"):
        run(llm, output, jsonl(completion("c"), completion("b")))


@pytest.mark.parametrize(
    "data",
    [
        b"notes", b"notes\n", b'{"id": 1}\n', b'{"id": "batch_req_0"}\n',
        b'{"id": "batch_req_6a", "custom_id": "x", "response": 1}',
        b'{"id": "batch_req_7", "x": 1}', b'{"id": "batch_req_7", "x": ', b'{"id": "chatcmpl-',
        b'{"id": 7, "custom_id": "a', b'{"error": {"message": "not fo', b'{"custom_id": "a", "na',
        b"{}", b"{x", b'{"id"; "batch', b'{"data": "' + b"x" * (1 << 17),
    ],
)  # fmt: skip
def test_a_file_that_is_not_an_output_is_refused_unchanged(tmp_path: Path, data: bytes) -> None:
    output = tmp_path / "notes"
    output.write_bytes(data)
    with pytest.raises(ValueError, match="line 1, is not a record of a batch job"):
        Journal(output)
    assert output.read_bytes() == data


def test_a_record_cut_off_anywhere_is_removed(llm: LLM, tmp_path: Path) -> None:
    """However little of it is left."""
    output, data = tmp_path / "out", jsonl(completion("a"), completion("b"))
    run(llm, output, data)
    first, second = output.read_bytes().splitlines(keepends=True)
    for length in range(60):
        output.write_bytes(first + second[:length])
        Journal(output).close()
        assert output.read_bytes() == first, second[:length]


def reformatted(data: bytes, **options: Any) -> bytes:
    """The same records, written by another tool."""
    lines = [json.dumps(json.loads(line), **options) for line in data.splitlines()]
    return "".join(line + "\n" for line in lines).encode()


FORMATS = [
    {},
    dict(separators=(",", ":")),
    dict(separators=(" , ", " :  ")),
    dict(sort_keys=True, ensure_ascii=False),
]


@pytest.mark.parametrize("options", FORMATS)
def test_records_are_known_in_any_spacing_and_order(
    llm: LLM, tmp_path: Path, options: dict[str, Any]
) -> None:
    output, data = tmp_path / "out", jsonl(completion("a"), completion("\u00e4"), {"prompt": 1})
    records = run(llm, output, data)
    written = reformatted(output.read_bytes(), **options)
    output.write_bytes(written)
    assert run(llm, output, data) == records
    assert output.read_bytes() == written


@pytest.mark.parametrize("options", FORMATS)
@pytest.mark.parametrize("failed", [False, True])
def test_a_half_written_record_in_any_spacing_and_order_is_removed(
    llm: LLM, tmp_path: Path, options: dict[str, Any], failed: bool
) -> None:
    """Wherever it ends; a whole one is kept, and gets the newline that it lacks."""
    output = tmp_path / "out"
    run(llm, output, jsonl(completion("a"), {"prompt": 5} if failed else completion("\u00e4")))
    first, second = reformatted(output.read_bytes(), **options).splitlines(keepends=True)
    for length in range(len(second) - 1):
        output.write_bytes(first + second[:length])
        Journal(output).close()
        assert output.read_bytes() == first, second[:length]
    output.write_bytes(first + second[:-1])
    Journal(output).close()
    assert output.read_bytes() == first + second


@pytest.mark.parametrize("options", FORMATS[:3])
def test_a_half_written_record_that_is_alone_is_removed(
    llm: LLM, tmp_path: Path, options: dict[str, Any]
) -> None:
    """It begins with its id, as jobs write it: so it cannot be another program's file."""
    output = tmp_path / "out"
    run(llm, output, jsonl(completion("a")))
    record = reformatted(output.read_bytes(), **options)
    for length in range(len(record) - 1):
        output.write_bytes(record[:length])
        Journal(output).close()
        assert output.read_bytes() == b"", record[:length]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda a, b: a + b + a, "line 3, is a second record of line 1 of the input; remove one"),
        (lambda a, b: a + b"\n" + b"note\n", "line 3, is not a record of a batch job; remove that"),
        (lambda a, b: a + b[:-9] + b"\n", "line 2, is not a record of a batch job; remove that"),
        (lambda a, b: a + b.replace(b"_req_2", b"_req_02"), "line 2, is not a record"),
        (lambda a, b: a + b"[" * 100_000 + b"\n", "line 2, is not a record"),
    ],
)  # fmt: skip
def test_an_error_in_an_output_names_its_line(
    llm: LLM, tmp_path: Path, edit: Any, words: str
) -> None:
    output = tmp_path / "out"
    run(llm, output, jsonl(completion("a"), completion("b")))
    edited = edit(*output.read_bytes().splitlines(keepends=True))
    output.write_bytes(edited)
    with pytest.raises(ValueError, match=words) as caught:
        Journal(output)
    assert str(caught.value).startswith(f"{output}, line ")
    assert str(caught.value).endswith("or choose another output")
    assert output.read_bytes() == edited


def test_a_record_beyond_the_input_is_an_error_before_the_work(llm: LLM, tmp_path: Path) -> None:
    """If the number of lines is known. However large the record's number is."""
    output = tmp_path / "out"
    run(llm, output, jsonl(completion("a"), completion("b")))
    Journal(output, 2).close()
    with pytest.raises(ValueError, match="line 2, is a record of line 2, where the input has no"):
        Journal(output, 1)
    output.write_bytes(output.read_bytes().replace(b"req_2", b"req_9999999999"))
    with pytest.raises(ValueError, match="line 2, is a record of line 9999999999, where"):
        Journal(output, 2)


@pytest.mark.parametrize("end", [b"", b"\n\n"])
def test_a_record_of_no_request_is_an_error_after_the_work(
    llm: LLM, tmp_path: Path, end: bytes
) -> None:
    """Its line comes after the end of a stream, or is blank; what is computed is written."""
    output, lines = tmp_path / "out", jsonl(completion("a"), completion("b"))
    run(llm, output, lines)
    output.write_bytes(output.read_bytes().splitlines(keepends=True)[1])
    with Journal(output) as journal:
        list(
            BatchJob(llm, journal, GREEDY).run(read_lines(io.BytesIO(lines.splitlines()[0] + end)))
        )
        with pytest.raises(ValueError, match="line 1, is a record of line 2, where the input"):
            journal.check_taken()
    assert b'"custom_id": "a"' in output.read_bytes()
    assert len(run(llm, output, lines)) == 2


def test_all_records_of_an_input_are_taken(llm: LLM, tmp_path: Path) -> None:
    output, data = tmp_path / "out", jsonl(completion("a"), {}, completion("b"))
    run(llm, output, data)
    with Journal(output, 3) as journal:
        list(BatchJob(llm, journal, GREEDY).run(read_lines(io.BytesIO(data))))
        journal.check_taken()


def test_a_full_disk_names_the_file_and_costs_nothing(llm: LLM, tmp_path: Path) -> None:
    """At any size, in the middle of a record or between two, the same job goes on."""
    data = jsonl(*(completion(f"r{index}", prompt=f"{index}+1=") for index in range(6)))
    size = len(b"".join(json.dumps(r).encode() + b"\n" for r in run(llm, tmp_path / "whole", data)))
    output, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in range(100, size, size // 7):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large; raise the limit on") as caught:
                run(llm, output, data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(caught.value) == (
            f"{output}: File too large; raise the limit on the size of files, and the same command"
            " goes on where it stopped"
        )
        assert output.stat().st_size <= limit
        for request_id in list(llm.requests.unfinished):
            llm.abort_request(request_id)
    records = run(llm, output, data)
    assert [text_of(record) for record in records] == [str(index + 1) for index in range(6)]


class FailingFile:
    """The journal's file, some methods of which fail, each with its error's number."""

    def __init__(self, file: Any, failures: dict[str, int]) -> None:
        self._file, self._failures = file, failures

    def __getattr__(self, name: str) -> Any:
        if name not in self._failures:
            return getattr(self._file, name)
        number = self._failures[name]
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "failures",
    [
        dict(write=errno.ENOSPC),
        dict(write=errno.ENOSPC, fileno=errno.EIO, close=errno.EIO),
        dict(fileno=errno.ENOSPC),
        dict(close=errno.ENOSPC),
    ],
)
def test_errors_of_writing_syncing_and_closing_name_the_file(
    tmp_path: Path, failures: dict[str, int]
) -> None:
    """`fileno` is where a sync begins. The error that ends the job is not hidden by later ones."""
    journal = Journal(tmp_path / "out")
    file, journal._file = journal._file, FailingFile(journal._file, failures)  # type: ignore[assignment]
    with pytest.raises(OSError, match="out: ") as caught:
        write_and_close(journal)
    assert str(caught.value) == (
        f"{tmp_path}/out: No space left on device; make room, and the same command goes on where it"
        " stopped"
    )
    assert caught.value.errno == errno.ENOSPC
    file.close()


def write_and_close(journal: Journal) -> None:
    with journal:
        journal.append([b"{}\n"])


def test_a_repeated_name_is_an_error(llm: LLM, tmp_path: Path) -> None:
    data = b'{"prompt": "12+34=", "max_tokens": 1, "max_tokens": 8}\n'
    data += b'{"messages": [{"role": "user", "role": "user", "content": "x"}]}\n'
    first, second = run(llm, tmp_path / "out", data)
    assert first["error"]["message"].endswith("not valid JSON: 'max_tokens' occurs twice")
    assert "'role' occurs twice" in second["error"]["message"]


def test_a_repeated_name_is_found_quickly() -> None:
    """Among the biases of a whole vocabulary, the last one is repeated."""
    names = [str(token) for token in range(30_000)]
    biases = ", ".join(f'"{name}": 1' for name in [*names, names[-1]])
    with little_work(1.0), pytest.raises(ValueError, match="'29999' occurs twice"):
        parse_line(f'{{"logit_bias": {{{biases}}}}}'.encode())


@pytest.mark.parametrize("blanks", [b"\n", b"\n\n", b" \n", b"\r\n"])
def test_blank_lines_in_an_output_are_accepted(llm: LLM, tmp_path: Path, blanks: bytes) -> None:
    """At the end, where editors add one and where it is removed, and between records."""
    output, data = tmp_path / "out", jsonl({"prompt": "1+1="}, {"prompt": "1+2="})
    run(llm, output, data)
    first, second = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(first + blanks + second + blanks)
    with Journal(output) as journal:
        assert journal.take(1, "line-1") and journal.take(2, "line-2")
    assert output.read_bytes() == first + blanks + second
    output.write_bytes(first + blanks)
    assert [text_of(record) for record in run(llm, output, data)] == ["2", "3"]


def test_parts_of_characters_have_their_own_logprobs_and_bytes(llm: LLM, tmp_path: Path) -> None:
    """Their text is U+FFFD: completions have the most likely one, chats the bytes of each."""
    size = llm.model_config.vocab_size
    body = dict(allowed_token_ids=[0xE2, 0x82], max_tokens=1)  # of the euro sign, a byte each
    lines = (
        completion("a", logprobs=size, **body),
        chat("b", logprobs=True, top_logprobs=size, **body),
    )
    first, second = run(llm, tmp_path / "out", jsonl(*lines))
    (likely,) = first["response"]["body"]["choices"][0]["logprobs"]["top_logprobs"]
    halves = [t["logprob"] for t in run_logprobs(llm, "12+34=") if t["text"] == "\ufffd"]
    assert len(halves) > 1 and likely["\ufffd"] == max(halves)
    choice = second["response"]["body"]["choices"][0]
    (content,) = choice["logprobs"]["content"]
    assert content["token"] == "\ufffd" and content["bytes"] == choice["token_ids"]
    found = sorted(token["bytes"] for token in content["top_logprobs"] if len(token["token"]) == 1)
    assert found == [[byte] for byte in range(256)]


def test_bytes_of_a_token_are_those_of_its_text() -> None:
    """Byte-level tokens, byte fallback, neither of them, and a real U+FFFD."""

    class Named:
        def convert_ids_to_tokens(self, token_id: int) -> str:
            return ["âĤ", "<0xE2>", "ï¿½", "\ufffd", "ab"][token_id]

    texts = ["\ufffd", "\ufffd", "\ufffd", "\ufffd", "ab", "€"]
    found = [token_bytes(token_id, text, Named()) for token_id, text in enumerate(texts)]
    assert found[:4] == [[0xE2, 0x82], [0xE2], [0xEF, 0xBF, 0xBD], None]
    assert found[4:] == [[97, 98], [0xE2, 0x82, 0xAC]]


def run_logprobs(llm: LLM, prompt: str) -> list[Any]:
    """The logprobs of all possible first tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=llm.model_config.vocab_size)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output["logprobs"] is not None
    return [*output["logprobs"][0]]


def test_an_output_that_is_a_device_is_refused() -> None:
    with pytest.raises(OSError, match="/dev/zero is not a regular file; choose another output"):
        Journal(Path("/dev/zero"))


def test_a_missing_chat_template_ends_the_job(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not written as the error of a line, so the job can be restarted when it is there."""
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(RuntimeError, match="no chat template for 'a'"):
        run(llm, tmp_path / "out", jsonl(chat()))
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert len(run(llm, tmp_path / "out", jsonl(chat()))) == 1


def test_ids_in_records_are_unique(llm: LLM, tmp_path: Path) -> None:
    """The first line has the second line's default id: the first is an error with its own."""
    lines = [{"prompt": "1+1=", "custom_id": "line-2"}, {"prompt": "2+2="}]
    records = run(llm, tmp_path / "out", jsonl(*lines))
    assert sorted(record["custom_id"] for record in records) == ["line-1", "line-2"]
    assert [record["custom_id"] for record in records if record["error"]] == ["line-1"]


def test_two_jobs_cannot_write_one_output(tmp_path: Path) -> None:
    with Journal(tmp_path / "out"), pytest.raises(OSError, match="another job is writing"):
        Journal(tmp_path / "out")
    Journal(tmp_path / "out").close()


def fail(journal: Journal, *written: bytes) -> None:
    """A job that ends after these records."""
    with journal:
        journal.append(written)
        raise MemoryError


@pytest.mark.parametrize(
    ("before", "written", "left"), [(None, b"", None), (b"", b"", b""), (None, b"{}\n", b"{}\n")]
)
def test_a_failure_before_the_first_record_leaves_no_new_output(
    before: bytes | None, written: bytes, left: bytes | None, tmp_path: Path
) -> None:
    """A file that was there before stays, also if it is empty; so does one with a record."""
    output = tmp_path / "out"
    if before is not None:
        output.write_bytes(before)
    with pytest.raises(MemoryError):
        fail(Journal(output), written)
    assert (output.read_bytes() if output.exists() else None) == left


def test_the_directory_of_a_new_output_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure must not lose the file's name, also where a link leads to the file."""
    synced: list[Path] = []

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    with Journal(tmp_path / "link") as journal:
        assert synced == [tmp_path / "disk"]
        journal.append([result_record(1, "a", {})])
    synced.clear()
    with Journal(tmp_path / "link"):
        assert not synced, "the file has records: its name is on the disk"


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_directory_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_refused: bool
) -> None:
    """Some file systems sync no directories; a disk that fails is an error."""

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=r"out: .*error") if is_refused else nullcontext():
        Journal(tmp_path / "out").close()


def test_only_the_jobs_own_output_is_removed(tmp_path: Path) -> None:
    """Its name may have another file by then."""
    journal = Journal(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "out").touch()
    with pytest.raises(MemoryError):
        fail(journal)
    assert (tmp_path / "out").exists() and (tmp_path / "moved").exists()


def test_an_output_that_is_removed_before_it_is_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job has opened it first, and has failed: results would be lost with its name."""
    output = tmp_path / "out"
    monkeypatch.setattr("fcntl.flock", lambda *_: output.unlink())
    with pytest.raises(OSError, match="another job has just removed"):
        Journal(output)


def test_the_requests_on_the_page_are_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "batch.md").read_text()
    requests = [
        line for line in page.splitlines() if re.match(r'\{"(prompt|messages|custom)', line)
    ]
    assert len(requests) == 3
    for line in requests:
        parse_request(json.loads(line), {})


def test_logprobs_have_openais_form(llm: LLM, tmp_path: Path) -> None:
    hot = dict(temperature=5.0, max_tokens=6, ignore_eos=True)
    data = jsonl(
        chat("a", logprobs=True, top_logprobs=2, **hot), completion("b", logprobs=2, **hot)
    )
    first, second = run(llm, tmp_path / "out", data)
    content = first["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    for token in content:
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
        best, next_best = (other["logprob"] for other in token["top_logprobs"])
        assert best >= next_best and best >= token["logprob"]
    flat = second["response"]["body"]["choices"][0]["logprobs"]
    assert len(flat["tokens"]) == len(flat["token_logprobs"]) == len(flat["top_logprobs"]) == 6
    for top, logprob in zip(flat["top_logprobs"], flat["token_logprobs"], strict=True):
        assert len(top) <= 2 and max(top.values()) >= logprob


def test_many_ids_are_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seen, "MERGE", 7)
    seen = Seen()
    digests = [digest_of(str(i)) for i in range(100)]
    assert all(seen.add(digest) for digest in digests)
    assert not any(seen.add(digest) for digest in digests)


def test_sums_are_right_in_a_job(llm: LLM, tmp_path: Path) -> None:
    problems = sample_problems(200)
    data = jsonl(*({"prompt": prompt} for prompt, _ in problems))
    records = run(llm, tmp_path / "out", data)
    assert [text_of(record) for record in records] == [answer for _, answer in problems]


def test_a_record_without_a_response_and_an_error_is_no_record(tmp_path: Path) -> None:
    """It would count as done, and its request would have no answer. Nor is one with both."""
    output = tmp_path / "out"
    for response, error in ((None, None), ({}, {})):
        record = dict(id="batch_req_1", custom_id="a", response=response, error=error)
        output.write_bytes(jsonl(record))
        with pytest.raises(ValueError, match="line 1, is not a record of a batch job"):
            Journal(output)


def test_a_request_that_ends_with_an_error_is_an_error_record(llm: LLM, tmp_path: Path) -> None:
    """So is a grammar that cannot be read; the other lines are answered."""
    lines = [
        completion("none", structured_outputs={"choice": ["ab"]}, min_tokens=5),
        completion("bad", structured_outputs={"grammar": "root ::= foo"}),
        completion("good", structured_outputs={"choice": ["ab"]}),
    ]
    records = {r["custom_id"]: r for r in run(llm, tmp_path / "out.jsonl", jsonl(*lines))}
    assert "no token to draw" in records["none"]["error"]["message"]
    assert "as GBNF" in records["bad"]["error"]["message"]
    assert text_of(records["good"]) == "ab" and records["good"]["error"] is None


def test_an_embedding_of_which_one_input_fails_is_an_error_record(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its inputs that is."""
    step = llm.step

    def failing() -> list[Any]:
        outputs = step()
        for output in outputs:
            if output.prompt == "ab":
                output.update(stop_reason="it is lost")
                output.outputs[0].update(finish_reason="error")
        return outputs

    monkeypatch.setattr(llm, "step", failing)
    data = jsonl(embedding(input=["ab", "c" * 50]))
    (record,) = run(llm, tmp_path / "out.jsonl", data)
    assert record["error"]["message"].endswith("it is lost")


def test_tools_and_formats_in_chats(llm: LLM, tmp_path: Path) -> None:
    """Of the answers in bodies: calls, JSON, and errors of tools in their places."""
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"const": 5}},
                "required": ["a"], "additionalProperties": False}}  # fmt: skip
    tools = [{"type": "function", "function": function}]
    template = {"chat_template": "{{ tools }}<tool_call><think></think>"}
    asked = dict(tools=tools, chat_template_kwargs=template, max_tokens=200)
    data = jsonl(
        chat("a", **asked, tool_choice="required", n=2),
        chat("b", **asked, structured_outputs={"choice": [f"<think>a</think> b {CALL}"]}),
        chat("c", response_format=JSON_SCHEMA, max_tokens=50),
        chat("d", tools=tools),
        chat("e", tools=[5]),
        chat("f", **asked, tool_choice="none", structured_outputs={"choice": [CALL]}),
        completion("g", response_format={"type": "json_object"}, max_tokens=1),
    )
    with make_llm(EMBEDDED_MODEL, max_model_len=1024, max_num_seqs=8) as large:
        *records, cut = run(large, tmp_path / "out", data)
    choices = [r["response"] and r["response"]["body"]["choices"] for r in records]
    for choice in (*choices[0], *choices[1]):
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 5}'}
        assert choice["finish_reason"] == "tool_calls"
    assert choices[0][0]["message"]["content"] is None and len(choices[0]) == 2
    assert choices[1][0]["message"]["reasoning_content"] == "a"
    assert choices[1][0]["message"]["content"] == "b"
    assert isinstance(json.loads(choices[2][0]["message"]["content"]), int)
    assert "tools: the chat template knows no tools" in records[3]["error"]["message"]
    assert "line 5: tools[0] must be {" in records[4]["error"]["message"]
    assert choices[5][0]["message"] == {"role": "assistant", "content": CALL}
    assert choices[5][0]["finish_reason"] == "stop"
    assert text_of(cut) == "{"


def test_numbers_that_are_not_finite_are_null() -> None:
    """As in the server's answers: JSON has no others."""
    body = {"logprobs": [-0.5, -math.inf], "inner": {"value": math.nan}, "text": "NaN"}
    record = json.loads(result_record(3, "a", body), parse_constant=pytest.fail)
    expected = {"logprobs": [-0.5, None], "inner": {"value": None}, "text": "NaN"}
    assert record["response"]["body"] == expected
