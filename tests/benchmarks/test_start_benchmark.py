"""The benchmark of starts runs, and takes turns with another checkout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_start_is_measured_beside_another_checkout() -> None:
    command = [sys.executable, "benchmarks/start.py", "--shape", "qwen3-42m", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--against", str(ROOT), "--max-model-len", "64"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT,
    )  # fmt: skip
    *lines, last = done.stdout.splitlines()
    names = ["first start here", "first start there", "second start here", "second start there"]
    assert [line.partition(":")[0] for line in lines] == names
    seconds = json.loads(last)["seconds"]
    assert all(0 < llm < process for [[process, llm]] in seconds.values())
