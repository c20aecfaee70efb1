"""More scripts in the style of vLLM's offline examples, run in this process: see test_from_vllm."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from adapter_files import make_adapter
from test_from_vllm import IMPORTS, SCRIPTS

from nanovllm.embedded import EMBEDDED_MODEL

pytestmark = pytest.mark.usefixtures("one_thread")
FURTHER = {
    "from vllm.engine.arg_utils import": "from nanovllm import",
    "from vllm.v1.engine.async_llm import": "from nanovllm import",
}


def run(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> list[str]:
    """The lines that a script prints; only its import lines are changed."""
    text = (SCRIPTS / script).read_text(encoding="utf-8")
    for theirs, ours in (FURTHER | IMPORTS).items():
        text = text.replace(theirs, ours)
    assert not re.search(r"\bvllm\b(?!:)", text)
    monkeypatch.setattr(sys, "argv", [script, *words])
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, str(Path(script)), "exec"), space)
    return capsys.readouterr().out.splitlines()


def test_options_of_a_command_line_and_requests_by_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", EMBEDDED_MODEL, "--max-tokens", "5", "--max-num-seqs", "8"]
    lines = run("engine.py", monkeypatch, capsys, *words)
    assert sorted(lines[:3]) == ["0 12+34= 1", "1 7+8= 1", "2 250+250= 2"]
    assert lines[3:] == [
        "Prompt: '12+34=', generated: '46'", "Prompt: '7+8=', generated: '15'",
    ]  # fmt: skip


def test_answers_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run("streaming.py", monkeypatch, capsys, EMBEDDED_MODEL)
    assert lines == ["stream-1 12+34=46 done", "stream-2 7+8=15 done"]


def test_constraints_with_speculation_and_vectors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run("constraints.py", monkeypatch, capsys, EMBEDDED_MODEL)
    texts = {kind: json.loads(text) for kind, text in (line.split(" ", 1) for line in lines[:4])}
    assert texts["choice"] in ("Positive", "Negative")
    assert re.fullmatch(r"[0-9]+(@[0-9]*(\.com)?)?", texts["regex"])
    assert set(json.loads(texts["json"])) == {"kind", "fast"}
    assert re.fullmatch(r"SELECT col_[12]  from table_[12] ", texts["grammar"])
    assert lines[4:] == ["drafted True", "12+34= 128", "7+8= 128", "[True, True]", "False"]


def test_a_command_line_makes_an_llm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", EMBEDDED_MODEL, "--max-tokens", "5", "--temperature", "0"]
    assert run("arguments.py", monkeypatch, capsys, *words) == ["['15']", "['15', '15']"]


def test_adapters_by_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    adapter = make_adapter(Path(EMBEDDED_MODEL), tmp_path / "adapter")
    lines = run("adapters_by_step.py", monkeypatch, capsys, EMBEDDED_MODEL, str(adapter))
    found = dict(line.split(" ", 1) for line in lines)
    assert len(found) == 4 and (found["0"], found["2"]) == ("46", "15")


def test_callers_of_one_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run("loop.py", monkeypatch, capsys, EMBEDDED_MODEL)
    assert lines == ["['12+34=46', '7+8=15']", "True 4096"]
