"""Sampling: tokens are drawn with the odds of softmax, and nothing else in a batch changes a draw.

Statistical tests are seeded, so each always passes or always fails on a machine. With another seed,
a false alarm has odds of 1 in a million, the tail beyond `Z`.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.run.draw_inputs import HOTTEST, noise_key
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.plain.no_token import NO_TOKEN
from nanovllm.kernels.plain.noise import GOLDEN, log_exponential
from nanovllm.kernels.plain.sample import CHUNK_ELEMENTS, first_max
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.sampler import Sampler

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

Z = 4.7534  # a normal variable is above it once in a million times


def some_keys(number: int, seed: int = 2) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, number, dtype=np.int64))


def draw_many(logits: torch.Tensor, keys: torch.Tensor, temperature: float) -> np.ndarray:
    """One draw from `logits` [V] for each key."""
    rows = []
    for some in keys.split(2000):
        temperatures = torch.full((len(some),), temperature)
        rows.append(PLAIN.sample(logits.expand(len(some), -1), temperatures, some))
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
    if means[-1] < 5:  # too rare, even all together, for a cell of their own
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
def test_a_greedy_row_is_the_argmax(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 1000).to(dtype)
    assert torch.equal(Sampler()(logits, None, None), logits.argmax(-1))
    assert torch.equal(Sampler()(logits, torch.zeros(64), some_keys(64)), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_go_to_the_first_token_in_any_batch(dtype: torch.dtype) -> None:
    """16-bit logits often tie: the first of equal tokens wins in any batch."""
    torch.manual_seed(0)
    logits = torch.randint(0, 4, (50, 700)).to(dtype)
    first = torch.tensor([row.index(max(row)) for row in logits.tolist()])
    temperatures = torch.zeros(50)
    assert torch.equal(Sampler()(logits, None, None), first)
    temperatures[7] = 1.0
    mixed = Sampler()(logits, temperatures, some_keys(50))
    assert torch.equal(mixed[temperatures == 0], first[temperatures == 0])


def test_an_infinite_logit_wins_in_a_mixed_batch() -> None:
    """float16 overflows to inf: greedy takes it alone, and in a batch with temperature rows."""
    torch.manual_seed(0)
    logits = torch.randn(3, 300)
    logits[:, 20] = math.inf
    assert Sampler()(logits, None, None)[0] == 20
    drawn = Sampler()(logits, torch.tensor([0.0, 1.0, 0.0]), some_keys(3))
    assert drawn.tolist() == [20, 20, 20]


def test_rows_of_a_mixed_batch_draw_as_they_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 3 * 300)  # many chunks, one not full
    torch.manual_seed(0)
    logits = torch.randn(200, 300)
    before = logits.clone()
    temperatures = torch.tensor([0.0, 1.0, 0.5, 0.0, 5.0] * 40)
    keys = some_keys(200)
    tokens = Sampler()(logits, temperatures, keys)
    assert torch.equal(logits, before), "the logits were changed in place"
    for row in range(200):
        alone = PLAIN.sample(logits[[row]], temperatures[[row]], keys[[row]])
        assert tokens[row] == alone
        assert temperatures[row] > 0 or tokens[row] == logits[row].argmax()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 63, 64, 640, 1000])
def test_first_max_is_the_first_and_the_max(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ties = torch.randint(0, 3, (40, size)).to(dtype)
    first = [row.index(max(row)) for row in ties.tolist()]
    assert first_max(ties).tolist() == first
    assert first_max(torch.full((2, size), -math.inf, dtype=dtype)).tolist() == [0, 0]


# The noise


def noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    ids = torch.arange(vocab_size, dtype=torch.int32).mul_(GOLDEN)
    return log_exponential(keys, ids)


def hash_twin(key: int, token: int) -> int:
    """The hash of one key and token in Python's integers: 0 to 2**31."""
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF

    def shift(x: int, bits: int) -> int:
        """An arithmetic shift of 32 bits."""
        return ((x - ((x >> 31) << 32)) >> bits) & 0xFFFFFFFF

    x = ((token * 0x9E3779B9 & 0xFFFFFFFF) ^ low) * 0x21F0AAAD & 0xFFFFFFFF
    x = ((x ^ shift(x, 15)) + high) * 0x735A2D97 & 0xFFFFFFFF
    x = x ^ shift(x, 15)
    return abs(x - ((x >> 31) << 32))


