"""Which layers of a model have weights of one form, for which the same kernels are compiled."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from nanovllm.engine.start.forms import form_of
from nanovllm.formats.format import DenseMatrix
from nanovllm.formats.layouts import JoinedMatrix, KernelMatrix
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.linear import ReplicatedLinear

CODES = QuantizedMatrix(torch.zeros(16, 32, dtype=torch.int8), torch.ones(16, 1), None, (1, 32), 8)
DENSE = torch.zeros(16, 32)
MATRICES = [
    lambda: DenseMatrix(DENSE.clone()),
    lambda: DenseMatrix(DENSE.bfloat16()),
    lambda: DenseMatrix(torch.zeros(16, 48)),
    lambda: KernelMatrix(CODES, PLAIN),
    lambda: KernelMatrix(replace(CODES, rounds_inputs=True), PLAIN),
    lambda: KernelMatrix(replace(CODES, zeros=torch.zeros(16, 1, dtype=torch.int8)), PLAIN),
    lambda: JoinedMatrix([DenseMatrix(DENSE), KernelMatrix(CODES, PLAIN)], [16, 16]),
    lambda: JoinedMatrix([KernelMatrix(CODES, PLAIN), DenseMatrix(DENSE)], [16, 16]),
]  # fmt: skip


class Part(nn.Module):
    """A layer whose name and number do not count."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__()
        self.name, self.number, self.proj = name, number, ReplicatedLinear(32, 16, False)


@pytest.mark.parametrize("make", MATRICES)
def test_weights_of_one_form_are_equal_and_all_others_differ(
    make: Callable[[], object],
) -> None:
    layers = [Part(f"layer {i}", i) for i in range(1 + len(MATRICES))]
    for layer, other in zip(layers, [make, *MATRICES], strict=True):
        layer.proj.matrix = other()  # type: ignore[assignment]
    first, *others = map(form_of, layers)
    assert others.count(first) == 1
    assert others.index(first) == MATRICES.index(make)
    hash(first)
