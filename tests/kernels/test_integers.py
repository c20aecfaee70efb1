"""Integers for launches of kernels, against Triton's own functions."""

import pytest

from nanovllm.kernels.integers import cdiv, next_power_of_2


def test_they_equal_tritons() -> None:
    triton = pytest.importorskip("triton")
    for n in range(1, 300):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert all(cdiv(n, by) == triton.cdiv(n, by) for by in (1, 7, 64, 299))
    assert cdiv(0, 5) == 0
