"""Masks of allowed tokens, and the draw from what they leave: kernels against their twins."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from conftest import kernel_settings
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.engine.run.filters.biases import Biases
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.plain.mask import mask
from nanovllm.kernels.plain.no_token import NO_TOKEN
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.layers.filters import Filters
from nanovllm.layers.sampler import Sampler

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 31, 32, 33, 63, 511, 1000, 4097, 20_001]
ROWS = torch.tensor([0, 2, 3, 5, 6])
NUM_ROWS = 7
UNTOUCHED = -9
Choices = tuple[torch.Tensor | None, torch.Tensor | None]


@pytest.fixture(scope="module", params=["C++", "Triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels that are compared with their twins, where they run."""
    if request.param == "C++":
        request.getfixturevalue("compiler")
        return cpu_kernels()
    pytest.importorskip("triton")
    request.getfixturevalue("kernel_device")
    from nanovllm.kernels.triton.table import triton_kernels

    return triton_kernels()


@pytest.fixture(scope="module")
def device(kernels: Kernels) -> str:
    return "cuda" if kernels.name == "Triton" and torch.cuda.is_available() else "cpu"


def bitmaps_of(allowed: torch.Tensor, strided: bool = False) -> torch.Tensor:
    """Bitmaps of booleans [R, V], by their definition; bits after the last token are set.

    Strided, they also have a word more than the vocabulary needs.
    """
    num_rows, vocab_size = allowed.shape
    width = -(-vocab_size // 32) + strided
    bits = torch.ones(num_rows, width * 32, dtype=torch.long)
    bits[:, :vocab_size] = allowed
    words = (bits.view(num_rows, width, 32) << torch.arange(32)).sum(-1)
    wide = torch.full((num_rows, width + 3 * strided), -1, dtype=torch.int32)
    wide[:, -width:] = torch.where(words >= 2**31, words - 2**32, words)
    return wide[:, -width:]


def some_allowed(vocab_size: int) -> torch.Tensor:
    """Booleans [R, V]: half of the tokens, a few, one, none, all."""
    allowed = torch.zeros(len(ROWS), vocab_size, dtype=torch.bool)
    allowed[0] = torch.rand(vocab_size) < 0.5
    allowed[1] = torch.rand(vocab_size) < 0.01
    allowed[2, vocab_size - 1] = True
    allowed[4] = True
    return allowed


def logits_of(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Strided, as a part of a larger vocabulary's are."""
    return (torch.randn(NUM_ROWS, vocab_size + 5) * 3).to(dtype)[:, 5:]


def choices() -> Iterator[Choices]:
    """Greedy and warm rows together, and greedy rows alone."""
    keys = torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,))
    yield torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0, 2.0, 1.0]), keys
    yield None, None


