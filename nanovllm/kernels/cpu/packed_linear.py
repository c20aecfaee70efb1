"""Linear layers with weights in oneDNN's blocked layout: the CPU's fast path.

A plain weight is reordered inside each call, or read in an order that is slow for the CPU's matrix
kernels; a packed one is reordered once. `F.linear` is the twin.
"""

import torch


def cpu_computes(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix instructions for `dtype`, not only an emulation."""
    if dtype == torch.bfloat16:
        return _has_mkldnn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this machine has kernels for packed weights of this type."""
    return weight.device.type == "cpu" and _has_mkldnn() and cpu_computes(weight.dtype)


def _has_mkldnn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return an opaque copy of `weight` [out, in] for `packed_linear`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` for a weight from `pack`. Reads each weight once."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
