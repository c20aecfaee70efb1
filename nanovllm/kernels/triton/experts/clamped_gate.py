"""The clamped gate of experts with biases, inside other kernels: see `ExpertBiases`."""

from typing import NamedTuple

import triton
import triton.language as tl


class Gate(NamedTuple):
    """What a product with a gate has."""

    alpha: float
    limit: float
    per_row: int  # pairs of a token


@triton.jit
def clamped_gate(gate, up, alpha, limit):  # type: ignore[no-untyped-def]
    """As `ExpertBiases` defines, in float32."""
    gate = tl.where(gate > limit, limit, gate)  # as in PyTorch, NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
