"""RMS norms of groups of channels, with a gate before or after. T rows of G groups."""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import cdiv, next_power_of_2
from nanovllm.kernels.triton.common import rows_with_room

TILE = 1024  # values of a program, unless a group has more


@triton.jit
def gated_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gate_ptr, weight_ptr, out_ptr, eps, num_groups,
    x_row, x_group, gate_row, gate_group, weight_group,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """One program normalizes BLOCK_G groups of any rows."""
    number = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    row, group = (number // G).to(tl.int64)[:, None], (number % G)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (number < num_groups)[:, None] & (d < D)
    x = tl.load(x_ptr + row * x_row + group * x_group + d, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_row + group * gate_group + d, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + group * weight_group + d, mask=d < D, other=0.0)
    values, gate = x.to(tl.float32), gate.to(tl.float32)
    opened = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        values *= opened
    values *= tl.rsqrt(tl.sum(values * values, axis=1) / D + eps)[:, None]
    # Rounded where plain PyTorch does it.
    values = values.to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    if not GATE_FIRST:
        values = values.to(weight.dtype if x.dtype == weight.dtype else tl.float32)
        values = values.to(tl.float32) * opened
    at = out_ptr + (row * G + group) * D + d
    tl.store(at, values.to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gate_first: bool
) -> torch.Tensor:
    """Normalize the groups of x [T, G, D]. Reads x and the gate once, writes as much as x has.

    The result has memory after its last row, for products of few rows.
    """
    return normalize(gated_norm_kernel, x, gate, weight, eps, gate_first)


def normalize(
    kernel: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float,
    gate_first: bool,
) -> torch.Tensor:  # fmt: skip
    """As `gated_norm`, by the kernel as it is compiled for some arguments."""
    num_rows, groups, size = x.shape
    assert x.stride(2) == gate.stride(2) == weight.stride(-1) == 1
    dtype = torch.promote_types(weight.dtype, x.dtype) if gate_first else x.dtype
    out = rows_with_room(num_rows, groups * size, x, dtype).view(x.shape)
    block_d = next_power_of_2(size)
    block_g = max(1, TILE // block_d)
    kernel[(cdiv(num_rows * groups, block_g),)](
        x, gate, weight, out, eps, num_rows * groups,
        *x.stride()[:2], *gate.stride()[:2], weight.stride(0) if weight.dim() == 2 else 0,
        G=groups, D=size, BLOCK_G=block_g, BLOCK_D=block_d, GATE_FIRST=gate_first,
        num_warps=min(8, max(2, block_d // 256)),
    )  # fmt: skip
    return out
