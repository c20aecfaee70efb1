"""The benchmark of constraints runs, and reports all cases."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import constraints


def test_it_reports_all_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["constraints.py", "--vocab", "1000", "--repeats", "1"])
    constraints.main()
    vocabulary, *cases = map(json.loads, capsys.readouterr().out.splitlines())
    assert vocabulary["read_vocabulary"] > 0
    assert [case["case"] for case in cases] == list(constraints.CASES)
    assert all(0 < case["median"] <= case["p99"] <= case["max"] + 1 for case in cases)


def test_it_compares_speeds_with_and_without_forced_tokens(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--generate", str(model_dir), "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["constraints.py", *options])
    constraints.main()
    cases = [*map(json.loads, capsys.readouterr().out.splitlines())]
    assert [(case["whitespace"], case["requests"]) for case in cases] == [
        (False, 1), (False, 16), (True, 1), (True, 16)
    ]  # fmt: skip
    assert all(0.1 < case["forced"] < 1 and case["ratio"] > 0 for case in cases)
