"""GPTQ: rounds a matrix one input after the other, and lets later inputs make up for the error.

After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022: the inputs with the largest squares come first, and scales are chosen before.
"""

import torch

from nanovllm.quantize.codes import Codes, best_scales, nearest

BLOCK = 128  # inputs whose errors reach the inputs after the block in one product
DAMPING = 0.01  # of the mean square of inputs, added to each
NOT_FINITE = "the inputs of a layer are not finite, or too large, for this text"


def gptq(
    weight: torch.Tensor, products: torch.Tensor, bits: int, group: int, dtype: torch.dtype
) -> Codes:
    """Codes of a float32 matrix [N, K] whose outputs err the least for the text's inputs.

    `products` [K, K] are sums of the products of pairs of inputs, or their means: a common factor
    changes nothing. Scales of `dtype` weigh errors by the inputs' squares. Peak memory: four
    float32 matrices of each of the two sizes.
    """
    squares = products.diagonal()
    scales = best_scales(weight, squares, bits, group, dtype)
    order = squares.argsort(descending=True, stable=True)
    factors = _factors(products[order][:, order])
    left = weight.t()[order].contiguous()  # what is still to be rounded: [K, N]
    each = scales.t()[order // group]
    for first in range(0, len(left), BLOCK):
        last = min(first + BLOCK, len(left))
        errors = _round_block(
            left[first:last], each[first:last], factors[first:last, first:last], bits
        )
        left[last:].addmm_(factors[first:last, last:].t(), errors, alpha=-1)
    codes = torch.empty_like(left, dtype=torch.int8)
    codes[order] = left.to(torch.int8)
    return Codes(codes.t().contiguous(), scales.to(dtype), bits)


def _round_block(
    left: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor, bits: int
) -> torch.Tensor:
    """Replace the weights of a block of inputs by codes; returns their errors, as inputs weigh.

    An input's error is spread over the inputs of the block that follow.
    """
    errors = torch.empty_like(left)
    for i, (row, scale) in enumerate(zip(left, scales, strict=True)):
        codes = nearest(row, scale, bits)
        torch.sub(row, codes * scale, out=errors[i]).div_(factors[i, i])
        left[i + 1 :].addr_(factors[i, i + 1 :], errors[i], alpha=-1)
        row.copy_(codes)
    return errors


def _factors(products: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the products, with damping.

    Inputs that are always zero, or that others determine, have products without an inverse. There
    is more damping if rounding makes the products no squares.
    """
    mean, damping = products.diagonal().mean(), DAMPING
    if not bool(mean.isfinite()):
        raise ValueError(NOT_FINITE)
    if not bool(mean):
        return torch.eye(len(products), device=products.device)
    for _ in range(4):
        damped = products.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        damping *= 10
    raise ValueError(NOT_FINITE)
