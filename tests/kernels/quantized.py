"""Random quantized matrices for the tests of kernels."""

from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix


@dataclass(frozen=True)
class Format:
    """The codes of a matrix and its blocks; a block of 0 inputs or outputs has all of them.

    Without a seed all codes are 0: it takes seconds to draw those of many experts.
    """

    kind: str = "int8"  # or "e4m3", "int4"
    block: tuple[int, int] = (1, 0)
    zeros: bool = False
    scales: torch.dtype = torch.float32
    stack: tuple[int, ...] = ()
    seed: int | None = 0


def quantized(
    size_out: int, size_in: int, form: Format, device: str = "cpu", **options: Any
) -> QuantizedMatrix:
    """A matrix whose products are about as large as its inputs. With a seed, all codes occur."""
    rng = torch.Generator().manual_seed(form.seed or 0)
    block = form.block[0] or size_out, form.block[1] or size_in
    shape = (*form.stack, size_out, size_in)
    blocks = (*form.stack, -(-size_out // block[0]), -(-size_in // block[1]))
    most = {"int4": 8, "e4m3": 448}.get(form.kind, 128)
    if form.seed is None:
        codes = torch.zeros(shape, dtype=torch.int8)
        codes = codes.view(torch.float8_e4m3fn) if form.kind == "e4m3" else codes
    elif form.kind == "e4m3":
        codes = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
        codes = codes.view(torch.float8_e4m3fn)
    else:
        codes = torch.randint(-most, most, shape, generator=rng, dtype=torch.int8)
    scales = (torch.rand(blocks, generator=rng) + 0.5) / (most * size_in**0.5)
    zeros = None
    if form.zeros:
        zeros = torch.randint(-most, most, blocks, generator=rng, dtype=torch.int8).to(device)
    bits = 4 if form.kind == "int4" else 8
    scales = scales.to(device, form.scales)
    return QuantizedMatrix(codes.to(device), scales, zeros, block, bits, **options)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


FORMATS = [
    Format(),
    Format("int8", (0, 0), scales=torch.float16),
    Format("int8", (1, 32), zeros=True, scales=torch.bfloat16),
    Format("int8", (3, 48), zeros=True),
    Format("e4m3"),
    Format("e4m3", (0, 0)),
    Format("e4m3", (128, 128)),
    Format("e4m3", (16, 64), scales=torch.bfloat16),
    Format("int4", (1, 128), scales=torch.bfloat16),
    Format("int4", (1, 128), zeros=True),
    Format("int4", (1, 64), zeros=True, scales=torch.float16),
    Format("int4", (1, 32)),
    Format("int4", (1, 96)),
    Format("int4", (1, 256), zeros=True),
    Format("int4", (1, 0)),
    Format("int4", (5, 20), zeros=True),  # no product of 16 inputs has one scale
]
