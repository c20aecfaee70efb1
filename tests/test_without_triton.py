"""The package needs no Triton on a CPU: PyTorch's builds for CPUs come without it."""

import subprocess
import sys
from pathlib import Path

import pytest
import zygote
from waiting import LIMIT

STATEMENTS = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Hidden())
from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
for backend in ("auto", "torch"):
    options = dict(device="cpu", cpu_kvcache_gib=0.01, attention_backend=backend)
    with LLM(EMBEDDED_MODEL, **options) as llm:
        (output,) = llm.generate("12+34=", SamplingParams(temperature=0), use_tqdm=False)
    print(output.text)
"""


@pytest.mark.cold
def test_a_cpu_needs_no_triton() -> None:
    with zygote.cold():
        command = [sys.executable, "-c", STATEMENTS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, "46\n46\n"), done.stderr


def test_only_tests_install_triton() -> None:
    """Builds of PyTorch for CUDA bring the version that they need."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    needed = project.partition("\ndependencies = [")[2].partition("\n]")[0]
    tests = project.partition("\ntest = [")[2].partition("\n]")[0]
    assert "torch>=" in needed and "triton" not in needed and "triton>=" in tests
