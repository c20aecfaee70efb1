"""Read configs of AWQ checkpoints: 4-bit codes with zero points."""

from collections.abc import Mapping
from typing import Any

from nanovllm.formats.quantization import Quantization
from nanovllm.formats.rules import check_only, excluding, group_size, names_in, refusal
from nanovllm.formats.scheme import Scheme


def read_awq(config: Mapping[str, Any]) -> Quantization:
    """The quantization that the config of an AWQ checkpoint describes."""
    check_only(config, "bits", 4)
    check_only(config, "zero_point", True)
    version = str(config.get("version", config.get("format", "gemm"))).lower()
    if version != "gemm":
        raise refusal("version", version, ["gemm"])
    scheme = Scheme("awq", config["bits"], rows=1, columns=group_size(config), zeros=True)
    names = names_in(config, "modules_to_not_convert")
    return Quantization("awq", excluding(names, scheme), files="decide")
