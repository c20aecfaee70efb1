"""The format of each scheme."""

from collections.abc import Callable, Sequence

from nanovllm.formats.format import DENSE, PerProjection, WeightFormat
from nanovllm.formats.packed import Awq, CompressedTensors, Gptq, Int4Packed
from nanovllm.formats.quantize import QUANTIZERS
from nanovllm.formats.scaled import ScaledCodes
from nanovllm.formats.scheme import Scheme

FORMATS: dict[str, Callable[[Scheme], WeightFormat]] = {
    "fp8": ScaledCodes,
    "int8": ScaledCodes,
    "packed": CompressedTensors,
    "awq": Awq,
    "gptq": Gptq,
    "int4": Int4Packed,
}


def format_of(scheme: Scheme | None, is_fused: bool = False) -> WeightFormat:
    """The format of weights that are quantized by `scheme`, or of plain ones."""
    if scheme is None:
        return DENSE
    made = FORMATS[scheme.storage](scheme)
    made.is_fused = is_fused and not scheme.while_loading
    if scheme.while_loading:
        made.quantize = QUANTIZERS[scheme.storage]
    return made


def joined_format(schemes: Sequence[Scheme | None], is_fused: bool = False) -> WeightFormat:
    """The format of a fused layer whose projections have these schemes."""
    if all(scheme == schemes[0] for scheme in schemes):
        return format_of(schemes[0], is_fused)
    return PerProjection([format_of(scheme) for scheme in schemes])
