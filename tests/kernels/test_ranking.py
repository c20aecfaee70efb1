"""The most likely tokens, against a stable sort."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm.kernels.plain.ranking import most_likely

pytestmark = pytest.mark.usefixtures("one_thread")


@settings(max_examples=examples(300), deadline=None)
@given(
    size=st.sampled_from([5, 64, 640, 5000]), number=st.sampled_from([1, 3, 20, 64, 4999, 9999]),
    distinct=st.integers(1, 50), seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_the_most_likely_tokens_are_found(
    size: int, number: int, distinct: int, seed: int, dtype: torch.dtype
) -> None:
    """With few distinct values: of many equal tokens the first ones are found, in any block.

    Zeros of both signs are equal, and infinities are ordered.
    """
    rng = np.random.default_rng(seed)
    few = [*rng.normal(size=distinct), -np.inf, np.inf, 0.0, -0.0, 1e-30, -1e-30]
    x = torch.tensor(rng.choice(few, (3, size)), dtype=dtype)
    values, ids = most_likely(x, number)
    expected = x.sort(dim=1, descending=True, stable=True)
    assert values.dtype == dtype
    assert torch.equal(ids, expected.indices[:, :number])
    assert torch.equal(values, expected.values[:, :number])
