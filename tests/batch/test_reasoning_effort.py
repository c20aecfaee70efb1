"""The field `reasoning_effort` of a batch's lines: it reaches the chat template, or is an error."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from reference import make_llm

from nanovllm.batch.job import BatchJob
from nanovllm.batch.journal import Journal
from nanovllm.batch.lines import read_lines
from nanovllm.embedded import EMBEDDED_MODEL
from tests.chat.harmony_words import make_harmony_model

pytestmark = pytest.mark.usefixtures("one_thread")


def records_of(model: Path | str, output: Path, *efforts: str | None) -> list[dict[str, Any]]:
    """The records of a chat with each effort; None is a line without the field."""
    lines = [{"messages": [{"role": "user", "content": "Hi"}]} for _ in efforts]
    for line, effort in zip(lines, efforts, strict=True):
        line |= {} if effort is None else {"reasoning_effort": effort}  # type: ignore[dict-item]
    data = "\n".join(map(json.dumps, lines)).encode()
    with make_llm(model, max_num_seqs=8) as llm, Journal(output) as journal:
        list(BatchJob(llm, journal, {"max_tokens": 1}).run(read_lines(io.BytesIO(data))))
    records = [json.loads(line) for line in output.read_text().splitlines()]
    return sorted(records, key=lambda record: int(record["custom_id"].removeprefix("line-")))


def test_an_effort_reaches_the_template(tmp_path: Path) -> None:
    """The template writes it into the prompt, whose tokens are bytes; medium is its default."""
    model = make_harmony_model(tmp_path / "model")
    records = records_of(model, tmp_path / "out", None, "low", "high", "minimal")
    usual, low, high = (one["response"]["body"]["usage"]["prompt_tokens"] for one in records[:3])
    assert (low - usual, high - usual) == (len("low") - len("medium"), len("high") - len("medium"))
    words = "line 4: reasoning_effort must be one of 'low', 'medium', 'high', got 'minimal'"
    assert records[3]["error"]["message"] == words


def test_a_template_without_efforts_makes_it_an_error(tmp_path: Path) -> None:
    (record,) = records_of(EMBEDDED_MODEL, tmp_path / "out", "low")
    words = "reasoning_effort: the chat template does not mention it"
    assert words in record["error"]["message"]
