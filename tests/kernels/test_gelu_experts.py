"""Experts that gelu gates: the same kernels, with the activation of other families."""

import pytest
import torch

from nanovllm.kernels.table import PLAIN
from nanovllm.layers.gelu_experts import gelu_and_mul

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "triton"])
def test_experts_may_have_another_activation(
    name: str, dtype: torch.dtype, kernel_device: str
) -> None:
    """Experts 1 to 4 of 6 are here; many pairs must not take the kernels that fuse silu."""
    from nanovllm.kernels.triton.experts import experts as triton

    torch.manual_seed(0)
    x, shares = torch.randn(200, 32), torch.rand(200, 2)
    gate_up, down = torch.randn(4, 32, 32) / 6, torch.randn(4, 32, 16) / 4
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(200)]) - 1
    x, gate_up, down = (tensor.to(kernel_device, dtype) for tensor in (x, gate_up, down))
    ids, shares = ids.to(kernel_device), shares.to(kernel_device)
    function = PLAIN.experts if name == "plain" else triton.experts
    out = function(x, gate_up, down, ids, shares, 6, activation=gelu_and_mul)
    expected = torch.zeros(200, 32, device=kernel_device)
    for expert in range(4):
        share = (shares * (ids == expert)).sum(1, keepdim=True)
        inner = gelu_and_mul(x.float() @ gate_up[expert].float().t())
        expected += share * (inner @ down[expert].float().t())
    error = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out.float(), expected, rtol=error, atol=error)
