"""Draws from the tokens that min_p, top_k and top_p keep, against a race among those of `cut`."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from conftest import sampler_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples
from torch.profiler import ProfilerActivity

from nanovllm import SamplingParams
from nanovllm.engine.run import narrowing
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.engine.start.warm_up import warmup_filters
from nanovllm.kernels.plain import draw as draw_module
from nanovllm.kernels.plain.draw import Cuts, cut
from nanovllm.kernels.plain.no_token import NO_TOKEN
from nanovllm.kernels.plain.noise import log_exponential
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.filters import Filters
from nanovllm.layers.sampler import Sampler

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")
GAP = 1e-5  # tokens closer to a border than this may be on either side in float32

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "top_k": st.sampled_from([-1, -1, 1, 2, 5, 30, 300, 1999, 10**6]),
            "top_p": st.sampled_from([1.0, 1.0, 1e-46, 0.01, 0.3, 0.5, 0.9, 0.999, 0.99999999]),
            "min_p": st.sampled_from([0.0, 0.0, 1e-40, 0.01, 0.11, 0.7, 1.0]),
            "temperature": st.sampled_from([1e-38, 0.3, 1.0, 1.0, 4.0, 1e4]),
        }
    ),
    min_size=1,
    max_size=6,
)
SIZES = st.sampled_from([1, 5, 64, 200, 640, 2000, 6400])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
VALUES = st.sampled_from([-INF, -3.0, -0.0, 0.0, 0.25, 1.0, 1.0, 2.5, 6.0, INF])


def tokens_of(
    logits: torch.Tensor,
    rows: list[dict[str, Any]],
    seed: int = 0,
    nudge: float = 0.0,
    kernels: Kernels = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The draws of the kernel and of the twin, with min_p and top_p a little larger or smaller."""
    size, sampler = logits.shape[1], Sampler()
    sampler.kernels = kernels
    seqs = [
        Sequence([0], SamplingParams(**dict(seed=seed + i) | row)) for i, row in enumerate(rows)
    ]
    inputs = sampler_inputs(seqs, size, logits.device)
    assert inputs.temperatures is not None and inputs.keys is not None
    tokens = sampler(logits, inputs.temperatures, inputs.keys, inputs.filters)
    left = logits.to(torch.float32, copy=True)
    for part in inputs.filters:
        assert part.cuts is not None and not part.writes
        cuts = replace(part.cuts)
        if cuts.min_p is not None:
            cuts.min_p = cuts.min_p * (1 + nudge)
        if cuts.top_p is not None:
            cuts.top_p = torch.where(cuts.top_p < 1, cuts.top_p.double() * (1 + nudge), 1.0)
        left[part.rows] = cut(logits[part.rows], inputs.temperatures[part.rows], cuts)
    expected = PLAIN.sample(left, inputs.temperatures, inputs.keys)
    whole = PLAIN.sample(logits, None, None)  # cuts make no infinite logit the only one
    return tokens, expected.where(whole != NO_TOKEN, NO_TOKEN)


def assert_as_its_twin(
    tokens: torch.Tensor, expected: torch.Tensor, logits: torch.Tensor,
    rows: list[dict[str, Any]], seed: int,
) -> None:  # fmt: skip
    """Equal, except where a border is so close that rounding decides."""
    if not torch.equal(tokens, expected):
        others = [tokens_of(logits, rows, seed, nudge)[1] for nudge in (GAP, -GAP)]
        right = [tokens == other for other in (expected, *others)]
        assert bool(torch.stack(right).any(dim=0).all()), (tokens, expected, rows)


def some_logits(
    num_rows: int, size: int, dtype: torch.dtype, distinct: list[float], spread: float
) -> torch.Tensor:
    """Normal ones, or some of a few values."""
    logits = torch.randn(num_rows, size) * spread
    if distinct:
        logits = torch.tensor(distinct)[torch.randint(len(distinct), logits.shape)]
    return logits.to(dtype)


@pytest.mark.slow
@settings(max_examples=examples(600), deadline=None)
@given(rows=ROWS, size=SIZES, dtype=DTYPES, distinct=st.lists(VALUES, max_size=6),
       spread=st.sampled_from([0.0, 0.1, 1.0, 4.0]), seed=st.integers(0, 2**31))  # fmt: skip
def test_a_draw_equals_its_twin(
    rows: list[dict[str, Any]], size: int, dtype: torch.dtype, distinct: list[float],
    spread: float, seed: int,
) -> None:  # fmt: skip
    """With ties, infinities, equal tokens, few tokens kept or nearly all; in any combination."""
    torch.manual_seed(seed)
    logits = some_logits(len(rows), size, dtype, distinct, spread)
    tokens, expected = tokens_of(logits, rows, seed)
    assert_as_its_twin(tokens, expected, logits, rows, seed)