def test_noise_equals_its_slow_twin() -> None:
    keys = some_keys(20)
    times = noise(keys, 300).double().exp()
    for row, key in enumerate(keys.tolist()):
        for token in range(0, 300, 7):
            u = hash_twin(key, token) * 2.0**-31 * (1 - 2.0**-23) + 2.0**-32
            assert float(times[row, token]) == pytest.approx(-math.log1p(-u), rel=1e-5)


def test_noise_is_finite_and_does_not_repeat() -> None:
    """Infinite noise would win with any logits; the extremes of the hash are finite."""
    times = noise(some_keys(100), 151_936)
    assert torch.isfinite(times).all()
    assert -22.2 < float(times.min()) < -13 and 2 < float(times.max()) < 2.78
    assert len(torch.unique(times[0])) > 0.99 * 151_936 * (1 - 151_936 / 2**32)


def test_neighbouring_noise_is_not_correlated() -> None:
    """Tokens, and positions of one seed: |r| of n pairs exceeds Z / sqrt(n) once in a million."""
    keys = torch.tensor([noise_key(make_sequence(n, seed=5)) for n in range(1, 101)])
    times = noise(keys, 10_000)
    for one, other in ((times[:, :-1], times[:, 1:]), (times[:-1], times[1:])):
        r = float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])
        assert abs(r) < Z / math.sqrt(one.numel())


# The odds


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocab_size", [5, 257, 1000])
def test_tokens_are_drawn_with_the_odds_of_softmax(vocab_size: int, temperature: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(vocab_size) * 2
    counts = np.bincount(draw_many(logits, some_keys(20_000), temperature), minlength=vocab_size)
    assert_distributed(counts, softmax(logits, temperature))


def test_positions_of_one_seed_draw_with_the_odds_of_softmax() -> None:
    """With the keys of a request: one seed, and one position after the other."""
    torch.manual_seed(1)
    logits = torch.randn(50)
    seq = make_sequence(1, seed=5)
    keys = []
    for _ in range(20_000):
        keys.append(noise_key(seq))
        seq.token_ids.append(0)
    drawn = draw_many(logits, torch.tensor(keys), 1.0)
    assert_distributed(np.bincount(drawn, minlength=50), softmax(logits, 1.0))
    pairs = drawn[:-1] * 50 + drawn[1:]
    both = np.outer(softmax(logits, 1.0), softmax(logits, 1.0)).ravel()
    assert_distributed(np.bincount(pairs, minlength=2500), both)


def test_the_chi_square_test_can_fail() -> None:
    """It detects a temperature that is 10% off."""
    torch.manual_seed(1)
    logits = torch.randn(257) * 2
    counts = np.bincount(draw_many(logits, some_keys(20_000), 1.1), minlength=257)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_distributed(counts, softmax(logits, 1.0))


@pytest.mark.slow
def test_the_tail_of_a_large_vocabulary_is_drawn() -> None:
    """One token has half the mass, 151,935 others the rest."""
    logits = torch.zeros(151_936)
    logits[0] = math.log(151_935)
    drawn = draw_many(logits, some_keys(2000), 1.0)
    assert abs((drawn == 0).mean() - 0.5) < Z * 0.5 / math.sqrt(2000)
    tail = drawn[drawn > 0]
    assert_distributed(np.bincount(tail * 20 // 151_936, minlength=20), np.full(20, 0.05))


# Extremes


def test_a_tiny_temperature_is_greedy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(500) * 100
    for temperature in (1e-30, 1e-38, 1e-45):
        assert (draw_many(logits, some_keys(50), temperature) == int(logits.argmax())).all()


@pytest.mark.parametrize("temperature", [1e30, HOTTEST])
def test_a_huge_temperature_is_uniform(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50) * 100
    counts = np.bincount(draw_many(logits, some_keys(20_000), temperature), minlength=50)
    assert_distributed(counts, np.full(50, 0.02))


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 0.1, 1.0, HOTTEST])
def test_a_token_without_weight_is_never_drawn(temperature: float) -> None:
    for kept in ([0], [299], [150], [1, 298], [2, 3, 5]):
        logits = torch.full((300,), -math.inf)
        logits[kept] = 1.0
        drawn = draw_many(logits, some_keys(200), temperature)
        # Where noise is below the logits' rounding, ties go to the first token, as in greedy rows.
        assert set(drawn.tolist()) == set(kept if temperature > 1e-9 else kept[:1])


def test_huge_logits_do_not_overflow() -> None:
    assert draw_many(torch.tensor([3e38, 1.0, -3e38]), some_keys(20), 0.7).tolist() == [0] * 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_race_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(1000) * 2).to(dtype)
    keys = some_keys(2000)
    assert (draw_many(logits, keys, 0.7) == draw_many(logits.float(), keys, 0.7)).all()


