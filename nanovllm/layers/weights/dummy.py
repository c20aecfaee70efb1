"""Random tensors in place of a checkpoint's: weights with a deviation of about 0.02."""

import torch

from nanovllm.layers.layer import DUMMY_DEVIATION
from nanovllm.layers.weights.format import WeightFormat
from nanovllm.layers.weights.stored import StoredTensor

FP8_CODES = 64.0  # the deviation of random codes; those of integers are evenly distributed


def dummy_tensor(
    name: str, param: StoredTensor, weight_format: WeightFormat, generator: torch.Generator
) -> torch.Tensor:
    """Values for the whole tensor `name` of a layer's format, of which `param` is a rank's part.

    Scales are constant; columns that a tensor assigns to groups are in order.
    """
    held, stored = param.held, param.stored
    shape = stored.shape((sum(held.sizes), held.in_features))
    stack = param.shape[: param.dim() - len(stored.axes) - (stored.rows_dim is None)]
    device, scheme = generator.device, weight_format.scheme
    dtype = stored.dtype or param.dtype
    values = torch.empty((*stack, *shape), device=device, dtype=torch.float32)
    if name.endswith("shape"):
        values.copy_(torch.tensor([sum(held.sizes), held.in_features]))
    elif name.endswith("g_idx") and scheme is not None:
        values.copy_(
            torch.arange(held.in_features, device=device) // (scheme.columns or held.in_features)
        )
    elif "scale" in name and scheme is not None:
        deviation = FP8_CODES if scheme.storage == "fp8" else (1 << scheme.bits) / 12**0.5
        values.fill_(1.0 if "input" in name else DUMMY_DEVIATION / deviation)
    elif dtype.is_floating_point:
        is_codes = dtype == torch.float8_e4m3fn
        values.normal_(0.0, FP8_CODES if is_codes else DUMMY_DEVIATION, generator=generator)
    else:
        info = torch.iinfo(dtype)
        return torch.randint(
            info.min, info.max + 1, values.shape, dtype=dtype, device=device, generator=generator
        )
    return values.to(dtype)
