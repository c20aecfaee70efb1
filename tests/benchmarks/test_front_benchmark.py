"""The benchmark of the front's work runs, and reports all cases."""

import json
import subprocess
import sys
from pathlib import Path

from waiting import LIMIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "front.py"


def test_it_reports_all_cases() -> None:
    command = [sys.executable, str(SCRIPT), "--requests", "3", "--streams", "2", "--step-ms", "0.1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 0, result.stderr
    cases = [*map(json.loads, result.stdout.splitlines())]
    assert [case["case"] for case in cases] == ["events", "whole", "server"]
    assert all(case["tokens_per_second"] > 0 and case["front_us"] > 0 for case in cases)
