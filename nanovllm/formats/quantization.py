"""The quantization of a model: what its config says, or what the option makes of plain weights.

Only JSON is read. A method, a type or a layout that is not supported is a ValueError that names it,
and what is supported.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm.formats.methods import METHODS
from nanovllm.formats.names import USUAL_NAMES, Names
from nanovllm.formats.quantization_fields import refusal
from nanovllm.formats.rules import FIELD, HEAD, NOT_QUANTIZED, Quantization, Rule
from nanovllm.formats.scheme import ONLINE
from nanovllm.utils.checks import allowed_choices, shorten


def choose_quantization(
    raw: Mapping[str, Any], option: str | None, names: Names = USUAL_NAMES
) -> Quantization:
    """The quantization of a checkpoint with this config, or else what the option makes of it.

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
    return Quantization(method, tuple(Rule(re.compile(p), each) for p, each in schemes.items()))


def read_quantization(raw: Mapping[str, Any]) -> Quantization:
    """What a checkpoint's config says; without `quantization_config`, its weights are plain."""
    config = raw.get(FIELD)
    config = raw.get("compression_config") if config is None else config
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
