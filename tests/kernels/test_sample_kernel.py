"""The Triton sampler against its twin: on a device, or interpreted without one."""

from dataclasses import dataclass, replace

import pytest
import torch
from conftest import kernel_settings
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.kernels.plain.no_token import NO_TOKEN
from nanovllm.kernels.plain.noise import GOLDEN, log_exponential
from nanovllm.kernels.plain.sample import first_max
from nanovllm.kernels.table import PLAIN

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from nanovllm.kernels.triton.sampling.noise import log_exponential as triton_log_exponential  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")
LARGEST, SMALLEST = 2**63 - 1, -(2**63)
TIE = 1e-4  # hashes are equal; logarithms and sums of scores differ in their last bits


@dataclass(frozen=True)
class Step:
    """A batch with greedy and temperature rows, and how the kernel divides the vocabulary."""

    temperatures: list[float]
    vocab_size: int
    dtype: torch.dtype = torch.float32
    num_values: int = 0  # number of different logits; 0 for any
    strided: bool = False
    block: int = 64
    programs: int = 16
    seed: int = 0

    def inputs(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, temperatures, and keys from the whole range of 64 bits."""
        torch.manual_seed(self.seed)
        rows, vocab_size = len(self.temperatures), self.vocab_size
        wide = torch.randn(rows, vocab_size + (5 if self.strided else 0)) * 3
        if self.num_values:
            wide = torch.randint_like(wide, self.num_values)
        logits = wide.to(dtype=self.dtype, device=device)[:, -vocab_size:]
        keys = torch.randint(SMALLEST, LARGEST, (rows,))
        keys[:5] = torch.tensor([SMALLEST, LARGEST, 0, -1, 1])[:rows]
        return logits, torch.tensor(self.temperatures, device=device), keys.to(device)

    def draw(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        from nanovllm.kernels.triton.sampling import sample

        logits = inputs[0]
        assert logits is not None
        before = [None if x is None else x.clone() for x in inputs]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sample, "BLOCK", self.block)
            patch.setattr(sample, "PROGRAMS", self.programs)
            tokens = sample.sample(*inputs)
        for x, old in zip(inputs, before, strict=True):
            assert x is None or torch.equal(x.nan_to_num(), old.nan_to_num()), "an input changed"
        assert tokens.dtype == torch.long and tokens.shape == logits.shape[:1]
        inside = (tokens >= NO_TOKEN) & (tokens < logits.shape[1])
        assert bool(inside.all()), "outside the vocabulary"
        return tokens


def assert_draws_as_its_twin(
    tokens: torch.Tensor, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor
) -> int:
    """Greedy rows are equal; in others a token may lose to the twin's by TIE: returns how many."""
    twin = PLAIN.sample(logits, temperatures, keys)
    differ = (tokens != twin).nonzero()[:, 0]
    assert bool((temperatures[differ] > 0).all()), "a greedy row is not its first maximum"
    if len(differ):
        ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        times = log_exponential(keys[differ], ids.mul_(GOLDEN))
        scores = logits[differ].float() - temperatures[differ, None] * times
        lost = scores.gather(1, twin[differ, None]) - scores.gather(1, tokens[differ, None])
        bound = TIE * temperatures[differ, None].clamp(min=1)
        assert bool((lost.abs() <= bound).all()), f"worse than the winner by {lost.max()}"
    return len(differ)


# Vocabularies, and block sizes that divide all but the smallest into several.
SIZES = [(1, 16), (5, 16), (63, 16), (64, 16), (257, 64), (1000, 256), (1000, 2048), (4097, 1024)]
STEPS = st.builds(
    lambda size, **options: Step(vocab_size=size[0], block=size[1], **options),
    size=st.sampled_from(SIZES),
    temperatures=st.lists(
        st.sampled_from([0.0, 0.0, 0.01, 0.7, 1.0, 2.0, 100.0]), min_size=1, max_size=8
    ),
    dtype=st.sampled_from(DTYPES),
    num_values=st.sampled_from([0, 0, 1, 3]),
    strided=st.booleans(),
    programs=st.sampled_from([1, 7, 20, 1024]),
    seed=st.integers(0, 2**31),
)


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 100, 1000])
@pytest.mark.parametrize("vocab_size", [47, 48, 49])
def test_every_token_is_in_a_piece(kernel_device: str, vocab_size: int, programs: int) -> None:
    """Each row has another best token; rows are one piece, two or three."""
    step = Step([1.0] * vocab_size, vocab_size, block=16, programs=programs)
    _, *others = step.inputs(kernel_device)
    logits = torch.eye(vocab_size, device=kernel_device) * 1000
    for inputs in ((logits, None, None), (logits, *others)):
        assert step.draw(*inputs).tolist() == list(range(vocab_size))


