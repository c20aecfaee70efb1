"""Quantized checkpoints: they give the outputs of the weights that they stand for.

`test_quantize_files.py` has which files are written, and what is refused.
"""

from pathlib import Path

import pytest
from conftest import make_model
from families import SAMPLES
from families.describe import write
from safetensors.torch import load_file
from saved_checkpoints import outputs, quantized, stands_for

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "of_experts"),
    [
        ("Llama", 0), ("Granite, tied, with biases", 0), ("Phi-3.5-MoE", 36),
        ("Qwen3.5 experts", 48), ("Gemma 3n", 0), ("gpt-oss", 0),
    ],
)  # fmt: skip
def test_output_is_that_of_the_weights(name: str, of_experts: int, tmp_path: Path) -> None:
    """Tied, with experts, with states, with keys that layers share, with experts left plain."""
    path, summary = quantized(write(tmp_path / "model", SAMPLES[name]))
    assert summary.by_gptq and not summary.rounded
    assert summary.of_experts == of_experts
    assert outputs(path) == outputs(stands_for(path))


@pytest.mark.parametrize("format_", ["int8", "fp8", "rtn"])
def test_formats_without_a_text(format_: str, tmp_path: Path) -> None:
    options = dict(method="rtn") if format_ == "rtn" else dict(format=format_)
    path, summary = quantized(make_model(tmp_path / "model"), text=[], **options)
    assert (summary.by_gptq, summary.rounded) == (0, 14)
    assert outputs(path) == outputs(stands_for(path))


def test_odd_sizes(tmp_path: Path) -> None:
    """Inputs that no group and no word divides; the summary names what vLLM does not load."""
    sizes = dict(hidden_size=60, intermediate_size=101, head_dim=12)
    path, summary = quantized(make_model(tmp_path / "model", **sizes))
    assert len(summary.uneven) == 14
    assert outputs(path) == outputs(stands_for(path))


def test_files_that_fuse_projections(tmp_path: Path) -> None:
    path, _ = quantized(write(tmp_path / "model", SAMPLES["Glm4"]))
    assert any("gate_up_proj.weight_packed" in n for n in load_file(path / "model.safetensors"))
    assert outputs(path) == outputs(stands_for(path))
