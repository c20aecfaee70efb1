"""The choice of experts from a router's outputs, in one kernel.

It has what most routers with sigmoids have: a bias for the choice, and shares that are divided by
their sum and multiplied by a factor. Other choices are left to plain PyTorch.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.integers import next_power_of_2
from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.plain import choose_experts as plain
from nanovllm.kernels.triton.linear.sigmoid_and_mul import sigmoid


@triton.jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    outputs_ptr, bias_ptr, ids_ptr, shares_ptr, tiny, scale,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one row. Of equal scores, those of the first experts are chosen."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    outputs = tl.load(outputs_ptr + row * E + e, mask=e < E, other=-float("inf"))
    if SIGMOID:
        scores = sigmoid(outputs)
    else:
        scores = tl.exp(outputs - tl.max(outputs, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    left = scores
    if bias_ptr is not None:
        left += tl.load(bias_ptr + e, mask=e < E, other=0.0)
    left = tl.where(e < E, left, -float("inf"))
    ids = tl.zeros([BLOCK_K], tl.int64)
    shares = tl.zeros([BLOCK_K], tl.float32)
    for i in range(K):
        _, at = tl.max(left, axis=0, return_indices=True)
        at = tl.minimum(at, E - 1)  # any expert for rows that are not finite
        ids = tl.where(k == i, at.to(tl.int64), ids)
        shares = tl.where(k == i, tl.sum(tl.where(e == at, scores, 0.0), axis=0), shares)
        left = tl.where(e == at, -float("inf"), left)
    if NORMALIZED:
        shares = shares / (tl.sum(shares, axis=0) + tiny)
    tl.store(ids_ptr + row * K + k, ids, mask=k < K)
    tl.store(shares_ptr + row * K + k, shares * scale, mask=k < K)


def choose_experts(
    outputs: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the plain definition. Reads the outputs once, writes shares and ids."""
    num_rows, num_experts = outputs.shape
    if not num_rows or not computes(routing):
        return plain.choose_experts(outputs, routing, bias)
    shares = outputs.new_empty(num_rows, routing.per_token)
    ids = torch.empty_like(shares, dtype=torch.long)
    _choose_kernel[(num_rows,)](
        outputs.contiguous(), bias, ids, shares, routing.tiny, routing.scale,
        E=num_experts, K=routing.per_token, SIGMOID=routing.scores == "sigmoid",
        NORMALIZED=routing.normalized, BLOCK_E=next_power_of_2(num_experts),
        BLOCK_K=next_power_of_2(routing.per_token), num_warps=1 if num_experts <= 512 else 4,
    )  # fmt: skip
    return shares, ids


def computes(routing: Routing) -> bool:
    """Whether the kernel has all choices of a router: it knows these fields, and no other."""
    known = Routing(
        per_token=routing.per_token, normalized=routing.normalized, scores=routing.scores,
        has_bias=routing.has_bias, scale=routing.scale, tiny=routing.tiny,
    )  # fmt: skip
    return routing == known and routing.scores in ("softmax", "sigmoid")
