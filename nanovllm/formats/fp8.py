"""Read configs of FP8 checkpoints: one scale, or one for each block of a matrix."""

from collections.abc import Mapping
from typing import Any, Literal

from nanovllm.formats.quantization import Quantization
from nanovllm.formats.rules import (
    check_block,
    check_kv_cache,
    check_only,
    excluding,
    names_in,
    refusal,
)
from nanovllm.formats.scheme import Scheme
from nanovllm.utils.checks import check_choice


def read_fp8(config: Mapping[str, Any]) -> Quantization:
    """The quantization that the config of an FP8 checkpoint describes."""
    check_only(config, "fmt", "e4m3", "float8_e4m3fn", None)
    check_only(config, "scale_fmt", "float", "ue8m0", None)  # stored scales say it themselves
    check_only(config, "expert_dtype", "fp8", None)
    check_only(config, "modules_to_convert", [], None)
    check_only(config, "dequantize", False, None)
    check_only(config, "is_checkpoint_fp8_serialized", True, None)
    if config.get("kv_cache_scheme") != "static":  # AutoFP8's name
        check_kv_cache(config)
    inputs: Literal["static", "dynamic"] = check_choice(
        "activation_scheme", config.get("activation_scheme", "dynamic"), ("static", "dynamic")
    )  # type: ignore[assignment]
    block = config.get("weight_block_size")
    if block is None:
        scheme = Scheme("fp8", 8, rows=None, columns=None, inputs=inputs)
    else:
        rows, columns = check_block("weight_block_size", block)
        if inputs != "dynamic":
            raise refusal("activation_scheme", inputs, ["dynamic"])
        scheme = Scheme("fp8", 8, rows, columns, inputs=inputs, scale_name="weight_scale_inv")
    names = names_in(config, "modules_to_not_convert", "ignored_layers")
    return Quantization("fp8", excluding(names, scheme), files="decide")