def moved(device: str, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Copies on the device, with the same strides."""
    return [x if x is None else _moved(device, x) for x in tensors]


def _moved(device: str, x: torch.Tensor) -> torch.Tensor:
    if x.dim() < 2:
        return x.to(device)
    wide = torch.zeros(len(x), x.stride(0), dtype=x.dtype, device=device)
    return wide[:, -x.shape[1] :].copy_(x)


def test_a_masked_row_draws_with_its_own_key() -> None:
    """And with its own temperature: those of the rows before it are of others."""
    logits, keys = torch.zeros(8, 64), torch.arange(8) << 40
    temperatures = torch.tensor([0.0] * 4 + [1.0] * 4)
    rows, bitmaps = torch.tensor([3, 5, 6]), torch.full((3, 2), -1, dtype=torch.int32)
    tokens = torch.full((8,), -1)
    PLAIN.sample_masked(logits, temperatures, keys, rows, bitmaps, tokens)
    expected = PLAIN.sample(logits, temperatures, keys)
    assert tokens[rows].tolist() == expected[rows].tolist() != expected[:3].tolist()


def test_a_bitmap_has_a_bit_for_each_token() -> None:
    """By hand: token 0 is the lowest bit of the first word, token 31 its sign, 32 the next word."""
    logits = torch.arange(35.0)[None].repeat(2, 1)
    mask(logits, torch.tensor([[1, 4], [-(2**31), -(2**31)]], dtype=torch.int32))
    left = [torch.isfinite(row).nonzero()[:, 0].tolist() for row in logits]
    assert left == [[0, 34], [31]]
    assert logits[0, 34] == 34.0


@kernel_settings(15)
@given(st.sampled_from(SIZES), st.booleans(), st.integers(0, 2**31))
def test_a_mask_equals_its_definition(
    kernels: Kernels, device: str, vocab_size: int, strided: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    allowed = some_allowed(vocab_size)
    logits = logits_of(vocab_size, torch.float32)[: len(ROWS)]
    expected = torch.where(allowed, logits, -torch.inf)
    bitmaps = bitmaps_of(allowed, strided)
    for function, place in ((PLAIN.mask, "cpu"), (kernels.mask, device)):
        got = logits.clone().to(place)
        wide = torch.zeros(len(ROWS), vocab_size + 3, device=place)
        wide[:, 3:] = got
        function(wide[:, 3:], bitmaps.to(place))
        assert torch.equal(wide[:, 3:].cpu(), expected)
        assert not wide[:, :3].any(), "what is beside the rows changed"


@kernel_settings(15)
@given(
    st.sampled_from(SIZES),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from([1, 30, 4096]),
    st.integers(0, 2**31),
)
def test_masked_rows_draw_as_from_a_masked_copy(
    kernels: Kernels,
    device: str,
    vocab_size: int,
    dtype: torch.dtype,
    strided: bool,
    programs: int,
    seed: int,
) -> None:
    """Bit for bit what the same kernels draw from a copy in float32; other rows are not written."""
    torch.manual_seed(seed)
    logits, allowed = logits_of(vocab_size, dtype), some_allowed(vocab_size)
    bitmaps = bitmaps_of(allowed, strided)
    copy = torch.where(allowed, logits[ROWS].float(), -torch.inf).to(device)
    for given_choices in choices():
        on = moved(device, logits, *given_choices, ROWS, bitmaps)
        of_rows = [None if x is None else x[ROWS].to(device) for x in given_choices]
        tokens = torch.full((NUM_ROWS,), UNTOUCHED, device=device)
        with in_pieces(kernels, programs):
            kernels.sample_masked(*on, tokens)
        assert torch.equal(tokens[ROWS], kernels.sample(copy, *of_rows))
        assert tokens[[1, 4]].tolist() == [UNTOUCHED] * 2
        drawn = tokens[ROWS].cpu()
        assert torch.equal(drawn == NO_TOKEN, ~allowed.any(dim=1))
        assert bool((allowed[torch.arange(len(ROWS)), drawn] | (drawn == NO_TOKEN)).all())
        assert drawn[3] == NO_TOKEN
        check_rows_left_out(kernels, on, tokens)
        check_rows_left_out(PLAIN, [logits, *given_choices, ROWS, bitmaps], None)
        if given_choices[0] is None:  # in warm rows, logarithms may differ in their last bits
            twin = torch.full((NUM_ROWS,), UNTOUCHED)
            PLAIN.sample_masked(logits, None, None, ROWS, bitmaps, twin)
            assert torch.equal(tokens.cpu(), twin)


def check_rows_left_out(
    kernels: Kernels, inputs: list[torch.Tensor | None], tokens: torch.Tensor | None
) -> None:
    """Rows of -1 write nothing, neither to the last element nor in front of the first."""
    device = inputs[0].device  # type: ignore[union-attr]
    for kept in (torch.tensor([1, 3]), torch.tensor([], dtype=torch.long)):
        rows = torch.full_like(ROWS, -1)
        rows[kept] = ROWS[kept]
        room = torch.full((NUM_ROWS + 1,), UNTOUCHED, device=device)
        kernels.sample_masked(*inputs[:3], rows.to(device), inputs[4], room[1:])
        written = torch.zeros(NUM_ROWS + 1, dtype=torch.bool)
        written[ROWS[kept] + 1] = True
        assert torch.equal(room.cpu() != UNTOUCHED, written)
        if tokens is not None:
            assert torch.equal(room[1:][ROWS[kept]], tokens[ROWS[kept]])


@contextmanager
def in_pieces(kernels: Kernels, programs: int) -> Iterator[None]:
    """Triton's kernel runs as about so many programs, which then have several blocks each."""
    with pytest.MonkeyPatch.context() as patch:
        if kernels.name == "Triton":
            from nanovllm.kernels.triton.sampling import sample

            patch.setattr(sample, "PROGRAMS", programs)
        yield


def test_infinities_and_nan_in_masked_rows(kernels: Kernels, device: str) -> None:
    """What a mask forbids does not matter, whatever its logit; one infinite logit wins."""
    allowed = torch.zeros(5, 100, dtype=torch.bool)
    allowed[:, [7, 50, 80]] = True
    logits = torch.zeros(NUM_ROWS, 100)
    logits[:, 3], logits[:, 60] = torch.inf, torch.nan
    logits[2, 50], logits[3, [7, 50]], logits[5] = torch.inf, -torch.inf, -torch.inf
    for given_choices in choices():
        tokens = torch.full((NUM_ROWS,), UNTOUCHED, device=device)
        kernels.sample_masked(
            *moved(device, logits, *given_choices, ROWS, bitmaps_of(allowed)), tokens
        )
        assert tokens[[2, 3, 5]].tolist() == [50, 80, NO_TOKEN]
        assert {*tokens[[0, 6]].tolist()} <= {7, 50, 80}


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_beside_other_filters(kernels: Kernels, device: str, dtype: torch.dtype) -> None:
    """A bias does not lift what a mask forbids; rows of masks alone draw what others would."""
    torch.manual_seed(3)
    vocab_size = 1000
    logits, allowed = logits_of(vocab_size, dtype).to(device), some_allowed(vocab_size)
    allowed[3, [11, 12]] = True
    bitmaps, rows = bitmaps_of(allowed).to(device), ROWS.to(device)
    entries = torch.tensor([3, 3, 4]).to(device), torch.tensor([11, 500, 4]).to(device)
    biases = (Biases(entries, torch.tensor([50.0, 1e4, 50.0]).to(device)),)
    none = (Biases(entries, torch.zeros(3).to(device)),)
    narrowed = logits[rows].float()
    Filters(rows, masks=bitmaps, changes=biases).narrow(narrowed, kernels)
    assert torch.equal(torch.isfinite(narrowed).cpu(), allowed)
    sampler = Sampler(kernels)
    for given_choices in choices():
        on = moved(device, *given_choices)
        alone = sampler(logits, *on, [Filters(rows, masks=bitmaps)])
        copied = sampler(logits, *on, [Filters(rows, masks=bitmaps, changes=none)])
        assert torch.equal(alone, copied)
        assert torch.equal(alone[[1, 4]], sampler(logits, *on)[[1, 4]])
        biased = sampler(logits, *on, [Filters(rows, masks=bitmaps, changes=biases)])
        assert biased[[5, 6]].tolist() == [11, 4]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.9, 1e-4])
