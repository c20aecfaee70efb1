"""Weights that are replaced in place, as on a GPU: all addresses stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
from nanovllm.kernels.triton.linear.arranged import arrange
from nanovllm.weights.live import live_weights
from nanovllm.weights.tensors import replace_values, tensors_in, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = [[3, 14, 15, 92, 65], [35, 89, 79]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MOE = dict(
    family="Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip


def addresses(llm: LLM) -> list[int]:
    return [tensor.data_ptr() for tensor in weights_of(llm.model_runner.shard.model)]


@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize("family", [{}, MOE, dict(tie_word_embeddings=True)])
@pytest.mark.usefixtures("plain_products")
def test_addresses_stay(quantization: str | None, family: dict[str, Any], tmp_path: Path) -> None:
    """With plain kernels, which run here."""
    paths = [make_model(tmp_path / str(seed), seed=seed, **family) for seed in (0, 1)]
    options: dict[str, Any] = dict(
        device="cpu", dtype="bfloat16", cpu_kvcache_gib=0.02, max_model_len=64,
        attention_backend="torch", quantization=quantization,
    )  # fmt: skip

    def generate(llm: LLM) -> list[list[int]]:
        return [output["token_ids"] for output in llm.generate(IDS, GREEDY, use_tqdm=False)]

    with LLM(paths[1], **options) as llm:
        expected = generate(llm)
    with LLM(paths[0], **options) as llm:
        before, shard = generate(llm), llm.model_runner.shard
        with shard.computing():
            live_weights(shard).in_place = True
        places = addresses(llm)
        llm.update_weights(load_file(paths[1] / "model.safetensors"))
        assert generate(llm) == expected
        llm.update_weights(load_file(paths[0] / "model.safetensors"))
        assert generate(llm) == before
        assert addresses(llm) == places


def matrix(seed: int, bits: int, size_in: int = 256) -> QuantizedMatrix:
    """Random codes, in groups of 64."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (32, size_in), generator=generator, dtype=torch.int8)
    scales = torch.rand(32, size_in // 64, generator=generator)
    zeros = torch.randint(-8, 8, scales.shape, generator=generator, dtype=torch.int8)
    return QuantizedMatrix(codes, scales, zeros, (1, 64), bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layout_for_kernels_is_replaced(bits: int) -> None:
    old, new = arrange(matrix(0, bits)), arrange(matrix(1, bits))
    places = [tensor.data_ptr() for tensor in tensors_in(old)]
    replace_values([old], [new], "layer")
    assert [tensor.data_ptr() for tensor in tensors_in(old)] == places
    pairs = zip(tensors_in(old), tensors_in(new), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (arrange(matrix(0, 4)), arrange(matrix(0, 8))),
        (arrange(matrix(0, 8)), arrange(matrix(0, 8, 128))),
        ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
        ((torch.zeros(2), None), (torch.zeros(2), torch.zeros(1))),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)),
    ],
)
def test_another_layout_is_an_error(old: Any, new: Any) -> None:
    with pytest.raises(ValueError, match="layer: the new weights need another layout"):
        replace_values(old, new, "layer")


def test_a_wider_type_takes_a_narrower_one() -> None:
    old = torch.zeros(2)
    replace_values(old, torch.ones(2, dtype=torch.bfloat16), "layer")
    assert old.tolist() == [1, 1]
