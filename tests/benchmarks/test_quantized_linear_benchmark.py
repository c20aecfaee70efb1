"""The benchmark of quantized linear layers runs, and gives a figure for each format."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quantized_linear.py"


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_small_run_measures_every_format() -> None:
    options = ("--shapes=100x64", "--rows=1,70", "--rounds=2", "--megabytes=1", "--threads=1")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout.splitlines()[-1])["points"]
    assert [(p["shape"], p["rows"]) for p in points] == [("100x64", 1), ("100x64", 70)]
    for point in points:
        assert {"bf16", "read", "int8", "e4m3", "int4 g128", "int4 g32"} <= set(point["formats"])
        for figures in point["formats"].values():
            assert figures["us"] > 0 and figures["times_as_fast_as_bf16"] > 0
