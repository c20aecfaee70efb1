"""Sums in Triton's interpreter that depend on shapes as much as those of a GPU do, and no more.

Products add groups of 16 numbers in order. The order of other sums follows the tile's shape.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


def product(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """Add groups of 16 products in order, each of them exactly."""
    from triton.runtime.interpreter import TensorHandle

    x, y, sums = a.data.astype(np.float64), b.data.astype(np.float64), d.data
    for k in range(0, x.shape[-1], 16):
        sums = (sums + x[..., k : k + 16] @ y[..., k : k + 16, :]).astype(np.float32)
    return TensorHandle(sums, d.dtype.scalar)


def sum_by_shape(self: Any, x: Any) -> Any:
    """Integers have no order. Other numbers are added in one that depends on the other axes."""
    data = x.handle.data
    if not np.issubdtype(data.dtype, np.floating):
        return self.to_tensor(np.sum(data, axis=self.axis, dtype=data.dtype), x.dtype)
    rolled = np.roll(data, data.size // data.shape[self.axis] // 3, axis=self.axis)
    sums = np.cumsum(rolled, axis=self.axis, dtype=data.dtype)
    return self.to_tensor(np.take(sums, -1, axis=self.axis), x.dtype)


@pytest.fixture(scope="module")
def sums_of_a_gpu(kernel_device: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if kernel_device == "cpu":
            from triton.runtime import interpreter

            patch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
            patch.setattr(interpreter.ReduceOps, "sum", sum_by_shape)
        yield
