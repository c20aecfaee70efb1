"""Quantization by the method that a `quantization_config` names, or by the option's.

Only JSON is read. A method, a type or a layout that is not supported is a ValueError that names it,
and what is supported.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from nanovllm.formats.compressed_tensors import read_compressed_tensors
from nanovllm.formats.names import USUAL_NAMES, Names
from nanovllm.formats.quantization import (
    FIELD,
    HEAD,
    NOT_QUANTIZED,
    OLD_FIELD,
    Quantization,
    SchemeRule,
)
from nanovllm.formats.rules import (
    check_block,
    check_kv_cache,
    check_object,
    check_only,
    excluding,
    names_in,
    refusal,
    rule,
)
from nanovllm.formats.scheme import ONLINE, Scheme
from nanovllm.utils.checks import allowed_choices, check_bool, check_choice, check_int, shorten


def choose_quantization(
    raw: Mapping[str, Any], option: str | None, names: Names = USUAL_NAMES
) -> Quantization:
    """The quantization that a checkpoint's config describes, else the one that the option names.

    It is a ValueError if the two contradict each other.
    """
    found = read_quantization(raw)
    if option and found.method not in (None, option):
        raise ValueError(
            f"quantization={option!r}: the checkpoint is quantized already, by"
            f" {found.method!r}; leave the option out"
        )
    if option and found.method is None:
        if option not in ONLINE:
            raise ValueError(
                f"quantization={option!r}: the checkpoint has plain weights, which can be"
                f" quantized by {allowed_choices(ONLINE)}"
            )
        found = _while_loading(option)
    return replace(found, names=names)


def _while_loading(method: str) -> Quantization:
    """Quantize all plain weights, except the routers of experts, which are small and decide."""
    scheme, of_head = ONLINE[method]
    schemes = {r".*\.gate$": None, r"model\.": scheme, HEAD: of_head}
    return Quantization(
        method, tuple(SchemeRule(re.compile(p), each) for p, each in schemes.items())
    )


def read_quantization(raw: Mapping[str, Any]) -> Quantization:
    """What a checkpoint's config says; without `quantization_config`, its weights are plain."""
    config = raw.get(FIELD)
    config = raw.get(OLD_FIELD) if config is None else config
    if config is None:
        return NOT_QUANTIZED
    if not isinstance(config, dict):
        raise ValueError(f"{FIELD} must be an object, got {shorten(config)}")
    default = "compressed-tensors" if "config_groups" in config else None
    method = config.get("quant_method", default)
    try:
        if not isinstance(method, str) or method not in METHODS:
            raise refusal("quant_method", method, METHODS)
        return METHODS[method](config)
    except KeyError as error:
        raise ValueError(f"{FIELD} has no field {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{FIELD}: {error}") from None


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

    def override(key: str, values: Any) -> SchemeRule:
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
