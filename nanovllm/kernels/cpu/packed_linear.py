"""Linear layers with weights in oneDNN's blocked layout, for processors on which that is fastest.

A plain weight is reordered inside each call, or read in an order that is slow for the CPU's matrix
kernels; a packed one is reordered once. `F.linear` is the twin.
"""

import torch

from nanovllm.kernels.cpu import processor


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this machine has kernels for packed weights of this type."""
    return weight.device.type == "cpu" and weight.dtype in processor.products().packed


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
