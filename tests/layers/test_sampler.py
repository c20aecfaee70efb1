"""Sampling: exact inversion of the distribution, and nothing else in a batch changes a draw.

Statistical tests are seeded, so they pass or fail for good on a machine. Were the seed drawn anew,
each would raise a false alarm with odds of 1 in a million, `Z` standing for that tail.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import uniform
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import CHUNK, Sampler, draw

pytestmark = pytest.mark.usefixtures("one_thread")

Z = 4.7534  # a normal variable is above it once in a million times
LAST = 1 - 2**-53  # the largest number that `uniform` gives


def draw_one(logits: list[float], u: float, temperature: float = 1.0) -> int:
    drawn = draw(
        torch.tensor([logits]),
        torch.tensor([temperature], dtype=torch.float32),
        torch.tensor([u], dtype=torch.float64),
    )
    return int(drawn)


def draw_many(logits: torch.Tensor, uniforms: np.ndarray, temperature: float) -> np.ndarray:
    """One draw from `logits` [V] for each uniform number."""
    rows = []
    for some in torch.from_numpy(uniforms).split(2000):
        temperatures = torch.full((len(some),), temperature)
        rows.append(draw(logits.expand(len(some), -1), temperatures, some))
    return torch.cat(rows).numpy()


def softmax(logits: torch.Tensor, temperature: float) -> np.ndarray:
    probabilities: np.ndarray = torch.softmax(logits.double() / temperature, dim=-1).numpy()
    return probabilities


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square, cells expected fewer than 5 times put together."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    cells = np.append(counts[~rare], counts[rare].sum()).astype(float)
    means = np.append(expected[~rare], expected[rare].sum())
    if means[-1] < 5:  # hardly ever, all of them together: no cell of its own
        cells, means = cells[:-1], means[:-1]
    freedom = len(cells) - 1
    assert freedom >= 1
    chi_square = ((cells - means) ** 2 / means).sum()
    # Wilson and Hilferty's approximation of the quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + Z * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit, (
        f"chi-square {chi_square:.1f} of {freedom} degrees, limit {limit:.1f}"
    )


# Greedy rows and mixed batches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_row_is_not_the_argmax(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 1000).to(dtype)
    assert torch.equal(Sampler()(logits, None, None), logits.argmax(-1))
    zeros, uniforms = torch.zeros(64), torch.rand(64, dtype=torch.float64)
    assert torch.equal(Sampler()(logits, zeros, uniforms), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_are_decided_by_the_batch(dtype: torch.dtype) -> None:
    """16-bit logits often tie: the first of equals it is, whoever else is in the batch."""
    torch.manual_seed(0)
    logits = torch.randint(0, 4, (50, 700)).to(dtype)
    first = torch.tensor([row.index(max(row)) for row in logits.tolist()])
    temperatures, uniforms = torch.zeros(50), torch.rand(50, dtype=torch.float64)
    assert torch.equal(Sampler()(logits, None, None), first)
    temperatures[7] = 1.0
    mixed = Sampler()(logits, temperatures, uniforms)
    assert torch.equal(mixed[temperatures == 0], first[temperatures == 0])


def test_infinite_logit_is_lost_in_a_mixed_batch() -> None:
    """float16 overflows to inf: greedy takes it alone, and must take it beside a hot row."""
    torch.manual_seed(0)
    logits = torch.randn(3, 300)
    logits[0, 20] = logits[2, 20] = math.inf
    assert Sampler()(logits, None, None)[0] == 20
    uniforms = torch.full((3,), 0.5, dtype=torch.float64)
    assert Sampler()(logits, torch.tensor([0.0, 1.0, 0.0]), uniforms)[[0, 2]].tolist() == [20, 20]


def test_rows_of_a_mixed_batch_are_mixed_up() -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 300)
    before = logits.clone()
    temperatures = torch.tensor([0.0, 1.0, 0.5, 0.0, 5.0] * 40)
    uniforms = torch.rand(200, dtype=torch.float64)
    tokens = Sampler()(logits, temperatures, uniforms)
    assert torch.equal(logits, before), "the logits were changed in place"
    for row in range(200):
        if temperatures[row] == 0:
            assert tokens[row] == logits[row].argmax()
        else:
            alone = draw_one(logits[row].tolist(), float(uniforms[row]), float(temperatures[row]))
            assert tokens[row] == alone


# Inversion


def test_draw_does_not_invert_the_distribution_by_hand() -> None:
    """Weights 1, 2, 3, 4: cumulative 0.1, 0.3, 0.6, 1."""
    logits = [math.log(w) for w in (1, 2, 3, 4)]
    by_hand = {
        0.0: 0, 0.05: 0, 0.0999: 0, 0.1001: 1, 0.2: 1, 0.2999: 1, 0.3001: 2, 0.5999: 2, 0.6001: 3,
        0.9999: 3, LAST: 3,
    }  # fmt: skip
    for u, token in by_hand.items():
        assert draw_one(logits, u) == token
        assert draw_one([x + 50 for x in logits], u) == token, "a constant changes nothing"
    # At temperature 0.5 the weights are squared: cumulative 1/30, 5/30, 14/30, 1.
    for u, token in {0.03: 0, 0.04: 1, 0.16: 1, 0.17: 2, 0.46: 2, 0.47: 3}.items():
        assert draw_one(logits, u, temperature=0.5) == token
    # At temperature 2 they are rooted: 1, 1.414, 1.732, 2 of 6.146.
    for u, token in {0.16: 0, 0.17: 1, 0.39: 1, 0.40: 2, 0.67: 2, 0.68: 3}.items():
        assert draw_one(logits, u, temperature=2.0) == token


@pytest.mark.parametrize("vocab_size", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 1000])
def test_equal_weights_are_not_drawn_in_equal_parts(vocab_size: int) -> None:
    """Token t for u in [t / V, (t + 1) / V), over the borders of the draw's two levels."""
    for token in range(vocab_size):
        for where in (0.01, 0.5, 0.99):
            assert draw_one([3.0] * vocab_size, (token + where) / vocab_size) == token
        if vocab_size > 300 and token > 300:
            break