@pytest.mark.slow
def test_rounding_decides_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,000 draws from a large vocabulary of distinct logits, almost none differs."""
    torch.manual_seed(0)
    choices = [
        dict(top_p=0.9), dict(top_p=0.2), dict(top_k=700), dict(top_k=40, top_p=0.95),
        dict(min_p=0.05), dict(min_p=0.001, top_p=0.8), dict(top_k=3000, top_p=0.5),
    ]  # fmt: skip
    rows = [dict(temperature=(0.5, 1.0, 2.0)[i % 3]) | choices[i % 7] for i in range(100)]
    differ = 0
    for seed in range(20):
        tokens, expected = tokens_of(torch.randn(100, 12_800) * 2, rows, 100 * seed)
        differ += int((tokens != expected).sum())
    assert differ <= 2


@settings(max_examples=examples(100), deadline=None)
@given(rows=ROWS, size=SIZES, dtype=DTYPES, num_values=st.sampled_from([0, 3, 50]),
       chunk=st.sampled_from([1, 700, 10_000]), seed=st.integers(0, 2**31))  # fmt: skip
def test_a_draw_does_not_depend_on_its_neighbours(
    rows: list[dict[str, Any]], size: int, dtype: torch.dtype, num_values: int, chunk: int,
    seed: int,
) -> None:  # fmt: skip
    """The same token alone, in another order, and with any rows drawn together."""
    torch.manual_seed(seed)
    logits = torch.randn(len(rows), size) * 2
    if num_values:
        logits = torch.randint(num_values, logits.shape) / 8
    logits = logits.to(dtype)
    tokens, _ = tokens_of(logits, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(draw_module.CHUNK_ELEMENTS, "cpu", chunk)
        assert torch.equal(tokens_of(logits, rows)[0], tokens)
        back = [dict(row, seed=i) for i, row in enumerate(rows)][::-1]
        assert torch.equal(tokens_of(logits.flip(0), back)[0], tokens.flip(0))
    for i, row in enumerate(rows):
        assert torch.equal(tokens_of(logits[i : i + 1], [row], seed=i)[0], tokens[i : i + 1])


def test_a_row_without_top_p_is_not_filtered_with_its_neighbour() -> None:
    """A token too light to change a sum of weights is kept in a row without top_p."""
    logits = torch.tensor([[0.0, -50.0], [0.0, -50.0]])
    cuts = Cuts(top_p=torch.tensor([[0.99], [1.0]]))
    assert cut(logits, torch.ones(2), cuts).tolist() == [[0.0, -INF], [0.0, -50.0]]


@pytest.mark.parametrize(
    "values", [(-INF,), (NAN,), (NAN, -INF), (NAN, 1.0), (NAN, INF), (INF,), (INF, 1.0, -INF)]
)
@pytest.mark.parametrize("size", [5, 200, 1280])
def test_a_row_without_a_largest_logit_gives_no_token_and_changes_no_other(
    values: tuple[float, ...], size: int
) -> None:
    rows = [dict(top_p=0.5), dict(top_k=2), dict(top_k=150, top_p=0.9), dict(min_p=0.5),
            dict(top_k=200), dict(min_p=0.1, top_p=0.8)] * 2  # fmt: skip
    torch.manual_seed(0)
    logits = torch.randn(len(rows), size)
    expected, _ = tokens_of(logits, rows)
    logits[::2] = torch.tensor(values).repeat(size)[:size]
    tokens, _ = tokens_of(logits, rows)
    assert torch.equal(tokens[1::2], expected[1::2])
    is_largest = int((logits[0] == INF).sum()) == 1 and not bool(logits[0].isnan().any())
    assert tokens[::2].tolist() == [0 if is_largest else NO_TOKEN] * (len(rows) // 2)


def test_candidates_race_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small top_k races its candidates alone: no other token's time is computed."""
    sizes = []

    def recording(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        sizes.append(ids.shape[-1])
        return log_exponential(keys, ids)

    monkeypatch.setattr(draw_module, "log_exponential", recording)
    logits = torch.randn(3, 12_800)
    for row, raced in [
        (dict(top_k=50), 50), (dict(top_k=50, top_p=0.9, min_p=0.1), 50), (dict(top_k=101), 12_800),
        (dict(top_k=101, top_p=0.9), 101), (dict(top_p=0.9), 12_800), (dict(top_k=99999), 12_800),
    ]:  # fmt: skip
        sizes.clear()
        tokens_of(logits, [row] * 3)
        assert set(sizes) == {raced}, row


def peak_bytes(logits: torch.Tensor, filters: list[Filters]) -> int:
    """The sampler's peak memory."""
    keys = torch.arange(len(logits))
    with torch.profiler.profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiler:
        Sampler()(logits, torch.ones(len(logits)), keys, filters)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(changes))


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 6, 8])
def test_the_warm_up_takes_as_much_memory_as_any_request(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any filter, five rows at a time: all rows or most, other tokens, other copies."""
    monkeypatch.setitem(narrowing.NARROWED_LOGITS, "cpu", 50_000)
    monkeypatch.setitem(draw_module.CHUNK_ELEMENTS, "cpu", 1 << 30)
    torch.manual_seed(0)
    logits = torch.randn(num_rows, 10_000).bfloat16()
    warm = peak_bytes(torch.zeros_like(logits), warmup_filters(num_rows, 10_000, "cpu"))
    assert num_rows < 5 or 45 < warm / 50_000 < 55, "NARROWED_LOGITS says another number"
    for fields in (
        dict(top_p=0.9), dict(top_p=0.01), dict(min_p=0.1), dict(top_k=50), dict(top_k=5000),
        dict(min_p=0.1, top_p=0.1), dict(top_k=5000, top_p=0.9), dict(allowed_token_ids=[1, 2]),
        dict(top_k=9999, top_p=0.1, min_p=0.5), dict(top_p=0.5, presence_penalty=1.0),
        dict(top_k=9999, top_p=0.1, logit_bias={3: 1.0}), dict(repetition_penalty=2.0),
    ):  # fmt: skip
        for number in range(1, num_rows + 1):
            seqs = [Sequence([0], SamplingParams(**fields)) for _ in range(number)]
            filters = sampler_inputs(seqs, 10_000).filters
            assert peak_bytes(logits, filters) <= 1.01 * warm, (fields, number)
            for part in filters:
                part.masks = torch.full((len(part.rows), 313), -1, dtype=torch.int32)
            assert peak_bytes(logits, filters) <= 1.01 * warm, (fields, number, "masks")
            masked = [Filters(part.rows, masks=part.masks) for part in filters]
            assert peak_bytes(logits, masked) <= 1.01 * warm, (number, "masks alone")
