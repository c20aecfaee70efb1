"""The benchmark of weights that change runs, and compares answers."""

import json
import subprocess
import sys
from pathlib import Path

from waiting import LIMIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "weights.py"


def test_a_small_run_measures_updates_and_sleep() -> None:
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--device", "cpu", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["same_after_sleep"] and figures["same_after_reload"]
    assert figures["changed_by_update"] and figures["update_s"] > 0
