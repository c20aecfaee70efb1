"""The benchmark of recurrences runs, compares its points, and says that it needs a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import LIMIT

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "states.py"


def run_cli(*options: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=LIMIT,
        env=env | ({"TRITON_INTERPRET": "1"} if interpret else {}),
    )  # fmt: skip


@pytest.mark.slow
def test_a_quick_run_compares_every_operation(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run_cli("--quick", "--json", str(file), interpret=not torch.cuda.is_available())
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    points = json.loads(file.read_text())["points"]
    assert len(points) == 6 and all(point["us"] > 0 and "error" in point for point in points)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_without_a_gpu_one_line_says_so() -> None:
    done = run_cli(interpret=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "needs a CUDA device" in done.stderr and not done.stdout


@pytest.mark.slow
def test_a_missing_folder_is_an_error_before_anything_is_measured() -> None:
    """As in the benchmark of kernels, which reads the options."""
    done = run_cli("--quick", "--json", "/no/such/folder/file", interpret=True)
    assert done.returncode == 2 and "no folder /no/such/folder" in done.stderr and not done.stdout
