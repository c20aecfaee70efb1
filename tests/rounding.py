"""How far from exact a right result may be."""

import torch


def linear_error(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> float:
    """The largest error as a share of the rounding error allowed: at most 1 for a right result.

    K products are summed in float32, with an error like the root of K; the product, and in bf16 its
    sum with the bias, are rounded to the type.
    """
    bias = torch.zeros(1) if bias is None else bias
    exact = x.double() @ weight.double().T + bias.double()
    terms = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    eps = torch.finfo(out.dtype).eps
    bound = terms * 2**-23 * (2 + x.shape[1] ** 0.5) + (exact.abs() + bias.double().abs()) * eps
    return float(((out.double() - exact).abs() / (bound + 1e-30)).max())
