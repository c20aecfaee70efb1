"""The examples where something that they need is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("example", "extra"), [("ray_batch.py", "ray"), ("ray_serve.py", "ray-serve")]
)
def test_without_ray_the_example_says_what_to_install(
    example: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError(\"No module named 'ray'\")")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    argv = [sys.executable, str(ROOT / "examples" / example), "in.jsonl", "out"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"{example}: error: nanovllm.ray needs nanovllm[{extra}]: No module"
    )
    assert done.stderr.endswith(f"; pip install 'nanovllm[{extra}]'\n")
    assert done.stderr.count("\n") == 1
