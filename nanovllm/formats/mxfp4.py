"""MXFP4 as gpt-oss publishes it: experts in blocks of 32 values of 4 bits with a scale of 8 bits.

Other layers are plain. The blocks are those of GGUF's type MXFP4, with the bytes in another order.
"""

from collections.abc import Mapping
from typing import Any, Literal

from nanovllm.formats.gguf import BlockScheme, scheme_of
from nanovllm.formats.quantization import Quantization
from nanovllm.formats.rules import check_only, names_in, rule
from nanovllm.kernels.operands.block_types import BLOCK_TYPES

METHOD: Literal["mxfp4"] = "mxfp4"


class MxScheme(BlockScheme):
    """Blocks of MXFP4."""

    @property
    def description(self) -> str:
        return f"MXFP4, {self.kind.bits:g} bits a weight"


def read_mxfp4(config: Mapping[str, Any]) -> Quantization:
    """The quantization of all experts, except in modules whose names a listed pattern matches."""
    check_only(config, "dequantize", False, None)
    kind = BLOCK_TYPES["MXFP4"]
    blocks = scheme_of(kind)
    scheme = MxScheme(METHOD, blocks.bits, blocks.rows, blocks.columns, kind=kind)
    names = names_in(config, "modules_to_not_convert")
    plain = [rule("modules_to_not_convert", name, None) for name in names]
    return Quantization(METHOD, (*plain, rule("experts", r".*\.experts\.", scheme)), "quantized")
