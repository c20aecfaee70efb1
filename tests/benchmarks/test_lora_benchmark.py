"""The benchmark of adapters runs, and verifies the kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lora.py"


@pytest.mark.slow
def test_a_quick_run_verifies_every_point() -> None:
    options = ("--quick", "--rows=3", "--slots=8", "--rank=3")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=LIMIT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout.splitlines()[-1])["points"]
    assert len(points) == 2 and all(point["right"] for point in points)
