"""Layers with several streams of hidden states in one order: rows alone and among others.

The interpreter's sums depend on shapes as those of a GPU do (`gpu_sums`).
"""

from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch
from gpu_sums import sums_of_a_gpu  # noqa: F401  a fixture
from test_ordered_products import (
    assert_alone_as_among_others,
    kernels,  # noqa: F401  a fixture
    random,
)
from torch import nn

from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.altup import AltUp, Laurel
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.ranks import ALONE
from nanovllm.layers.sizes import AltUpSizes
from nanovllm.layers.sparse_gelu import SparseGeluAndMul
from nanovllm.models.altup_decoder import alike

pytestmark = pytest.mark.usefixtures("one_thread", "sums_of_a_gpu")

BF16 = torch.bfloat16
MAKE = Build(ALONE, PLAIN_FORMATS, 8)
TOKENS, HIDDEN, STREAMS = 20, 1100, 3  # more numbers than a program has at a time
Module = TypeVar("Module", bound=nn.Module)


def bound(layer: Module, to: Kernels, device: str) -> Module:
    """The layer with random weights and these kernels."""
    for seed, param in enumerate(layer.parameters()):
        param.data = random(*param.shape, device=device, seed=seed) * 0.1
    for module in list(layer.modules()):
        if isinstance(module, Layer):
            module.bind(SimpleNamespace(kernels=to))  # type: ignore[arg-type]
    return layer


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_sums_of_rows_and_of_streams_do_not_depend_on_others(
    dtype: torch.dtype,
    kernels: Kernels,  # noqa: F811
    kernel_device: str,
) -> None:
    x = random(TOKENS, 2500, device=kernel_device, dtype=dtype)
    streams = random(STREAMS, TOKENS, HIDDEN, device=kernel_device, dtype=dtype, seed=1)
    coefs = random(TOKENS, STREAMS, STREAMS, device=kernel_device, dtype=dtype, seed=2)

    def out(rows: int) -> tuple[torch.Tensor, ...]:
        sums = kernels.row_sums(x[:rows])
        mixed = kernels.mix_streams(coefs[:rows], streams[:, :rows])
        return sums, mixed.transpose(0, 1)

    assert_alone_as_among_others(out, [1, 7, TOKENS])
    sums, mixed = out(TOKENS)
    torch.testing.assert_close(sums, PLAIN.row_sums(x), rtol=1e-4, atol=1e-3)
    expected = PLAIN.mix_streams(coefs.float(), streams.float()).transpose(0, 1).to(dtype)
    torch.testing.assert_close(mixed, expected, rtol=2**-7, atol=2**-7)


def test_streams_are_predicted_and_corrected_in_one_order(
    kernels: Kernels,  # noqa: F811
    kernel_device: str,
) -> None:
    sizes = AltUpSizes(STREAMS, 1, True)
    ordered, plain = (
        bound(AltUp(MAKE, HIDDEN, 1e-6, sizes), each, kernel_device) for each in (kernels, PLAIN)
    )
    laurel = bound(Laurel(MAKE, HIDDEN, 1e-6, 24), kernels, kernel_device)
    streams = random(STREAMS, TOKENS, HIDDEN, device=kernel_device)

    def out(rows: int, layer: AltUp = ordered) -> tuple[torch.Tensor, ...]:
        predicted = layer.predict(streams[:, :rows])
        computed = streams[0, :rows] * 2
        corrected = layer.correct(predicted, computed)
        return predicted.transpose(0, 1), corrected.transpose(0, 1), laurel(computed)

    assert_alone_as_among_others(out, [1, 7, TOKENS])
    for one, other in zip(out(TOKENS), out(TOKENS, plain), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-5, atol=2**-5)


def test_magnitudes_and_cuts_of_gates_have_one_order(
    kernels: Kernels,  # noqa: F811
    kernel_device: str,
) -> None:
    x, like = (random(TOKENS, HIDDEN, device=kernel_device, seed=seed) for seed in (0, 1))
    like = like * 3
    gates = random(TOKENS, 2 * HIDDEN, device=kernel_device, seed=2)
    sparse = bound(SparseGeluAndMul(0.9, HIDDEN), kernels, kernel_device)

    def out(rows: int) -> tuple[torch.Tensor, ...]:
        return alike(x[:rows], like[:rows], kernels), sparse(gates[:rows])

    assert_alone_as_among_others(out, [1, 7, TOKENS])
    by_default = alike(x, like, PLAIN), SparseGeluAndMul(0.9, HIDDEN)(gates)
    for one, other in zip(out(TOKENS), by_default, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)
    magnitudes = [each.float().square().mean(1) for each in (out(TOKENS)[0], like)]
    torch.testing.assert_close(*magnitudes, rtol=2e-2, atol=0.0)
    assert bool((out(TOKENS)[1] == 0).float().mean() > 0.8)
