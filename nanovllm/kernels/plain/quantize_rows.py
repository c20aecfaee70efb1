"""Round rows to the type of a weight's codes, as kernels that round their inputs do."""

import torch
import torch.nn.functional as F

MOST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the largest code
LEAST = 1e-12  # the largest input of a row, at least: rows of zeros have a scale


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, group: int = 0, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, K] of x [T, K], and their scales: float32 [T, 1], or [T, ceil(K / group)].

    A scale is the largest input of its row, or of a group of the row, divided by the largest code.
    If `scale` is given, it applies to all rows, and inputs beyond the range of the codes saturate.
    """
    size = x.shape[1]
    width = group or size
    groups = F.pad(x.float(), (0, -size % width)).view(len(x), -(-size // width), width)
    if scale is None:
        scales = groups.abs().amax(dim=2).clamp(min=LEAST) * (1 / MOST[dtype])
    else:
        scales = scale.float().expand(groups.shape[:2]).contiguous()
    codes = (groups * (1 / scales)[:, :, None]).clamp(-MOST[dtype], MOST[dtype])
    codes = codes.round() if dtype == torch.int8 else codes
    return codes.flatten(1)[:, :size].to(dtype), scales
