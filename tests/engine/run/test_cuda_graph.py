"""Decode by CUDA graphs: the ladder of batch sizes, padding, and on a device capture and replay.

On the CPU a replay calls the step, so that everything except the capture runs.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LogitRecorder, make_model

from nanovllm import LLM, SamplingParams
from nanovllm.engine.run.computed import Computed
from nanovllm.engine.run.graphs import batch_ladder
from nanovllm.engine.run.transfer import upload_ahead
from nanovllm.engine.schedule.batch import Batch, Size
from nanovllm.engine.schedule.sequence import PENDING
from nanovllm.layers.context import Context

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

TOP = 40  # the ladder is 1, 2, 4, 8, 16, 32, 40
LENGTHS = [1, 50, 3, 17, 64, 2, 33, 16, 5, 90, 4, 8, 65, 15, 7, 31, 6, 1, 20, 48]
PROMPTS = [
    [(11 * i + 7 * j * j) % 259 for j in range(LENGTHS[i % 20] + i // 20)] for i in range(48)
]
PARAMS = [SamplingParams(temperature=0, max_tokens=4 + i % 9, ignore_eos=True) for i in range(48)]


def make_llm(path: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = dict(
        device="cpu", dtype="float32", cpu_kvcache_gib=0.05, max_num_seqs=TOP, kvcache_block_size=4
    )
    return LLM(path, **defaults | options)


def use_graphs(llm: LLM) -> list[int]:
    """Make decode run in padded batches; return a list that will hold the sizes."""
    graphs = llm.model_runner.shard.graphs = llm.model_runner.shard.decode_graphs(
        llm.config.max_num_running
    )
    step, sizes = graphs.step, []

    def recording(size: Size, out: torch.Tensor) -> Computed:
        sizes.append(size.num_seqs)
        return step(size, out)

    graphs.step = recording
    return sizes


def generate(llm: LLM, num_prompts: int) -> list[list[int]]:
    outputs = llm.generate(PROMPTS[:num_prompts], PARAMS[:num_prompts], use_tqdm=False)
    return [out["token_ids"] for out in outputs]


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    """The output without graphs or padding."""
    with make_llm(model_dir) as llm:
        assert llm.model_runner.shard.graphs is None
        return generate(llm, len(PROMPTS))


@pytest.fixture(scope="module")
def padded(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir, enable_prefix_caching=False) as llm:
        yield llm


# The ladder


@pytest.mark.parametrize("largest", [*range(1, 70), 100, 255, 256, 257, 511, 512])
def test_the_ladder_ends_at_the_largest_batch(largest: int) -> None:
    ladder = batch_ladder(largest)
    assert ladder[-1] == largest and ladder[0] == 1
    assert ladder == sorted(set(ladder))
    for low, high in itertools.pairwise(ladder):
        assert high - low <= max(low, 16), "a bucket is more than half padding"
        assert high - low <= 8 or not 128 <= low < 256, "large layers compute 15 rows of padding"


@pytest.mark.parametrize(
    ("max_num_seqs", "top"), [(1, 1), (3, 3), (40, 40), (512, 512), (9999, 512)]
)
def test_the_runners_ladder_follows_its_config(
    max_num_seqs: int, top: int, model_dir: Path
) -> None:
    with make_llm(model_dir, max_num_seqs=max_num_seqs) as llm:
        graphs = llm.model_runner.shard.decode_graphs(llm.config.max_num_running)
        assert graphs.sizes[-1].num_seqs == top == len(graphs.logits)
    with make_llm(model_dir, max_num_seqs=max_num_seqs, max_num_batched_tokens=2) as llm:
        graphs = llm.model_runner.shard.decode_graphs(llm.config.max_num_running)
        assert graphs.sizes[-1] == Size(min(top, 2))


# Padded batches on the CPU


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 39, 40])
def test_padding_keeps_the_output_of_a_batch_of(
    size: int, padded: LLM, expected: list[list[int]]
) -> None:
    """Around every size of the ladder, in one engine, with stale rows of the last batch."""
    sizes = use_graphs(padded)
    assert generate(padded, size) == expected[:size]
    ladder = batch_ladder(TOP)
    assert sizes[0] == ladder[bisect.bisect_left(ladder, size)], "it is not the next larger bucket"
    assert set(sizes) <= set(ladder)
    assert sizes == sorted(sizes, reverse=True), "buckets do not shrink as requests finish"


def test_a_batch_above_the_top_of_the_ladder_runs_without_graphs(
    model_dir: Path, expected: list[list[int]]
) -> None:
    """Until enough requests have finished."""
    with make_llm(model_dir, max_num_seqs=48) as llm:
        sizes = use_graphs(llm)
        graphs = llm.model_runner.shard.graphs
        assert graphs is not None
        graphs.sizes = graphs.sizes[:4]
        assert graphs.sizes[-1].num_seqs == 8
        assert generate(llm, 48) == expected
        assert set(sizes) == {8}, "5 requests have the longest outputs: bucket 8, and no other"
        assert generate(llm, 9) == expected[:9]
        assert set(sizes) == {1, 2, 4, 8}


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_batched_tokens=16),
        dict(num_kvcache_blocks=32),
        dict(num_kvcache_blocks=32, max_num_batched_tokens=16),
        dict(kvcache_block_size=1, num_kvcache_blocks=128),
        dict(kvcache_block_size=256),
    ],
)
def test_graphs_keep_the_output_with_chunks_and_preemptions(
    options: dict[str, Any], model_dir: Path, expected: list[list[int]]
) -> None:
    with make_llm(model_dir, **options) as llm:
        sizes = use_graphs(llm)
        for _ in range(2):
            assert generate(llm, 48) == expected
        assert sizes
        if "num_kvcache_blocks" in options:
            assert llm.scheduler.num_preemptions >= 5


def test_block_tables_grow_to_the_last_token_of_the_model(model_dir: Path) -> None:
    """The width is not a multiple of the block size."""
    options: dict[str, Any] = dict(max_model_len=101, kvcache_block_size=8, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    with make_llm(model_dir, **options) as llm:
        plain = [out["token_ids"] for out in llm.generate(PROMPTS[:5], params, use_tqdm=False)]
        assert [len(p) + len(t) for p, t in zip(PROMPTS, plain, strict=False)] == [101] * 5
        sizes = use_graphs(llm)
        outputs = llm.generate(PROMPTS[:5], params, use_tqdm=False)
        assert [out["token_ids"] for out in outputs] == plain and sizes


def test_graphs_keep_seeded_samples(model_dir: Path) -> None:
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=12) for i in range(11)]
    with make_llm(model_dir) as llm:
        plain = llm.generate(PROMPTS[:11], params, use_tqdm=False)
        use_graphs(llm)
        again = llm.generate(PROMPTS[:11], params, use_tqdm=False)
    assert [out["token_ids"] for out in again] == [out["token_ids"] for out in plain]


def test_graphs_keep_the_output_of_all_sampling_parameters(model_dir: Path) -> None:
    """Some rows are drawn in the graph, others are filtered or reported after it."""
    kinds: list[dict[str, Any]] = [
        dict(temperature=0.0), {}, dict(top_k=5), dict(top_p=0.8, logprobs=2), dict(logprobs=0),
        dict(temperature=0.0, repetition_penalty=1.3), dict(presence_penalty=1.0, min_p=0.1),
    ]  # fmt: skip
    fields = [dict(temperature=1.0, seed=i, max_tokens=9) | kinds[i % 7] for i in range(30)]
    params = [SamplingParams(**some) for some in fields]
    for overlap in (False, True):
        with make_llm(model_dir, overlap=overlap) as llm:
            plain = llm.generate(PROMPTS[:30], params, use_tqdm=False)
            use_graphs(llm)
            again = llm.generate(PROMPTS[:30], params, use_tqdm=False)
        for out, other in zip(again, plain, strict=True):
            assert out["token_ids"] == other["token_ids"]
            assert out["cumulative_logprob"] == pytest.approx(other["cumulative_logprob"])


def test_a_replay_uploads_only_what_has_changed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence, 4 tokens in a block: every fourth step uploads a block.

    Besides, the prefill uploads the sequence, and the first decode step its position.
    """
    sizes = []

    def counting(device: torch.device, *arrays: Any) -> list[torch.Tensor]:
        sizes.append(sum(array.nbytes for array in arrays))
        return upload_ahead(device, *arrays)

    params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    with make_llm(model_dir) as llm:
        steps = use_graphs(llm)
        monkeypatch.setattr("nanovllm.engine.run.device_table.upload_ahead", counting)
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert len(steps) == 40 and len(sizes) == 2 + 10
    assert sizes[2:] == [16] * 10, "a place and a word"


