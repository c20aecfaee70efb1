"""Formats with an element for each weight: FP8 and 8-bit integers."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from nanovllm.formats import dummy_values as dummy
from nanovllm.formats.blocks import check_scales, places, quantized_matrix
from nanovllm.formats.format import WeightFormat
from nanovllm.formats.scheme import Scheme
from nanovllm.formats.stored import COLUMNS, ROWS, Axis, RankPart, Stored
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix

TYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class ScaledCodes(WeightFormat):
    """Codes times a scale: one for each matrix, each output, or each block."""

    scheme: Scheme

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.dtype = scheme, torch.get_default_dtype()
        axes: tuple[Axis | int, ...] = ()
        if scheme.rows is not None:
            of_columns = 1 if scheme.columns is None else Axis(False, scheme.columns)
            axes = (Axis(True, scheme.rows), of_columns)
        is_float = scheme.storage == "fp8"
        fill = dummy.normal(dummy.FP8_CODES) if is_float else dummy.integers
        scale = dummy.scale_of(None if is_float else scheme.bits)
        self._tensors = {
            "weight": Stored((ROWS, COLUMNS), TYPES[scheme.storage], fill=fill),
            scheme.scale_name: Stored(axes, torch.float32, fill=scale),
        }
        if scheme.zeros:
            self._tensors["weight_zero_point"] = Stored(axes, torch.int8, fill=dummy.integers)
        if scheme.inputs == "static":
            ones = Stored((), torch.float32, fill=dummy.constant(1.0))
            self._tensors[scheme.input_scale_name] = ones

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self._tensors

    def weight(self, tensors: Mapping[str, torch.Tensor], part: RankPart) -> QuantizedMatrix:
        scheme, codes = self.scheme, tensors["weight"]
        scales = check_scales(scheme.scale_name, tensors[scheme.scale_name])
        zeros = tensors.get("weight_zero_point")
        rows = torch.arange(len(part.rows), device=codes.device)  # each projection's row of scales
        if scheme.rows is None:
            sizes = torch.tensor([rows.stop - rows.start for rows in part.rows])
            rows = rows.repeat_interleave(sizes.to(codes.device))
            scales = scales[..., None]
            zeros = None if zeros is None else zeros[..., None]
        else:
            rows = places(part.stored_rows, scheme.rows, codes.device) // scheme.rows
        columns = torch.zeros(part.num_columns, dtype=torch.long, device=codes.device)
        if scheme.columns is not None:
            columns = places([part.columns], scheme.columns, codes.device) // scheme.columns
        input_scale = tensors.get(scheme.input_scale_name)
        if input_scale is not None:
            largest = input_scale.amax(dim=-1)  # the projections have their inputs in common
            input_scale = check_scales(scheme.input_scale_name, largest, of_inputs=True)
        made = quantized_matrix(
            codes, scales, zeros, rows, columns, scheme.bits, scheme.inputs != "float", input_scale
        )
        return replace(made, input_dtype=self.dtype)
