"""The CPU's compiled sampler against its twin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm.kernels.cpu.sample import sample
from nanovllm.kernels.plain.no_token import NO_TOKEN
from nanovllm.kernels.plain.noise import GOLDEN, log_exponential
from nanovllm.kernels.plain.sample import first_max
from nanovllm.kernels.table import PLAIN

pytestmark = pytest.mark.usefixtures("one_thread", "compiler")

INF, NAN = float("inf"), float("nan")
TIE = 1e-5  # hashes are equal; logarithms and sums of scores differ in their last bits
TEMPERATURES = [0.0, 0.0, 0.01, 0.7, 1.0, 2.0, 100.0]
PIECE = 1 << 14


def make(
    rows: int, vocab_size: int, dtype: torch.dtype, num_values: int = 0, seed: int = 0
) -> torch.Tensor:
    """Strided logits; with `num_values`, that many different ones."""
    torch.manual_seed(seed)
    wide = torch.randn(rows, vocab_size + 3) * 3
    if num_values:
        wide = torch.randint_like(wide, num_values)
    return wide.to(dtype)[:, 3:]


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(st.sampled_from(TEMPERATURES), min_size=1, max_size=8),
    st.sampled_from([1, 5, 63, 511, 512, 513, 4097, PIECE, PIECE + 1, 40000]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0, 0, 1, 3]),
    st.integers(0, 2**31),
)
def test_the_sampler_draws_its_twins_tokens(
    temperatures: list[float], vocab_size: int, dtype: torch.dtype, num_values: int, seed: int
) -> None:
    """Greedy rows are equal; in others a token may lose to the twin's by TIE."""
    logits = make(len(temperatures), vocab_size, dtype, num_values, seed)
    keys = torch.randint(-(2**63), 2**63 - 1, (len(temperatures),))
    heat = torch.tensor(temperatures)
    tokens, twin = sample(logits, heat, keys), PLAIN.sample(logits, heat, keys)
    assert tokens.dtype == torch.long and tokens.shape == twin.shape
    ids = torch.arange(vocab_size, dtype=torch.int32).mul_(GOLDEN)
    for row in (tokens != twin).nonzero()[:, 0].tolist():
        assert temperatures[row] > 0, "a greedy row is not its first maximum"
        times = log_exponential(keys[row : row + 1], ids)[0]
        scores = logits[row].float() - heat[row] * times
        lost = float(scores[twin[row]] - scores[tokens[row]])
        assert abs(lost) <= TIE * max(1, temperatures[row])
    assert torch.equal(sample(logits, None, None), first_max(logits))
    flipped = sample(logits.flip(0), heat.flip(0), keys.flip(0)).flip(0)
    assert torch.equal(flipped, tokens), "a draw depends on its neighbours"


def test_ties_go_to_the_first_token() -> None:
    """Within a chunk, in two chunks, and in two threads' pieces."""
    logits = torch.zeros(4, 2 * PIECE)
    pairs = [(3, 9), (5, 600), (700, PIECE + 1), (PIECE, 2 * PIECE - 1)]
    for row, (first, second) in enumerate(pairs):
        logits[row, [first, second]] = 7.0
    assert sample(logits, None, None).tolist() == [first for first, _ in pairs]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1e4])
@pytest.mark.parametrize("token", [0, 3, PIECE + 5])
def test_infinite_logits_win_or_lose(token: int, temperature: float) -> None:
    logits = make(3, PIECE + 6, torch.float32)
    logits[0, token] = INF
    logits[1] = -INF
    logits[1, token] = -5.0
    heat, keys = torch.full((3,), temperature), torch.tensor([1, 2**40, -7])
    assert sample(logits, heat, keys)[:2].tolist() == [token] * 2


@pytest.mark.parametrize(
    "values", [(-INF,), (NAN,), (NAN, -INF), (NAN, 1.0), (NAN, INF), (INF,), (INF, 1.0, -INF)]
)
@pytest.mark.parametrize("vocab_size", [1, 5, PIECE + 1])
def test_rows_without_a_largest_logit_give_no_token(
    vocab_size: int, values: tuple[float, ...]
) -> None:
    logits = torch.tensor(values).repeat(vocab_size)[:vocab_size].expand(2, -1)
    is_largest = int((logits[0] == INF).sum()) == 1 and not bool(logits.isnan().any())
    for heat in (None, torch.tensor([0.0, 1.0])):
        tokens = sample(logits, heat, torch.tensor([5, 6]))
        assert tokens.tolist() == [0 if is_largest else NO_TOKEN] * 2


def test_arrival_times_equal_their_definition() -> None:
    """Two tokens race at the logits that make them tie: there the winner changes."""
    keys = torch.randint(-(2**63), 2**63 - 1, (2000,))
    times = log_exponential(keys, torch.arange(2, dtype=torch.int32).mul_(GOLDEN))
    ones, gap = torch.ones(len(keys)), times[:, 1] - times[:, 0]
    for nudge, winner in ((-2 * TIE, 0), (2 * TIE, 1)):
        logits = torch.stack([torch.zeros(len(keys)), gap + nudge], dim=1)
        assert bool((sample(logits, ones, keys) == winner).all())
