"""Triton's kernel between the projections of latent attention and its cache, and its twin."""

import pytest
import torch

from nanovllm.kernels.table import PLAIN
from nanovllm.kernels.triton.table import triton_kernels

pytestmark = pytest.mark.usefixtures("one_thread", "kernel_device")
TRITON = triton_kernels()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "dtype"),
    [(16, 24, 8, torch.float32), (19, 40, 6, torch.bfloat16), (1, 64, 64, torch.float16)],
)
def test_rows_are_those_of_the_twin(
    heads: int, rank: int, rotated: int, interleaved: bool, dtype: torch.dtype, kernel_device: str
) -> None:
    """Of views into projections, to views of queries whose other parts do not change."""
    torch.manual_seed(0)
    queries = torch.randn(5, heads, 10 + rotated).to(kernel_device, dtype)
    row = torch.randn(5, rank + rotated).to(kernel_device, dtype)
    weight = torch.randn(rank).to(kernel_device, dtype)
    angles = torch.randn(5, rotated // 2, device=kernel_device)
    rope = torch.stack([angles.cos(), angles.sin()], 1).unsqueeze(2).unbind(1)
    rows, wholes = [], []
    for kernels in (TRITON, PLAIN):
        whole = torch.full((6, heads, rank + rotated), 7.0).to(kernel_device, dtype)
        inputs = queries[..., 10:], row, weight, 1e-6, rope, interleaved, whole[:5, :, rank:]
        rows.append(kernels.latent_rows(*inputs))
        wholes.append(whole)
    limits = dict(rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(*rows, **limits)
    torch.testing.assert_close(*wholes, **limits)
    assert (wholes[0][..., :rank] == 7).all() and (wholes[0][5] == 7).all()
    assert rows[0].shape == (5, 1, rank + rotated)


def test_neighbours_are_rotated_as_complex_numbers() -> None:
    ends, angle = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[[0.3, 1.1]]])
    row, out = torch.tensor([[3.0, -4.0, *ends.flatten()]]), torch.empty(1, 1, 4)
    rope = angle.cos(), angle.sin()
    rows = PLAIN.latent_rows(ends, row, torch.tensor([1.0, 2.0]), 0.0, rope, True, out)
    turned = torch.view_as_complex(ends.view(2, 2)) * torch.polar(torch.ones(2), angle.flatten())
    expected = torch.cat([turned.real, turned.imag])
    torch.testing.assert_close(out.flatten(), expected)
    rms = 12.5**0.5
    torch.testing.assert_close(
        rows.flatten(), torch.tensor([3 / rms, -8 / rms, *expected.tolist()])
    )