@pytest.mark.slow
@kernel_settings(50)
@given(STEPS)
@example(Step([0.0], 1))
@example(Step([1.0], 1, strided=True))
@example(Step([0.0, 1.0, 0.0, 0.5, 2.0, 0.0], 4097, torch.bfloat16, 3, True, 256, 60))
def test_the_kernel_draws_its_twins_tokens(kernel_device: str, step: Step) -> None:
    inputs = step.inputs(kernel_device)
    tokens = step.draw(*inputs)
    assert assert_draws_as_its_twin(tokens, *inputs) <= len(tokens) // 4
    for greedy in ((inputs[0], None, None), (inputs[0], None, inputs[2])):
        assert torch.equal(step.draw(*greedy), first_max(inputs[0]))


@pytest.mark.slow
@kernel_settings(20)
@given(STEPS, st.sampled_from([64, 512]), st.sampled_from([1, 5, 512]))
def test_a_draw_does_not_depend_on_neighbours_or_pieces(
    kernel_device: str, step: Step, block: int, programs: int
) -> None:
    """A request draws the same in any batch: its scores are computed in the same way."""
    logits, temperatures, keys = step.inputs(kernel_device)
    together = step.draw(logits, temperatures, keys)
    otherwise = replace(step, block=block, programs=programs)
    assert torch.equal(together, otherwise.draw(logits, temperatures, keys))
    back = step.draw(logits.flip(0), temperatures.flip(0), keys.flip(0))
    assert torch.equal(together, back.flip(0))
    for row in {0, len(together) - 1}:
        alone = slice(row, row + 1)
        token = otherwise.draw(logits[alone], temperatures[alone], keys[alone])
        assert torch.equal(token, together[alone])


def test_ties_go_to_the_first_token(kernel_device: str) -> None:
    """By hand: maxima within a block, in two blocks of a program, and in two programs' pieces."""
    step = Step([0.0] * 5, 64, torch.bfloat16, block=16, programs=10)  # two pieces of 32 tokens
    logits = torch.zeros(5, 64, dtype=torch.bfloat16, device=kernel_device)
    firsts = []
    for row, (first, second) in enumerate([(3, 9), (5, 16), (20, 33), (15, 63), (40, 41)]):
        logits[row, [first, second]] = 7.0
        firsts.append(first)
    zeros = torch.zeros(5, device=kernel_device)
    for inputs in ((logits, None, None), (logits, zeros, zeros.long())):
        assert step.draw(*inputs).tolist() == firsts
    # Distinct in float32, equal in bfloat16.
    logits[:, 62] = 7.0 + 2**-5
    assert step.draw(logits, None, None).tolist() == [62] * 5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_vocabulary_of_a_large_model(kernel_device: str, dtype: torch.dtype) -> None:
    """In pieces of the engine's sizes; 151936 is Qwen3's."""
    from nanovllm.kernels.triton.sampling import sample

    temperatures = [0.0, 1.0, 0.6]
    for vocab_size in (151936, 128256 + 1):
        step = Step(
            temperatures, vocab_size, dtype, block=sample.BLOCK, programs=sample.PROGRAMS, seed=1
        )
        inputs = step.inputs(kernel_device)
        assert not assert_draws_as_its_twin(step.draw(*inputs), *inputs)


