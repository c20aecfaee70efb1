"""The rules of a `quantization_config`, by its method."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from nanovllm.formats.compressed_tensors import read_compressed_tensors
from nanovllm.formats.quantization_fields import (
    check_block,
    check_kv_cache,
    check_object,
    check_only,
    names_in,
    refusal,
)
from nanovllm.formats.rules import Quantization, Rule, excluding, rule
from nanovllm.formats.scheme import Scheme
from nanovllm.utils.checks import check_bool, check_choice, check_int


def _fp8(config: Mapping[str, Any]) -> Quantization:
    check_only(config, "fmt", "e4m3", None)
    check_only(config, "scale_fmt", "float", None)
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


def _awq(config: Mapping[str, Any]) -> Quantization:
    check_only(config, "bits", 4)
    check_only(config, "zero_point", True)
    version = str(config.get("version", config.get("format", "gemm"))).lower()
    if version != "gemm":
        raise refusal("version", version, ["gemm"])
    scheme = Scheme("awq", config["bits"], rows=1, columns=_group_size(config), zeros=True)
    names = names_in(config, "modules_to_not_convert")
    return Quantization("awq", excluding(names, scheme), files="decide")


def _gptq(config: Mapping[str, Any]) -> Quantization:
    layout = config.get("checkpoint_format", config.get("format", "gptq"))
    if layout not in ("gptq", "gptq_v2"):
        raise refusal("checkpoint_format", layout, ["gptq", "gptq_v2"])
    check_only(config, "is_marlin_format", False, None)
    check_only(config, "pack_dtype", "int32", None)
    has_head = check_bool("lm_head", config.get("lm_head") or False)

    def scheme(config: Mapping[str, Any]) -> Scheme:
        check_only(config, "bits", 4, 8)
        # Only then columns are not in the order of their groups, so that g_idx must be there.
        is_sorted = check_bool("static_groups", config.get("static_groups") or False)
        ordered = check_bool("desc_act", config.get("desc_act", False)) and not is_sorted
        columns = _group_size(config)
        return Scheme(
            "gptq", config["bits"], rows=1, columns=columns, zeros=True,
            ordered=ordered and columns is not None,
            zero_offset=1 if layout == "gptq" else 0,
        )  # fmt: skip

    def override(key: str, values: Any) -> Rule:
        values = check_object(f"dynamic[{key!r}]", values)
        for name in ("checkpoint_format", "format", "pack_dtype", "lm_head"):
            if name in values and values[name] != config.get(name):
                raise ValueError(f"dynamic[{key!r}] must not change {name!r}")
        sign, pattern = (key[:2], key[2:]) if key[:2] in ("+:", "-:") else ("", key)
        return rule("dynamic", pattern, None if sign == "-:" else scheme({**config, **values}))

    overrides = check_object("dynamic", config.get("dynamic") or {})
    rules = tuple(override(key, values) for key, values in overrides.items())
    names = names_in(config, "modules_to_not_convert")
    rules += excluding(names, scheme(config), has_head)
    return Quantization("gptq", rules, files="decide")


def _group_size(config: Mapping[str, Any]) -> int | None:
    size = config["group_size"]
    return None if size == -1 else check_int("group_size", size, 8)


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": _fp8, "compressed-tensors": read_compressed_tensors, "awq": _awq, "gptq": _gptq,
}  # fmt: skip
