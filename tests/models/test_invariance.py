"""Where `batch_invariant=True` is an error: options and models whose kernels have no fixed order.

Only options and config.json are checked, so that no GPU is needed.
"""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from families import PUBLISHED
from families.gpt_oss import layers

from nanovllm.config import Config
from nanovllm.models.config import ModelConfig
from nanovllm.models.invariance import check_invariance

BF16 = {"dtype": "bfloat16"}
LORA = {"enable_lora": True}
DENSE, EXPERTS, LATENTS = "OLMo-2-0425-1B", "dots.llm1", "DeepSeek-V2-Lite"
PLAIN_OSS = {n: v for n, v in layers(4, 8).items() if n != "quantization_config"}
# What models with these in their names are refused for on a GPU; all others are supported.
REFUSED = {
    "gpt-oss": "weights in mxfp4", "Gemma 3n": "several streams of hidden states",
    **dict.fromkeys(
        ["Qwen3.5", "Qwen3-Next", "OLMo Hybrid", "Kimi-Linear", "Ling", "LFM2", "amba",
         "granite-4.0-h", "Falcon-H1", "Nemotron-H", "Nemotron-3"],
        "recurrent or convolution states",
    ),
    **dict.fromkeys(
        ["DeepSeek", "Kimi-K2", "Moonlight", "GLM-4.7", "MiniCPM3", "Mistral-Small-4"],
        "latent attention",
    ),
}  # fmt: skip


def check(file: Mapping[str, Any], **options: Any) -> None:
    config = Config("model", batch_invariant=True, **{"device": "cuda"} | options)
    check_invariance(config, ModelConfig.parse(copy.deepcopy(dict(file)), config.quantization))


def refused(file: Mapping[str, Any], reason: str, **options: Any) -> None:
    where = "CPU" if options.get("device") == "cpu" else "GPU"
    expected = f"^batch_invariant=True does not yet hold on a {where} with {reason}$"
    with pytest.raises(ValueError, match=expected):
        check(file, **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_model_is_supported_or_named(name: str) -> None:
    file = PUBLISHED[name].file
    reasons = [reason for part, reason in REFUSED.items() if part in name]
    for reason in reasons[:1]:
        refused(file, reason, **BF16)
    if not reasons:
        check(file, **BF16)
    check(file, device="cpu")


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("dtype='float32'", {"dtype": "float32"}),
        ("kv_cache_dtype='fp8'", {"kv_cache_dtype": "fp8"}),
    ],
)
def test_options_are_refused_on_a_gpu_alone(reason: str, options: dict[str, Any]) -> None:
    refused(PUBLISHED[DENSE].file, reason, **options)
    refused(PUBLISHED[DENSE].file, reason, device="cuda:1", **options)
    check(PUBLISHED[DENSE].file, device="cpu", **options)


def test_both_types_of_16_bits_are_supported() -> None:
    for name in (DENSE, EXPERTS):
        check(PUBLISHED[name].file, dtype="float16")


def test_several_ranks_are_supported() -> None:
    for options in ({}, {"enable_expert_parallel": True}):
        check(PUBLISHED[EXPERTS].file, tensor_parallel_size=2, **BF16, **options)


def test_the_type_of_a_model_counts_without_an_option() -> None:
    file = dict(PUBLISHED[DENSE].file, dtype="float32")
    refused(file, "dtype='float32'")
    check(file, **BF16)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("name", [DENSE, EXPERTS])
def test_weights_quantized_while_loading_are_supported(name: str, quantization: str) -> None:
    check(PUBLISHED[name].file, quantization=quantization)


def test_plain_experts_of_gpt_oss_are_supported() -> None:
    check(PLAIN_OSS, **BF16)


def test_adapters_are_refused_where_their_products_have_no_order() -> None:
    """On a GPU next to experts; on a CPU PyTorch multiplies those of latents' expansion."""
    check(PUBLISHED[DENSE].file, **LORA)
    refused(PUBLISHED[EXPERTS].file, "adapters next to experts", **LORA)
    check(PUBLISHED[EXPERTS].file, device="cpu", **LORA)
    refused(PUBLISHED[LATENTS].file, "adapters next to latent attention", device="cpu", **LORA)