@triton.jit
def _times_kernel(keys_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    n = tl.arange(0, N)
    tl.store(out_ptr + row * N + n, triton_log_exponential(tl.load(keys_ptr + row), n))


def test_arrival_times_equal_their_definition(kernel_device: str) -> None:
    """Of all tokens; a draw depends only on the first two of a row."""
    _, _, keys = Step([1.0] * 20, 1).inputs(kernel_device)
    out = torch.empty(len(keys), 4096, device=kernel_device)
    _times_kernel[(len(keys),)](keys, out, N=4096)
    ids = torch.arange(4096, dtype=torch.int32, device=kernel_device).mul_(GOLDEN)
    expected = log_exponential(keys, ids)
    small = expected < 1.0  # large times, where 1 - u has few bits, never win
    assert bool(small.any(dim=1).all()) and float(expected.min()) < -9
    torch.testing.assert_close(out[small], expected[small], rtol=0, atol=TIE / 10)


TEMPERATURES = [0.0, 0.6, 1.0, 1e4]


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "programs"), [(5, 1000), (70, 4), (70, 1000)])
def test_infinite_logits_win_or_lose(kernel_device: str, vocab_size: int, programs: int) -> None:
    """Temperature times a logarithm is finite, so it decides nothing here."""
    step = Step(TEMPERATURES, vocab_size, block=16, programs=programs)
    logits, *others = step.inputs(kernel_device)
    for token in (0, 3, vocab_size - 1):
        wins, remains = logits.clone(), torch.full_like(logits, -INF)
        wins[:, token] = INF
        remains[:, token] = -5.0
        wins_over_none = torch.where(wins == INF, INF, -INF)
        for banned_or_forced in (wins, remains, wins_over_none):
            assert step.draw(banned_or_forced, *others).tolist() == [token] * 4
            assert step.draw(banned_or_forced, None, None).tolist() == [token] * 4
        some = logits.clone()
        some[:, : token + 1] = -INF
        if token < vocab_size - 1:
            assert bool((step.draw(some, *others) > token).all()), "a banned token is drawn"


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "programs"), [(1, 1000), (5, 1000), (70, 4), (70, 1000)])
@pytest.mark.parametrize(
    "values", [(-INF,), (NAN,), (NAN, -INF), (NAN, 1.0), (NAN, INF), (INF,), (INF, 1.0, -INF)]
)
def test_rows_without_a_largest_logit_give_no_token(
    kernel_device: str, values: tuple[float, ...], programs: int, vocab_size: int
) -> None:
    """Other rows are unchanged. One infinite logit is the largest."""
    step = Step(TEMPERATURES * 2, vocab_size, block=16, programs=programs)
    logits, temperatures, keys = step.inputs(kernel_device)
    expected = step.draw(logits, temperatures, keys)
    broken = torch.tensor(values, device=kernel_device).repeat(vocab_size)[:vocab_size]
    logits[::2] = broken
    tokens = step.draw(logits, temperatures, keys)
    assert torch.equal(tokens[1::2], expected[1::2])
    is_largest = int((broken == INF).sum()) == 1 and not bool(broken.isnan().any())
    for drawn in (tokens[::2], step.draw(logits, None, None)[::2]):
        assert drawn.tolist() == [0 if is_largest else NO_TOKEN] * len(drawn)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab_size"), [(256, 151936), (64, 262144)])
def test_the_kernel_draws_its_twins_tokens_in_a_large_batch(
    rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    """The first two are within 1e-5 of each other, and may swap, once in 1e5 draws."""
    from nanovllm.kernels.triton.sampling import sample

    differ = greedy = 0
    for seed in range(1000 // rows + 4):
        temperatures = [(0.0, 0.6, 1.0, 1.5)[i % 4] for i in range(rows)]
        step = Step(
            temperatures, vocab_size, dtype, block=sample.BLOCK, programs=sample.PROGRAMS, seed=seed
        )
        inputs = step.inputs("cuda")
        tokens = step.draw(*inputs)
        differ += assert_draws_as_its_twin(tokens, *inputs)
        greedy += len(tokens)
        assert torch.equal(step.draw(inputs[0], None, None), first_max(inputs[0]))
    assert differ <= greedy / 1000