def test_masked_rows_of_a_large_vocabulary(share: float, dtype: torch.dtype) -> None:
    """In pieces of the engine's sizes: a large batch, a few rows of it, and one alone."""
    from nanovllm.kernels.triton.sampling import mask as triton_mask
    from nanovllm.kernels.triton.sampling import sample

    torch.manual_seed(0)
    vocab_size, num_rows = 151_936, 256
    logits = torch.randn(num_rows, vocab_size, device="cuda").to(dtype) * 3
    temperatures = torch.tensor([0.0, 0.6, 1.0, 1.5], device="cuda").repeat(num_rows // 4)
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,)).cuda()
    allowed = torch.rand(num_rows, vocab_size) < share
    bitmaps = bitmaps_of(allowed).cuda()
    narrowed = logits.float()
    triton_mask.mask(narrowed, bitmaps)
    expected = logits.float().masked_fill_(~allowed.cuda(), -torch.inf)
    assert torch.equal(narrowed, expected)
    for heat, key in ((temperatures, keys), (None, None)):
        reference = sample.sample(expected, heat, key)
        for rows in (torch.arange(num_rows), torch.tensor([3, 77, 255]), torch.tensor([128])):
            tokens = torch.full((num_rows,), UNTOUCHED, device="cuda")
            some = rows.cuda()
            sample.sample_masked(logits, heat, key, some, bitmaps[some], tokens)
            assert torch.equal(tokens[some], reference[some])
            assert int((tokens == UNTOUCHED).sum()) == num_rows - len(rows)
