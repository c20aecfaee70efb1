"""The choice of formats for quantized weights: the format of a scheme, and of each layer.

The model's quantization decides, together with the types of the tensors in the files.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from nanovllm.formats.block_format import BlockFormat
from nanovllm.formats.format import DENSE, Dense, Formats, WeightFormat
from nanovllm.formats.in_turn import MxFormat
from nanovllm.formats.mixed import Float32, PerProjection
from nanovllm.formats.names import FIELD, stacked_name
from nanovllm.formats.packed import Awq, CompressedTensors, Gptq, Int4Packed
from nanovllm.formats.quantization import NOT_QUANTIZED, Quantization
from nanovllm.formats.quantize import QUANTIZERS, WhileLoading
from nanovllm.formats.scaled import ScaledCodes
from nanovllm.formats.scheme import Scheme

FORMATS: dict[str, Callable[[Scheme], WeightFormat]] = {
    "fp8": ScaledCodes,
    "int8": ScaledCodes,
    "packed": CompressedTensors,
    "awq": Awq,
    "gptq": Gptq,
    "int4": Int4Packed,
    "gguf": BlockFormat,
    "mxfp4": MxFormat,
}
CODES = ("weight", "weight_packed", "qweight")  # a linear layer has one of these tensors
SCALES = ("scales", "weight_scale", "weight_scale_inv")  # and a quantized one has one of these


def format_of(scheme: Scheme | None, is_fused: bool = False) -> WeightFormat:
    """The format of weights that are quantized by `scheme`, or of plain ones."""
    if scheme is None:
        return DENSE
    made = FORMATS[scheme.storage](scheme)
    if scheme.while_loading:
        return WhileLoading(made, QUANTIZERS[scheme.storage])
    made.is_fused = is_fused
    return made


def joined_format(schemes: Sequence[Scheme | None], is_fused: bool = False) -> WeightFormat:
    """The format of a fused layer with projections of these schemes."""
    if all(scheme == schemes[0] for scheme in schemes):
        return format_of(schemes[0], is_fused)
    return PerProjection([format_of(scheme) for scheme in schemes])


@dataclass(frozen=True)
class QuantizedFormats(Formats):
    """Chooses a format for each linear layer inside the module `name`.

    `files` maps the usual names of a checkpoint's tensors to their types; None without files.
    """

    quantization: Quantization = NOT_QUANTIZED
    files: Mapping[str, str] | None = None
    name: str = ""

    def inside(self, name: str) -> "QuantizedFormats":
        return replace(self, name=f"{self.name}{name}.")

    def of(self, layer: str) -> WeightFormat:
        parts = self.names.parts(layer)
        if not parts or self._has(f"{layer}.{tensor}" for tensor in CODES):
            return format_of(self._scheme(layer), is_fused=True)
        # Without files, random values are made for all projections as one tensor.
        return joined_format([self._scheme(part) for part in parts], self.files is None)

    def of_table(self, layer: str) -> WeightFormat:
        return format_of(self.quantization.scheme_of_table(f"{self.name}{layer}"))

    def in_float32(self, layer: str) -> WeightFormat:
        scheme = self._scheme(layer)
        return Dense(torch.float32) if scheme is None else Float32(format_of(scheme))

    def has_kv_scales(self) -> bool:
        return any(f"{self.name}{which}_scale" in (self.files or ()) for which in "kv")

    def of_experts(self, num_experts: int) -> dict[str, WeightFormat]:
        return {
            matrix: joined_format(
                [self._of_experts(num_experts, part) for part in parts],
                self.files is None
                or self._has(f"experts.{stacked_name(matrix, tensor)}" for tensor in CODES),
            )
            for matrix, parts in self.names.experts.items()
        }

    def _of_experts(self, num_experts: int, projection: str) -> Scheme | None:
        schemes = [self._scheme(f"experts.{i}.{projection}") for i in range(num_experts)]
        for i, scheme in enumerate(schemes):
            if scheme != schemes[0]:
                raise ValueError(
                    f"{self.name}experts.0.{projection} has {_described(schemes[0])}, that of"
                    f" expert {i} has {_described(scheme)}; all experts must be quantized alike"
                )
        return schemes[0]

    def _has(self, tensors: Iterable[str]) -> bool:
        """Whether the files have one of these tensors."""
        return any(f"{self.name}{tensor}" in (self.files or ()) for tensor in tensors)

    def _scheme(self, layer: str) -> Scheme | None:
        """The scheme of one layer of the checkpoint."""
        name = f"{self.name}{layer}"
        scheme = self.quantization.scheme(name)
        if self.files is None:
            return scheme
        there = self._is_quantized(name)
        if scheme is None and there:
            raise ValueError(f"{name} is quantized in the files, but {FIELD} excludes it")
        if scheme is None or (self.quantization.files == "decide" and not there):
            return None
        return self._spelt(name, scheme)

    def _type(self, name: str, tensor: str) -> str | None:
        """The type of a layer's tensor in the files, alone or in a stack of all experts'."""
        assert self.files is not None
        above, _, kind = name.rpartition(".")
        module = above.rpartition(".")[0]
        stacks = (stack for stack, parts in self.names.experts.items() if kind in parts)
        stacked = (f"{module}.{stacked_name(stack, tensor)}" for stack in stacks)
        return self.files.get(f"{name}.{tensor}", self.files.get(next(stacked, "")))

    def _is_quantized(self, name: str) -> bool:
        """Whether the layer has codes, or scales of codes that are missing."""
        codes = (self._type(name, tensor) for tensor in CODES)
        return any(dtype in ("F8_E4M3", "I8", "I32") for dtype in codes) or any(
            self._type(name, tensor) for tensor in SCALES
        )

    def _spelt(self, name: str, scheme: Scheme) -> Scheme:
        """The scheme with the optional tensors, and the names of tensors, that the files have."""
        if scheme.storage == "gptq":
            has_order = self._type(name, "g_idx") is not None
            return replace(scheme, ordered=scheme.ordered or has_order)
        if scheme.storage == "fp8" and self._type(name, "weight_scale_inv"):
            scheme = replace(scheme, scale_name="weight_scale_inv")
        if scheme.inputs == "static" and self._type(name, "activation_scale"):
            scheme = replace(scheme, input_scale_name="activation_scale")
        return scheme


def _described(scheme: Scheme | None) -> str:
    return "plain weights" if scheme is None else scheme.description
