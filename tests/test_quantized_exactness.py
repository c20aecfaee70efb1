"""Quantized weights: greedy output equals that of transformers with the weights they stand for.

It costs more than 20 seconds: every format is compared with transformers.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import edit_config, make_model
from quantization_variants import MOE, ODD, VARIANTS
from quantized_checkpoints import DEQUANTIZED, write_quantized
from reference import (
    HARD,
    Case,
    assert_same,
    audit_at_rest,
    generate,
    make_case,
    make_llm,
    make_some_prompts,
)
from safetensors.torch import load_file, save_file

from nanovllm.formats.choice import format_of
from nanovllm.formats.methods import read_quantization
from nanovllm.formats.scheme import ONLINE, Scheme
from nanovllm.formats.stored import RankPart
from nanovllm.kernels.plain.quantized_linear import dense_matrix

pytestmark = pytest.mark.usefixtures("one_thread")


def schemes_of(config: dict[str, Any]) -> list[Scheme]:
    return read_quantization({"quantization_config": config}).schemes


CHOSEN = ["fp8, small blocks", "ct, int8", "ct, 4 bits, asymmetric", "awq", "gptq, act-order"]
SHAPES: dict[str, dict[str, Any]] = {
    "odd sizes": ODD,
    "experts": MOE,
    "biases": dict(family="Qwen2"),
    "fused": dict(family="Phi3"),
    "tied": dict(family="Llama", tie_word_embeddings=True),
}
STRESSES: dict[str, dict[str, Any]] = {
    "plain PyTorch": dict(attention_backend="torch"),
    "small pool, budget 16": HARD,
    "mixed, overlap": dict(HARD, scheduling="mixed", overlap=True),
}


def check(path: Path, case: Case, **options: Any) -> None:
    with make_llm(path, **options) as llm:
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_format(name: str, tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS[name], shards=True)
    check(path, make_case(path / DEQUANTIZED, make_some_prompts()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CHOSEN)
def test_shapes_at_which_models_break(name: str, shape: str, tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS[name], **SHAPES[shape])
    check(path, make_case(path / DEQUANTIZED, make_some_prompts()))


@pytest.mark.parametrize("stress", STRESSES)
@pytest.mark.parametrize("name", CHOSEN)
def test_under_stress(name: str, stress: str, tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS[name])
    check(path, make_case(path / DEQUANTIZED, make_some_prompts()), **STRESSES[stress])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS[name], num_key_value_heads=2)
    check(path, make_case(path / DEQUANTIZED, make_some_prompts()), tensor_parallel_size=2)


FLOAT_INPUTS = [
    name
    for name, variant in VARIANTS.items()
    if all(scheme.inputs == "float" for scheme in schemes_of(variant.config))
]


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [{}, *SHAPES.values()], ids=["Qwen3", *SHAPES])
@pytest.mark.parametrize("name", FLOAT_INPUTS)
def test_on_a_gpu(name: str, shape: dict[str, Any], tmp_path: Path) -> None:
    """With float inputs; others are rounded there, and compared kernel by kernel."""
    if shape and name not in CHOSEN:
        pytest.skip("odd shapes run with a few formats")
    path = write_quantized(tmp_path / "model", VARIANTS[name], **shape)
    case = make_case(path / DEQUANTIZED, make_some_prompts())
    check(path, case, device="cuda", num_kvcache_blocks=500)


# Weights that are quantized while they are loaded


def rounded(weight: torch.Tensor, online: str, is_head: bool) -> torch.Tensor:
    """What a matrix is after quantizing, in float32."""
    weight_format = format_of(ONLINE[online][is_head])
    tensors = weight_format.of_plain(weight)
    matrix = weight_format.weight(tensors, RankPart.whole(*weight.shape))
    if isinstance(matrix, torch.Tensor):
        return matrix
    assert not isinstance(matrix, list)
    return dense_matrix(matrix, weight.shape[1])


def write_rounded(path: Path, source: Path, online: str) -> Path:
    """A plain checkpoint of the weights that an engine makes of those in `source`."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not any(part in name for part in ("embed", "mlp.gate.")):
            tensors[name] = rounded(tensor, online, "lm_head" in name)
    if "lm_head.weight" not in tensors:
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = rounded(table, online, is_head=True).clone()
        edit_config(path, tie_word_embeddings=False)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("shape", [{}, *SHAPES.values()], ids=["Qwen3", *SHAPES])
@pytest.mark.parametrize("online", ONLINE)
def test_quantizing_while_loading(online: str, shape: dict[str, Any], tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", **shape)
    case = make_case(write_rounded(tmp_path / "rounded", path, online), make_some_prompts())
    check(path, case, quantization=online)