@pytest.mark.parametrize("vocab_size", [5, 257, 1000, 5000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_draw_differs_from_a_float64_twin(vocab_size: int, temperature: float) -> None:
    """But where u is within float32's rounding of a border."""
    torch.manual_seed(vocab_size)
    logits = torch.randn(vocab_size) * 3
    uniforms = np.random.default_rng(0).random(4000)
    cumulative = softmax(logits, temperature).cumsum()
    expected = np.searchsorted(cumulative, uniforms, side="right").clip(max=vocab_size - 1)
    drawn = draw_many(logits, uniforms, temperature)
    for u, token, twin in zip(uniforms, drawn, expected, strict=True):
        if token != twin:
            assert abs(cumulative[min(token, twin)] - u) < 1e-6
    assert (drawn != expected).mean() < 0.01


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocab_size", [5, 257, 1000])
def test_tokens_are_drawn_with_other_odds_than_softmax(vocab_size: int, temperature: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(vocab_size) * 2
    uniforms = np.random.default_rng(2).random(20_000)
    counts = np.bincount(draw_many(logits, uniforms, temperature), minlength=vocab_size)
    assert_distributed(counts, softmax(logits, temperature))


def test_the_chi_square_test_cannot_fail() -> None:
    """It sees a temperature that is 5% off."""
    torch.manual_seed(1)
    logits = torch.randn(257) * 2
    uniforms = np.random.default_rng(2).random(20_000)
    counts = np.bincount(draw_many(logits, uniforms, 1.05), minlength=257)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_distributed(counts, softmax(logits, 1.0))


# Extremes


def test_tiny_temperature_overflows() -> None:
    torch.manual_seed(0)
    logits = torch.randn(500) * 100
    uniforms = np.array([0.0, 0.3, 0.999, LAST])
    for temperature in (1e-30, 1e-38, 1e-45):
        assert (draw_many(logits, uniforms, temperature) == int(logits.argmax())).all()


def test_huge_temperature_is_not_uniform() -> None:
    torch.manual_seed(0)
    logits = torch.randn(500) * 100
    uniforms = (np.arange(500) + 0.5) / 500
    for temperature in (1e30, 3e38):
        assert (draw_many(logits, uniforms, temperature) == np.arange(500)).all()


@pytest.mark.parametrize("temperature", [1e-30, 0.1, 1.0, 1e30])
@pytest.mark.parametrize("vocab_size", [7, CHUNK, 3 * CHUNK + 5])
def test_a_token_without_weight_is_drawn(vocab_size: int, temperature: float) -> None:
    """Tokens of -inf in front, behind, between, in whole chunks; with u at both its ends."""
    rng = np.random.default_rng(3)
    uniforms = np.concatenate([[0.0, 2.0**-53, LAST], rng.random(200)])
    for kept in ([0], [vocab_size - 1], [vocab_size // 2], [1, vocab_size - 2], [2, 3, 5]):
        logits = torch.full((vocab_size,), -math.inf)
        logits[kept] = 1.0
        drawn = draw_many(logits, uniforms, temperature)
        assert set(drawn.tolist()) == set(kept)
        assert drawn[0] == min(kept) and drawn[2] == max(kept)


def test_weights_that_vanish_are_drawn_at_the_ends() -> None:
    """exp(-200) is 0 in float32: it weighs nothing beside 1."""
    logits = [-200.0, 0.0, -200.0] + [-200.0] * 300
    assert draw_one(logits, 0.0) == draw_one(logits, LAST) == 1


def test_huge_logits_overflow() -> None:
    torch.manual_seed(0)
    logits = torch.randn(300)
    uniforms = np.random.default_rng(0).random(100)
    for offset in (1e4, -1e4):
        shifted = draw_many((logits + offset), uniforms, 1.0)
        exact = draw_many((logits + offset) - offset, uniforms, 1.0)
        assert (shifted == exact).all()
    assert draw_one([3e38, 1.0, -3e38], 0.7) == 0


def test_the_tail_of_a_large_vocabulary_is_never_drawn() -> None:
    """A float32 running sum of 151,936 weights loses its last digits; u counts them."""
    vocab_size = 151_936
    logits = torch.zeros(vocab_size)
    uniforms = np.concatenate([np.random.default_rng(0).random(500), [0.0, LAST]])
    drawn = draw_many(logits, uniforms, 1.0)
    assert (np.abs(drawn - np.floor(uniforms * vocab_size)) <= 1).all()
    assert drawn[-1] == vocab_size - 1 and drawn[-2] == 0
    # One likely token first: what is left of the mass, 0.5 in all, is the tail's.
    logits[0] = math.log(vocab_size - 1)
    drawn = draw_many(logits, uniforms, 1.0)
    expected = np.where(uniforms < 0.5, 0, 1 + np.floor((uniforms - 0.5) * 2 * (vocab_size - 1)))
    assert (np.abs(drawn - expected) <= 2).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_summed_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(1000) * 2).to(dtype)
    uniforms = np.random.default_rng(0).random(2000)
    drawn = draw_many(logits, uniforms, 0.7)
    assert (drawn == draw_many(logits.float(), uniforms, 0.7)).all()


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nans_spoils_its_neighbours_or_leaves_the_vocabulary(
    temperature: float, rubbish: float
) -> None:
    """A token that is not in the vocabulary would be the next step's index error."""
    torch.manual_seed(0)
    logits = torch.randn(3, 300)
    uniforms = torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64)
    temperatures = torch.tensor([1.0, temperature, 1.0])
    expected = Sampler()(logits, temperatures, uniforms)
    logits[1] = rubbish
    drawn = Sampler()(logits, temperatures, uniforms)
    assert drawn[0] == expected[0] and drawn[2] == expected[2]
    assert 0 <= drawn[1] < 300


# The uniform number of a sequence and a position


def make_sequence(num_tokens: int, seed: int, token: int = 0) -> Sequence:
    return Sequence([token] * num_tokens, SamplingParams(seed=seed))


def test_uniform_depends_on_more_than_seed_and_position() -> None:
    first, second = make_sequence(5, seed=3), make_sequence(5, seed=3, token=9)
    assert first.seq_id != second.seq_id and uniform(first) == uniform(second)
    grown = make_sequence(4, seed=3)
    grown.token_ids.append(77)
    grown.block_table, grown.num_cached_tokens = [4, 2], 3
    assert uniform(grown) == uniform(first), "a prompt's tokens and generated ones count alike"


def test_uniform_repeats_itself_or_leaves_the_unit_interval() -> None:
    seeds = [0, 1, 2, 2**32, 2**63 - 1]
    values = [uniform(make_sequence(n, seed)) for n in range(1, 400) for seed in seeds]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)


def test_uniform_numbers_are_not_uniform() -> None:
    """Neighbouring seeds, neighbouring positions, and pairs of positions in one sequence."""
    by_seed = np.array([uniform(make_sequence(7, seed)) for seed in range(20_000)])
    by_position = []
    seq = make_sequence(1, seed=5)
    for _ in range(20_001):
        by_position.append(uniform(seq))
        seq.token_ids.append(0)
    values = np.array(by_position)
    for some in (by_seed, values):
        counts = np.bincount((some * 100).astype(int), minlength=100)
        assert_distributed(counts, np.full(100, 0.01))
    pairs = (values[:-1] * 20).astype(int) * 20 + (values[1:] * 20).astype(int)
    assert_distributed(np.bincount(pairs, minlength=400), np.full(400, 1 / 400))


# End to end: what a request draws is its own affair


def make_llm(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", dtype="float32", **dict(cpu_kvcache_gib=0.05) | options)


def sample(
    path: Path, prompts: list[list[int]], params: list[SamplingParams], **options: Any
) -> list[list[int]]:
    with make_llm(path, **options) as llm:
        return [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)]


PROMPTS = [[(7 * i + j * j) % 259 for j in range(1 + 5 * i)] for i in range(16)]
SEEDED = [
    SamplingParams(temperature=(0.5, 1.0, 2.0)[i % 3], seed=100 + i, max_tokens=20, ignore_eos=True)
    for i in range(16)
]


@pytest.fixture(scope="module")
def seeded(model_dir: Path) -> list[list[int]]:
    """What each seeded request draws when it runs alone."""
    tokens = [
        sample(model_dir, [prompt], [params])[0]
        for prompt, params in zip(PROMPTS, SEEDED, strict=True)
    ]
    assert len({token for row in tokens for token in row}) > 100, "hot rows must vary"
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(seed=99),
        dict(max_num_batched_tokens=7),
        dict(max_num_seqs=3),
        dict(kvcache_block_size=4),
        dict(kvcache_block_size=4, num_kvcache_blocks=26),
        dict(kvcache_block_size=4, num_kvcache_blocks=26, max_num_batched_tokens=16),
        dict(enable_prefix_caching=False),
    ],
)
def test_a_seeded_request_depends_on_its_batch(
    options: dict[str, Any], model_dir: Path, seeded: list[list[int]]
) -> None:
    """Beside others that are greedy or have no seed, in order and reversed, twice."""
    others = [SamplingParams(temperature=t, max_tokens=11) for t in (0.0, 1.0, 0.7)]
    prompts = PROMPTS + [[5, 6, 7]] * 3
    params = SEEDED + others
    with make_llm(model_dir, **options) as llm:
        for order in (range(19), reversed(range(19)), range(19)):
            indices = list(order)
            outputs = llm.generate(
                [prompts[i] for i in indices], [params[i] for i in indices], use_tqdm=False
            )
            tokens = dict(zip(indices, (out["token_ids"] for out in outputs), strict=True))
            assert [tokens[i] for i in range(16)] == seeded
        if "num_kvcache_blocks" in options:
            assert llm.scheduler.num_preemptions >= 20


