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
DENSE, EXPERTS, LATENTS = "OLMo-2-0425-1B", "dots.llm1", "MiniCPM3-4B"
OSS = layers(4, 8)
PLAIN_OSS = {n: v for n, v in OSS.items() if n != "quantization_config"}


def check(file: Mapping[str, Any], **options: Any) -> None:
    config = Config("model", batch_invariant=True, **{"device": "cuda"} | options)
    check_invariance(config, ModelConfig.parse(copy.deepcopy(dict(file)), config.quantization))


def refused(file: Mapping[str, Any], reason: str, **options: Any) -> None:
    where = "CPU" if options.get("device") == "cpu" else "GPU"
    expected = f"^batch_invariant=True does not yet hold on a {where} with {reason}$"
    with pytest.raises(ValueError, match=expected):
        check(file, **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_model_is_supported(name: str) -> None:
    for device in ("cuda", "cpu"):
        check(PUBLISHED[name].file, device=device, **BF16)


def test_float32_is_refused_on_a_gpu_alone() -> None:
    for device in ("cuda", "cuda:1"):
        refused(PUBLISHED[DENSE].file, "dtype='float32'", device=device, dtype="float32")
    check(PUBLISHED[DENSE].file, device="cpu", dtype="float32")


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


@pytest.mark.parametrize("file", [OSS, PLAIN_OSS], ids=["MXFP4", "plain"])
def test_experts_of_gpt_oss_are_supported(file: dict[str, Any]) -> None:
    check(file, **BF16)
    check(file, **BF16, **LORA)


def test_weights_of_a_gguf_file_are_supported() -> None:
    stored = {"quant_method": "gguf", "types": {"Q4_K": ["model.layers.0.self_attn.q_proj"]}}
    check(dict(PUBLISHED[DENSE].file, quantization_config=stored), **BF16)


def test_adapters_are_refused_where_their_products_have_no_order() -> None:
    """PyTorch multiplies those of latents' expansion."""
    for name in (DENSE, EXPERTS):
        check(PUBLISHED[name].file, **LORA, **BF16)
        check(PUBLISHED[name].file, device="cpu", **LORA)
    for device in ("cpu", "cuda"):
        reason = "adapters next to latent attention"
        refused(PUBLISHED[LATENTS].file, reason, device=device, **LORA, **BF16)