def watch_the_cache(llm: LLM) -> Callable[[], int]:
    """Check after every decode step which slots were written; return a counter of steps."""
    runner = llm.model_runner
    begin, block_size, steps = runner.begin, runner.shard.block_size, 0
    pool = runner.shard.caches.kv
    cache = pool.cache.view(*pool.cache.shape[:2], block_size, -1)

    @torch.inference_mode()
    def checking(batch: Batch) -> Any:
        nonlocal steps
        if batch.is_prefill:
            return begin(batch)
        steps += 1
        real = [
            seq.block_table[seq.num_cached_tokens // block_size] * block_size
            + seq.num_cached_tokens % block_size
            for seq in batch.seqs
        ]
        # A request that runs again may write the same values, so put others there.
        cache.flatten(1, 2)[:, real] = 77.0
        before = cache.clone()
        begun = begin(batch)
        for written in (cache != before).any(-1).flatten(1):  # in each slot
            assert written.nonzero().flatten().tolist() == sorted(real)
        return begun

    runner.begin = checking  # type: ignore[method-assign]
    return lambda: steps


@pytest.mark.parametrize("size", [1, 3, 5, 13, 33])
def test_padding_rows_do_not_write_to_the_cache(size: int, model_dir: Path) -> None:
    """After a full batch, which leaves its rows."""
    with make_llm(model_dir, num_kvcache_blocks=500, enable_prefix_caching=False) as llm:
        use_graphs(llm)
        num_steps = watch_the_cache(llm)
        generate(llm, TOP)
        seen = num_steps()
        generate(llm, size)
        assert num_steps() > seen >= 3


@torch.inference_mode()
def poison(llm: LLM) -> None:
    """Fill all unused rows and entries with what earlier sequences may have left."""
    state, ledger = llm.model_runner.shard.table.columns, llm.model_runner.ledger
    num_rows, num_blocks = len(state.lengths), llm.scheduler.num_blocks
    used = list(ledger._rows.values())
    stale = torch.ones(num_rows, dtype=torch.bool)
    stale[used] = False
    state.tokens[stale] = PENDING
    state.temperatures[stale] = 2.0
    tables = torch.randint(0, num_blocks, state.block_tables.shape, dtype=torch.int32)
    for row in used:
        size = ledger._num_blocks[0][row]
        tables[row, :size] = state.block_tables[row, :size]
    state.block_tables.copy_(tables)
    stale[-1] = False  # the unused row is never given to a sequence
    state.lengths[stale] = torch.randint(1, 100, (int(stale.sum()),), dtype=torch.int32)


@pytest.mark.parametrize("size", [1, 3, 5, 13])
def test_stale_rows_do_not_affect_a_smaller_batch(
    size: int, model_dir: Path, expected: list[list[int]]
) -> None:
    """They are overwritten with random values before every step."""
    with make_llm(model_dir, num_kvcache_blocks=500, enable_prefix_caching=False) as llm:
        use_graphs(llm)
        num_steps = watch_the_cache(llm)
        runner = llm.model_runner
        begin = runner.begin

        def poisoned(batch: Batch) -> Any:
            poison(llm)
            return begin(batch)

        runner.begin = poisoned  # type: ignore[method-assign]
        assert generate(llm, size) == expected[:size]
        assert num_steps() >= 3


def test_padding_rows_attend_to_nothing(model_dir: Path) -> None:
    """Their results are unused, but a stale length would cost time."""
    with make_llm(model_dir) as llm:
        runner = llm.model_runner
        use_graphs(llm)
        attention = runner.shard.backend.attention
        plan, num_checked = attention.plan, 0

        def checking_plan(context: Context) -> None:
            nonlocal num_checked
            if not context.is_prefill:
                assert context.context_lens is not None
                num_rows = len(llm.scheduler.running)
                assert context.context_lens[:num_rows].all()
                assert not context.context_lens[num_rows:].any()
                assert (context.slot_mapping[num_rows:] == -1).all()
                num_checked += len(context.context_lens) > num_rows
            plan(context)

        attention.plan = checking_plan  # type: ignore[method-assign]
        generate(llm, TOP)
        for size in (13, 3, 33):
            poison(llm)
            generate(llm, size)
        assert num_checked >= 10


# On a device


@pytest.fixture(params=["triton", "flash_attn"])
def fast(request: pytest.FixtureRequest) -> str:
    """Each backend that uses graphs; flash-attn where it is installed."""
    name: str = request.param
    pytest.importorskip("flash_attn" if name == "flash_attn" else "triton")
    return name


def device_llm(path: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = dict(
        device="cuda", dtype="bfloat16", kvcache_block_size=256, max_num_seqs=TOP,
        num_kvcache_blocks=200,
    )  # fmt: skip
    return LLM(path, **defaults | options)


MAX_ERROR = 0.5  # of a logit in bf16; a wrong key or length moves logits by their spread, 2.4


def assert_same_but_for_near_ties(
    path: Path,
    first: dict[str, Any],
    second: dict[str, Any],
    batches: list[list[list[int]]],
    num_tokens: int,
) -> None:
    """Two ways to compute in bf16 agree up to the first near-tie of two logits.

    After a near-tie the outputs may differ, so the rest of that prompt is not compared; at least
    half of the prompts must have none.
    """
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    runs = []
    for options in (first, second):
        with device_llm(path, **options) as llm:
            recorder = LogitRecorder(llm)
            outputs = [o for batch in batches for o in llm.generate(batch, params, use_tqdm=False)]
            runs.append([(out["token_ids"], recorder.of(out)) for out in outputs])
    num_same = 0
    for (tokens, logits), (others, other_logits) in zip(*runs, strict=True):
        pairs = enumerate(zip(tokens, others, strict=True))
        same = next((i for i, (token, other) in pairs if token != other), num_tokens)
        error = (logits[: same + 1] - other_logits[: same + 1]).abs().max()
        assert error < MAX_ERROR, f"logits differ by {error} before the tokens do"
        if same < num_tokens:
            rivals = logits[same, [tokens[same], others[same]]]
            assert abs(rivals[0] - rivals[1]) < MAX_ERROR, "other tokens, and no tie"
        num_same += same == num_tokens
    assert 2 * num_same >= len(runs[0])


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head_dim of published models."""
    path = tmp_path_factory.mktemp("wide")
    return make_model(path, hidden_size=256, head_dim=64, max_position_embeddings=2048)


BATCHES = [PROMPTS[:3], PROMPTS[3:24], PROMPTS]  # the last one is larger than the ladder


@pytest.mark.cuda
def test_replay_equals_eager_decode(wide_model: Path, fast: str) -> None:
    backend = dict(attention_backend=fast)
    eager = backend | dict(enforce_eager=True)
    assert_same_but_for_near_ties(wide_model, backend, eager, BATCHES, 24)


@pytest.mark.cuda
def test_a_fast_backend_equals_torch(wide_model: Path, fast: str) -> None:
    backend, torch_backend = dict(attention_backend=fast), dict(attention_backend="torch")
    assert_same_but_for_near_ties(wide_model, backend, torch_backend, BATCHES, 24)


@pytest.mark.cuda
@pytest.mark.parametrize("block_size", [16, 64, 48])
def test_triton_equals_torch_at_other_block_sizes(wide_model: Path, block_size: int) -> None:
    """With chunks, prefix hits and preemptions; flash-attn needs blocks of 256."""
    tight: dict[str, Any] = dict(
        kvcache_block_size=block_size, num_kvcache_blocks=6000 // block_size,
        max_num_batched_tokens=300, max_model_len=1500,
    )  # fmt: skip
    first, second = (tight | dict(attention_backend=name) for name in ("triton", "torch"))
    batches = [[[*range(200), *prompt] for prompt in PROMPTS[:16]], PROMPTS]
    assert_same_but_for_near_ties(wide_model, first, second, batches, 24)


@pytest.mark.cuda
def test_triton_in_float32_equals_torch(wide_model: Path) -> None:
    """The whole step, token for token."""
    runs = []
    for name in ("triton", "torch"):
        with device_llm(wide_model, dtype="float32", attention_backend=name) as llm:
            runs.append(generate(llm, TOP))
    assert runs[0] == runs[1]


@pytest.mark.cuda
def test_replay_computes_with_the_current_lengths(wide_model: Path, fast: str) -> None:
    """One request after the other in one bucket, of lengths around multiples of the block size."""
    lengths = [1, 1100, 254, 255, 256, 257, 700, 2, 510, 511, 512, 513]
    batches = [[[(7 * j + 3 * n) % 259 for j in range(n)]] for n in lengths]
    backend = dict(attention_backend=fast)
    eager = backend | dict(enforce_eager=True)
    assert_same_but_for_near_ties(wide_model, backend, eager, batches, 5)


@pytest.mark.cuda
def test_every_size_of_the_ladder_is_captured_and_replayed(wide_model: Path, fast: str) -> None:
    """In a pool sized from the memory that the graphs leave."""
    sized: dict[str, Any] = dict(num_kvcache_blocks=None, gpu_memory_utilization=0.2)
    with device_llm(wide_model, attention_backend=fast, **sized) as llm:
        graphs = llm.model_runner.shard.graphs
        assert graphs is not None and [*map(Size, batch_ladder(TOP))] == sorted(graphs.graphs)
        padded = graphs.replay
        sizes: list[int] = []

        def recording(size: Size) -> Computed:
            sizes.append(size.num_seqs)
            return padded(size)

        graphs.replay = recording  # type: ignore[method-assign]
        generate(llm, 48)
        assert max(sizes) == TOP and min(sizes) < 8
        del graphs.replay  # a cycle, which would hold the pool's memory


@pytest.mark.cuda
def test_captured_padding_rows_do_not_write_to_the_cache(wide_model: Path, fast: str) -> None:
    options: dict[str, Any] = dict(num_kvcache_blocks=60, enable_prefix_caching=False)
    with device_llm(wide_model, attention_backend=fast, **options) as llm:
        num_steps = watch_the_cache(llm)
        for size in (TOP, 3, 13, 33):
            generate(llm, size)
        assert num_steps() >= 12