def test_two_engines_of_one_seed_sample_differently(model_dir: Path) -> None:
    params = [SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)] * len(PROMPTS)
    first = sample(model_dir, PROMPTS, params, seed=1)
    assert sample(model_dir, PROMPTS, params, seed=1) == first
    assert sample(model_dir, PROMPTS, params, seed=1, max_num_batched_tokens=16) == first
    other = sample(model_dir, PROMPTS, params, seed=2)
    assert all(a != b for a, b in zip(other, first, strict=True))


def test_requests_without_a_seed_draw_the_same(model_dir: Path) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    with make_llm(model_dir) as llm:
        outputs = [
            tuple(out["token_ids"])
            for _ in range(2)
            for out in llm.generate([[1, 2, 3]] * 8, params, use_tqdm=False)
        ]
    assert len(set(outputs)) == 16


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_engine_samples_with_other_odds_than_softmax(
    temperature: float, model_dir: Path
) -> None:
    """5,000 first tokens of unseeded requests, against the very logits they are drawn from."""
    params = SamplingParams(temperature=temperature, max_tokens=1)
    seen: list[torch.Tensor] = []
    with make_llm(model_dir, max_num_seqs=1000) as llm:
        model = llm._runner.model
        compute_logits = model.compute_logits

        def recording(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(compute_logits(hidden))
            return seen[-1]

        model.compute_logits = recording  # type: ignore[method-assign]
        outputs = llm.generate([[1, 2, 3]] * 5000, params, use_tqdm=False)
    counts = np.bincount([out["token_ids"][0] for out in outputs], minlength=259)
    assert_distributed(counts, softmax(seen[0][0], temperature))
