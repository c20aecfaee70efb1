"""The Triton draw against its twin, which test_plain_draw.py tests; on a device or interpreted.

It costs more than 20 seconds: kernels are interpreted, with vocabularies of usual sizes.
"""

from typing import Any

import pytest
import torch
from changed_kernels import changed
from conftest import kernel_settings, sampler_inputs
from hypothesis import example, given
from hypothesis import strategies as st
from test_plain_draw import (
    DTYPES,
    INF,
    NAN,
    ROWS,
    VALUES,
    assert_as_its_twin,
    some_logits,
    tokens_of,
)

from nanovllm import SamplingParams
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.plain.no_token import NO_TOKEN
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.sampler import Sampler

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("one_thread")

LANES = st.sampled_from([64, 512])
SIZES = st.sampled_from([1, 5, 64, 200, 640, 1300])


def kernels(lanes: int) -> Kernels:
    """Plain kernels, except the draw."""
    from nanovllm.kernels.triton.sampling import draw

    def with_lanes(*inputs: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draw, "LANES", lanes)
            patch.setattr(draw, "WARPS", max(1, lanes // 256))
            return draw.draw(*inputs)

    return changed(PLAIN, draw=with_lanes)


@pytest.mark.slow
@kernel_settings(24)
@given(rows=ROWS, size=SIZES, dtype=DTYPES, distinct=st.lists(VALUES, max_size=6),
       spread=st.sampled_from([0.0, 0.1, 1.0, 4.0]), lanes=LANES,
       seed=st.integers(0, 2**31))  # fmt: skip
@example([dict(top_k=300, top_p=0.5)] * 3, 2000, torch.float32, [], 4.0, 512, 0)
@example([dict(top_k=300, top_p=0.5)] * 3, 2000, torch.float32, [], 1.0, 64, 0)
@example([dict(top_k=30, top_p=0.9)] * 6, 200, torch.float32, [-3.0, -0.0, 0.0], 1.0, 64, 0)
@example([dict(top_k=2, top_p=0.53)] * 6, 640, torch.float32, [0.0, -0.1, -0.1], 1.0, 64, 0)
@example([dict(top_k=20, top_p=0.9)] * 6, 640, torch.float32, [-INF] * 9 + [1.0], 1.0, 64, 0)
@example([dict(top_p=1e-46)] * 2, 640, torch.float32, [-3.0, 1.0], 1.0, 64, 0)
@example([dict(top_k=1, top_p=0.9)] * 6, 5, torch.float32, [-INF, INF], 1.0, 64, 0)
def test_the_kernel_draws_its_twins_tokens(
    kernel_device: str, rows: list[dict[str, Any]], size: int, dtype: torch.dtype,
    distinct: list[float], spread: float, lanes: int, seed: int,
) -> None:  # fmt: skip
    """top_k with a bound from the lanes and without one, and with the search that top_p needs."""
    torch.manual_seed(seed)
    logits = some_logits(len(rows), size, dtype, distinct, spread).to(kernel_device)
    tokens, expected = tokens_of(logits, rows, seed, kernels=kernels(lanes))
    assert_as_its_twin(tokens, expected, logits, rows, seed)


@pytest.mark.slow
@kernel_settings(6)
@given(rows=ROWS, dtype=DTYPES, num_values=st.sampled_from([0, 3, 50]), seed=st.integers(0, 2**31))
def test_a_kernels_draw_does_not_depend_on_its_neighbours(
    kernel_device: str, rows: list[dict[str, Any]], dtype: torch.dtype, num_values: int, seed: int
) -> None:
    """Alone or in another order, in a row of a wider matrix: the same token."""
    torch.manual_seed(seed)
    wide = torch.randn(len(rows), 645) * 2
    if num_values:
        wide = torch.randint(num_values, wide.shape) / 8
    logits = wide.to(kernel_device, dtype)[:, 5:]
    ours = kernels(64)
    tokens, _ = tokens_of(logits, rows, kernels=ours)
    back = [dict(row, seed=i) for i, row in enumerate(rows)][::-1]
    assert torch.equal(tokens_of(logits.flip(0), back, kernels=ours)[0], tokens.flip(0))
    for i, row in enumerate(rows):
        alone, _ = tokens_of(logits[i : i + 1], [row], seed=i, kernels=ours)
        assert torch.equal(alone, tokens[i : i + 1])


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    "values", [(-INF,), (NAN,), (NAN, -INF), (NAN, 1.0), (NAN, INF), (INF,), (INF, 1.0, -INF)]
)
@pytest.mark.parametrize("size", [5, 200])
def test_a_row_without_a_largest_logit_gives_no_token_and_changes_no_other(
    kernel_device: str, values: tuple[float, ...], size: int
) -> None:
    rows = [dict(top_p=0.5), dict(top_k=2), dict(top_k=150, top_p=0.9), dict(min_p=0.5),
            dict(top_k=199, top_p=0.1), dict(min_p=0.1, top_p=0.8)] * 2  # fmt: skip
    torch.manual_seed(0)
    logits = torch.randn(len(rows), size).to(kernel_device)
    ours = kernels(64)
    expected, _ = tokens_of(logits, rows, kernels=ours)
    logits[::2] = torch.tensor(values).repeat(size)[:size].to(kernel_device)
    tokens, _ = tokens_of(logits, rows, kernels=ours)
    assert torch.equal(tokens[1::2], expected[1::2])
    is_largest = int((logits[0] == INF).sum()) == 1 and not bool(logits[0].isnan().any())
    assert tokens[::2].tolist() == [0 if is_largest else NO_TOKEN] * (len(rows) // 2)


CHOICES: list[dict[str, Any]] = [
    dict(top_p=0.9), dict(top_p=0.2), dict(top_k=700), dict(top_k=40, top_p=0.95),
    dict(min_p=0.05), dict(min_p=0.001, top_p=0.8), dict(top_k=9000), dict(top_k=6000, top_p=0.5),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_decides_rarely_in_a_large_batch(dtype: torch.dtype) -> None:
    """Of 2,048 draws at the engine's sizes, flat and peaked, almost none differs."""
    from nanovllm.kernels.triton.sampling.draw import draw

    torch.manual_seed(0)
    rows = [dict(temperature=(0.5, 1.0, 2.0)[i % 3]) | CHOICES[i % 8] for i in range(256)]
    differ = 0
    for seed in range(8):
        logits = (torch.randn(256, 151_936, device="cuda") * (1.0, 4.0)[seed % 2]).to(dtype)
        tokens, expected = tokens_of(logits, rows, 256 * seed, kernels=changed(PLAIN, draw=draw))
        differ += int((tokens != expected).sum())
    assert differ <= 4


@pytest.mark.cuda
def test_a_draw_does_not_sync() -> None:
    """With any filter: overlapping steps depend on it."""
    from nanovllm.kernels.triton.table import triton_kernels

    sampler = Sampler()
    sampler.kernels = triton_kernels()
    others = [dict(allowed_token_ids=[1, 2, 7]), dict(logit_bias={3: 1.0}), dict(min_tokens=9),
              dict(repetition_penalty=1.5), dict(presence_penalty=1.0, top_p=0.5), {}]  # fmt: skip
    seqs = [
        Sequence(list(range(i + 1)), SamplingParams(**fields))
        for i, fields in enumerate([*CHOICES, *others])
    ]
    logits = torch.randn(len(seqs), 20_000, device="cuda")
    for _ in range(2):  # the first time kernels are compiled, and memory is taken
        inputs = sampler_inputs(seqs, 20_000, logits.device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampler(logits, inputs.temperatures, inputs.keys, inputs.filters)
        finally:
            torch.cuda.set_sync_debug_mode("default")
