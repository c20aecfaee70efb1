"""The benchmark of decode steps on a CPU runs, with other processes and without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu_steps.py"


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0, 1])
def test_each_number_of_requests_is_measured(busy: int) -> None:
    options = ("--shape=qwen3-42m", "--num-seqs", "1", "3", "--steps=4", f"--busy={busy}")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["busy"] == busy
    assert [point["requests"] for point in result["points"]] == [1, 3]
    for point in result["points"]:
        low, high = point["quartiles"]
        assert 0 < low <= point["ms"] <= high
