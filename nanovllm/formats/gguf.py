"""GGUF: matrices in the blocks of a GGUF file, each of its own type.

The config of a GGUF file's directory lists which linear layers have blocks of which type.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm.formats.quantization import Quantization
from nanovllm.formats.rules import any_of, check_names, check_object, refusal, rule
from nanovllm.formats.scheme import Scheme
from nanovllm.kernels.operands.block_types import BLOCK_TYPES, BlockType

METHOD: Literal["gguf"] = "gguf"
ANY_EXPERT = ".*."  # in a name: the matrices of all experts


@dataclass(frozen=True)
class BlockScheme(Scheme):
    """Blocks of one type."""

    kind: BlockType = BLOCK_TYPES["Q8_0"]

    @property
    def description(self) -> str:
        return f"GGUF's {self.kind.name}, {self.kind.bits:g} bits a weight"

    def num_bytes(self, num_weights: int, size_in: int) -> int:  # noqa: ARG002
        return num_weights * self.kind.num_bytes // self.kind.size


def scheme_of(kind: BlockType) -> BlockScheme:
    """The scheme of blocks of a type."""
    return BlockScheme(METHOD, int(kind.bits), rows=1, columns=kind.size, kind=kind)


def read_gguf_types(config: Mapping[str, Any]) -> Quantization:
    """The quantization of a GGUF file, by the layers of each type: `{"Q4_K": [names]}`."""
    rules = []
    for name, layers in check_object("types", config["types"]).items():
        if name not in BLOCK_TYPES:
            raise refusal("types", name, BLOCK_TYPES)
        escaped = any_of(check_names(f"types.{name}", layers))
        pattern = escaped.replace(re.escape(ANY_EXPERT), r"\.\d+\.")
        rules.append(rule("types", rf"{pattern}$", scheme_of(BLOCK_TYPES[name])))
    return Quantization(METHOD, tuple(rules), files="quantized")
