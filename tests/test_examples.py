"""The examples: training raises the reward; the others say what is missing."""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT

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
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"{example}: error: nanovllm.ray needs nanovllm[{extra}]: No module"
    )
    assert done.stderr.endswith(f"; pip install 'nanovllm[{extra}]'\n")
    assert done.stderr.count("\n") == 1


def test_the_example_adds_without_the_package_index(tmp_path: Path) -> None:
    """The model that it would download is one line."""
    offline = {"NANOVLLM_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, str(ROOT / "example.py")]
    env = {**os.environ, **offline, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    _, *sums, last = done.stdout.splitlines()
    assert sums[0] == "12+34=46  (stop)" and len(sums) == 6
    assert last.startswith("SmolLM2 is left out: 'smollm2' is not downloaded, as HF_HUB_OFFLINE")


def test_an_installation_is_tried() -> None:
    """As `make lowest` does with another PyTorch."""
    argv = [sys.executable, str(ROOT / "tools" / "smoke.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("sums and a chat are right\n")


def test_a_trial_shows_why_its_server_has_ended() -> None:
    address_in = runpy.run_path(str(ROOT / "tools" / "smoke.py"))["address_in"]
    assert address_in(["a\n", "serves at http://x:1\n"]) == "http://x:1"
    with pytest.raises(RuntimeError, match=r"^the server has ended: no memory\n$"):
        address_in(["no memory\n"])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_training_raises_the_reward() -> None:
    """From about a quarter of the sums. The seed is fixed."""
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples" / "train_grpo.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rewards = example.train(steps=20)
    assert sum(rewards[:4]) / 4 < 0.35
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15, rewards
