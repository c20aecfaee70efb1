"""The benchmark of steps with constraints runs, and reports all cases."""

import json
import sys

import pytest

from benchmarks import constraints


def test_it_reports_all_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "constraints", constraints)  # as a script finds it
    from benchmarks import constrained_step

    monkeypatch.setattr(constrained_step.narrowing, "NARROWED_LOGITS", {"cpu": 1, "cuda": 1 << 26})
    command = ["constrained_step.py", "--vocab", "1500", "--rows", "9", "--steps", "9"]
    monkeypatch.setattr(sys, "argv", command)
    constrained_step.main()
    cases = [*map(json.loads, capsys.readouterr().out.splitlines())]
    assert [case["case"] for case in cases] == list(constrained_step.CASES)
    assert all(case[part] > 0 for case in cases for part in ("postprocess", "draw", "thread"))
    assert all(("fill" in case) == ("schema" in case["case"]) for case in cases)
