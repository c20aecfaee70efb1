"""Read the method of a `quantization_config`, or of the option `quantization`.

Only JSON is read. An unsupported method, type or layout is a ValueError that names it and the
supported ones.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm.formats.awq import read_awq
from nanovllm.formats.compressed_tensors import read_compressed_tensors
from nanovllm.formats.fp8 import read_fp8
from nanovllm.formats.gguf import read_gguf_types
from nanovllm.formats.gptq import read_gptq
from nanovllm.formats.mxfp4 import read_mxfp4
from nanovllm.formats.names import FIELD, HEAD, OLD_FIELD, USUAL_NAMES, Names
from nanovllm.formats.quantization import NOT_QUANTIZED, Quantization, SchemeRule
from nanovllm.formats.rules import refusal
from nanovllm.formats.scheme import DEQUANTIZE, DEQUANTIZED, ONLINE
from nanovllm.utils.checks import allowed_choices, shorten


def choose_quantization(
    raw: Mapping[str, Any], option: str | None, names: Names = USUAL_NAMES
) -> Quantization | None:
    """The quantization that a checkpoint's config describes, else the one that the option names.

    None: plain weights. It is a ValueError if config and option contradict each other.
    """
    found = read_quantization(raw)
    if option == DEQUANTIZE:
        if found.method is not None:
            raise ValueError(
                f"quantization={option!r} is for GGUF files; the checkpoint is quantized by"
                f" {found.method!r}"
            )
        if DEQUANTIZED not in raw:
            raise ValueError(
                f"quantization={option!r} is for GGUF files; the checkpoint has plain weights:"
                " leave the option out"
            )
        return None
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
        return _while_loading(option)
    if found.method == "gguf":  # its rules have usual names
        names = replace(names, prefixes={}, pieces={})
    return replace(found, names=names)


def _while_loading(method: str) -> Quantization:
    """Quantize all plain weights, except routers and gates of experts: they are small and decide.

    These rules match our names, whatever files call the layers.
    """
    scheme, of_head = ONLINE[method]
    schemes = {r".*(gate|router|router\.layer)$": None, r"model\.": scheme, HEAD: of_head}
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


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": read_fp8, "compressed-tensors": read_compressed_tensors, "awq": read_awq,
    "gptq": read_gptq, "gguf": read_gguf_types, "mxfp4": read_mxfp4,
}  # fmt: skip
