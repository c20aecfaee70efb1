"""The benchmark of attention to latent rows runs, and compares its points."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import LIMIT

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "latents.py"


@pytest.mark.slow
def test_a_quick_run_compares_every_point(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    file = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env)
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    points = json.loads(file.read_text())["points"]
    assert len(points) == 3 and all(point["us"] > 0 and "error" in point for point in points)
