"""Read configs of GPTQ checkpoints: 4-bit and 8-bit codes, by groups, in any order of columns."""

from collections.abc import Mapping
from typing import Any

from nanovllm.formats.quantization import Quantization, SchemeRule
from nanovllm.formats.rules import (
    check_object,
    check_only,
    excluding,
    group_size,
    names_in,
    refusal,
    rule,
)
from nanovllm.formats.scheme import Scheme
from nanovllm.utils.checks import check_bool


def read_gptq(config: Mapping[str, Any]) -> Quantization:
    """The quantization that the config of a GPTQ checkpoint describes."""
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
        columns = group_size(config)
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
