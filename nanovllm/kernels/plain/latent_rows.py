"""From the projections of latent attention to the ends of its queries, and to rows of its cache.

T tokens, H query heads, K numbers of a latent, R rotated ones.
"""

import torch

from nanovllm.kernels.plain.norm_rope_store import Rope, rotate
from nanovllm.kernels.plain.rms_norm import rms_norm


def latent_rows(
    ends: torch.Tensor, row: torch.Tensor, weight: torch.Tensor, eps: float, rope: Rope,
    interleaved: bool, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Rows [T, 1, K + R] for the cache, of projections `row` [T, K + R].

    The first K numbers are normalised with `weight` [K], and the others are rotated. The `ends`
    [T, H, R] of queries are rotated as well, and written to `out` [T, H, R]. The pairs of a
    rotation are (i, i + R / 2), or neighbours if they are `interleaved`; the results have the first
    ones of all pairs before the second ones.
    """
    latent, key = row.tensor_split([len(weight)], dim=1)
    heads = torch.cat([ends, key[:, None]], 1)
    if interleaved:
        heads = torch.cat([heads[..., ::2], heads[..., 1::2]], -1)
    heads = rotate(heads, rope)
    out.copy_(heads[:, :-1])
    normed = rms_norm(latent.contiguous(), weight, eps)
    return torch.cat([normed[:, None], heads[:, -1:]], -1)
