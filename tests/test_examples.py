"""The examples where something that they need is missing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_without_ray_the_example_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError(\"No module named 'ray'\")")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    argv = [sys.executable, str(ROOT / "examples" / "ray_batch.py"), "in.jsonl", "out"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "ray_batch.py: error: nanovllm.ray needs nanovllm[ray]: No module"
    )
    assert done.stderr.endswith("; pip install 'nanovllm[ray]'\n")
    assert done.stderr.count("\n") == 1
