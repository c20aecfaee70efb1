"""The benchmark of constraints runs, and reports all cases."""

import json
import sys

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
