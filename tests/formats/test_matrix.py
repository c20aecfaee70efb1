"""The forms in which layers multiply by weights."""

from typing import Any

import pytest
import torch

from nanovllm.formats.layouts import JoinedMatrix
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.linear import matrix_of

pytestmark = pytest.mark.usefixtures("one_thread")


def codes(num_rows: int, value: int) -> QuantizedMatrix:
    """A quantized weight that is `value` everywhere."""
    matrix = torch.full((num_rows, 64), value, dtype=torch.int8)
    return QuantizedMatrix(matrix, torch.ones(num_rows, 1), None, (1, 64), 8)


@pytest.mark.parametrize("kernels", [PLAIN, cpu_kernels()], ids=lambda kernels: kernels.name)
def test_joined_matrices_round_the_sum_with_the_bias_once(kernels: Kernels) -> None:
    """As each does. 257 - 1 is 256 in bfloat16, but 257 rounded, and less one, is 255."""
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = 256, 1
    weights: list[Any] = [codes(2, 1), torch.ones(5, 64, dtype=torch.bfloat16), codes(1, 2)]
    matrix = matrix_of(weights, kernels)
    assert isinstance(matrix, JoinedMatrix)
    bias = torch.tensor([-1.0] * 7 + [-2.0]).bfloat16()
    parts = zip(weights, bias.split([2, 5, 1]), strict=True)
    expected = torch.cat([matrix_of(w, kernels).linear(x, part) for w, part in parts], dim=1)
    assert torch.equal(matrix.linear(x, bias), expected)
    out = torch.empty(3, 8, dtype=torch.bfloat16)
    assert matrix.linear(x, bias, out) is out and torch.equal(out, expected)
    assert matrix.linear(x).tolist() == [[256.0] * 7 + [512.0]] * 3