def test_rounding_of_the_logits_rarely_changes_a_draw() -> None:
    """The same row in another batch differs by rounding, which changes near ties only."""
    torch.manual_seed(0)
    logits = torch.randn(20_000)
    keys = some_keys(2000)
    exact = draw_many(logits, keys, 1.0)
    rounded = draw_many(logits + torch.randn(20_000) * 1e-3, keys, 1.0)
    assert (exact != rounded).mean() < 0.01


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nans_gives_no_token_and_changes_no_other(
    temperature: float, rubbish: float
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 300)
    temperatures = torch.tensor([1.0, temperature, 1.0])
    expected = Sampler()(logits, temperatures, some_keys(3))
    logits[1] = rubbish
    drawn = Sampler()(logits, temperatures, some_keys(3))
    assert drawn[0] == expected[0] and drawn[2] == expected[2]
    assert drawn[1] == NO_TOKEN


# The key of a sequence and a position


def make_sequence(num_tokens: int, seed: int, token: int = 0) -> Sequence:
    return Sequence([token] * num_tokens, SamplingParams(seed=seed))


def test_a_key_depends_on_seed_and_position_alone() -> None:
    first, second = make_sequence(5, seed=3), make_sequence(5, seed=3, token=9)
    assert first.seq_id != second.seq_id and noise_key(first) == noise_key(second)
    grown = make_sequence(4, seed=3)
    grown.token_ids.append(77)
    grown.block_tables, grown.num_cached_tokens = [[4, 2]], 3
    assert noise_key(grown) == noise_key(first), "prompt tokens and generated ones count alike"


def test_keys_do_not_repeat_and_have_64_bits() -> None:
    seeds = [0, 1, 2, 2**32, 2**63 - 1]
    values = [noise_key(make_sequence(n, seed)) for n in range(1, 400) for seed in seeds]
    assert len(set(values)) == len(values)
    assert torch.tensor(values, dtype=torch.int64).tolist() == values


# End to end: a request's draws do not depend on others


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
    """The tokens of each seeded request when it runs alone."""
    tokens = [
        sample(model_dir, [prompt], [params])[0]
        for prompt, params in zip(PROMPTS, SEEDED, strict=True)
    ]
    assert len({token for row in tokens for token in row}) > 100, "hot rows must vary"
    return tokens


@pytest.mark.slow
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
def test_a_seeded_request_does_not_depend_on_its_batch(
    options: dict[str, Any], model_dir: Path, seeded: list[list[int]]
) -> None:
    """With others that are greedy or have no seed, in order and reversed, twice."""
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


def test_two_engines_of_one_seed_sample_the_same(model_dir: Path) -> None:
    params = [SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)] * len(PROMPTS)
    first = sample(model_dir, PROMPTS, params, seed=1)
    assert sample(model_dir, PROMPTS, params, seed=1) == first
    assert sample(model_dir, PROMPTS, params, seed=1, max_num_batched_tokens=16) == first
    other = sample(model_dir, PROMPTS, params, seed=2)
    assert all(a != b for a, b in zip(other, first, strict=True))


def test_requests_without_a_seed_draw_differently(model_dir: Path) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    with make_llm(model_dir) as llm:
        outputs = [
            tuple(out["token_ids"])
            for _ in range(2)
            for out in llm.generate([[1, 2, 3]] * 8, params, use_tqdm=False)
        ]
    assert len(set(outputs)) == 16


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_engine_samples_with_the_odds_of_softmax(temperature: float, model_dir: Path) -> None:
    """5,000 first tokens of unseeded requests, against the logits that they are drawn from."""
    params = SamplingParams(temperature=temperature, max_tokens=1)
    seen: list[torch.Tensor] = []
    with make_llm(model_dir, max_num_seqs=1000) as llm:
        model = llm.model_runner.shard.model
        compute_logits = model.compute_logits

        def recording(hidden: torch.Tensor, *out: Any) -> torch.Tensor:
            seen.append(compute_logits(hidden, *out))
            return seen[-1]

        model.compute_logits = recording  # type: ignore[method-assign]
        outputs = llm.generate([[1, 2, 3]] * 5000, params, use_tqdm=False)
    counts = np.bincount([out["token_ids"][0] for out in outputs], minlength=259)
    assert_distributed(counts, softmax(seen[0][0], temperature))
