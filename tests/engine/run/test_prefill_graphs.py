"""Short prefills by graphs: sizes, padding, and on a device capture and replay.

On the CPU a replay calls the model, so that everything except the capture runs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_model
from drafts import sizes_of_short_prefills

from nanovllm import LLM, SamplingParams
from nanovllm.engine.run.padded import PrefillSize
from nanovllm.engine.run.prefill_graphs import (
    TOKENS,
    PaddedArrays,
    PrefillGraphs,
    lengths_of,
    prefill_graphs,
    sizes_up_to,
)
from nanovllm.engine.run.step_inputs import PrefillInputs

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

LENGTHS = [1, 15, 16, 17, 40, 3, 64, 2, 30, 200]
PROMPTS = [[(11 * i + 7 * j * j) % 259 for j in range(n)] for i, n in enumerate(LENGTHS)]
PARAMS = [SamplingParams(temperature=0, max_tokens=3 + i % 4, ignore_eos=True) for i in range(10)]


def make_llm(path: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = dict(
        device="cpu", dtype="float32", cpu_kvcache_gib=0.05, kvcache_block_size=4,
        attention_backend="torch", max_num_seqs=16,
    )  # fmt: skip
    return LLM(path, **defaults | options)


def use_graphs(llm: LLM) -> list[PrefillSize]:
    """Make short prefills run in padded sizes; return a list that will hold the sizes."""
    shard = llm.model_runner.shard
    shard.short_prefills = prefill_graphs(shard, llm.config.max_num_running)
    return sizes_of_short_prefills(llm)


def token_ids(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [
        out["token_ids"] for out in llm.generate(prompts, PARAMS[: len(prompts)], use_tqdm=False)
    ]


@pytest.fixture(scope="module")
def windowed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cache groups: one layer has a window, the other one has none."""
    return make_model(
        tmp_path_factory.mktemp("windowed"), family="Qwen2", num_hidden_layers=2,
        use_sliding_window=True, sliding_window=20, max_window_layers=1,
    )  # fmt: skip


@pytest.fixture(params=["plain", "windowed"])
def model(request: pytest.FixtureRequest, model_dir: Path, windowed_dir: Path) -> Path:
    return {"plain": model_dir, "windowed": windowed_dir}[request.param]


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_batched_tokens=600),
        dict(max_num_batched_tokens=13),
        dict(max_num_batched_tokens=70, num_kvcache_blocks=96),
        dict(max_num_batched_tokens=70, scheduling="mixed", overlap=True),
        dict(
            max_num_batched_tokens=70,
            speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        ),
    ],
    ids=["whole", "chunks", "preempted", "mixed", "n-grams"],
)
def test_padding_keeps_the_output(model: Path, options: dict[str, Any]) -> None:
    with make_llm(model, **options) as llm:
        expected = token_ids(llm)
    with make_llm(model, **options) as llm:
        sizes = use_graphs(llm)
        assert token_ids(llm) == expected
        assert sizes, "no prefill ran in a size"
        again = token_ids(llm)  # on prefix hits, with stale padding of the last steps
    assert again == expected


def test_a_prefill_runs_in_the_next_larger_size(model_dir: Path) -> None:
    with make_llm(model_dir, enable_prefix_caching=False) as llm:
        sizes = use_graphs(llm)
        for length in (1, 16, 17, 33, 200):
            llm.generate([[5] * length], SamplingParams(max_tokens=1), use_tqdm=False)
        assert [size.num_tokens for size in sizes] == [16, 16, 32, 48, 256]


@pytest.mark.parametrize("has_marks", [False, True])
def test_every_short_prefill_has_a_size_with_little_padding(has_marks: bool) -> None:
    sizes = sizes_up_to(64, has_marks=has_marks)
    assert len({*sizes}) == len(sizes) and {size.num_tokens for size in sizes} == {*TOKENS}
    graphs = PrefillGraphs.__new__(PrefillGraphs)
    graphs.sizes = sizes
    for tokens in range(1, TOKENS[-1] + 1):
        found = graphs.fitting(tokens, 1, 1, has_marks)
        assert found is not None and found.num_tokens <= (2 if has_marks else 1.5) * tokens + 32
        assert found.is_marked == has_marks
    assert graphs.fitting(TOKENS[-1] + 1, 1, 1, has_marks) is None


@pytest.mark.parametrize(("budget", "largest"), [(1, 16), (16, 16), (17, 32), (700, 768)])
def test_no_size_is_larger_than_steps_need(budget: int, largest: int) -> None:
    for has_marks in (False, True):
        sizes = sizes_up_to(3, budget, has_marks)
        assert max(size.num_tokens for size in sizes) == largest
        assert {size.num_seqs for size in sizes} == {9}, "Hopper's kernel does not clear rows"
        assert {size.is_marked for size in sizes} == {False, has_marks}


@pytest.mark.parametrize(
    ("tokens", "seqs", "needed", "found"),
    [(16, 8, 8, (16, 9)), (16, 9, 8, (48, 13)), (17, 1, 1, (32, 9)), (10, 1, 10, None),
     (100, 64, 64, (128, 65)), (100, 30, 30, (128, 33)), (200, 64, 64, (256, 65)),
     (129, 64, 65, None), (2049, 1, 1, None)],
)  # fmt: skip
def test_one_sequence_of_a_size_stays_unused(
    tokens: int, seqs: int, needed: int, found: tuple[int, int] | None
) -> None:
    graphs = PrefillGraphs.__new__(PrefillGraphs)
    graphs.sizes = sizes_up_to(64)
    fitting = graphs.fitting(tokens, seqs, needed)
    assert (fitting and fitting[:2]) == found


def test_arrays_are_padded_behind_their_ends() -> None:
    size = PrefillSize(6, 4)
    memory = torch.full((sum(lengths_of(size, 2)),), 99)
    arrays = PaddedArrays.of(memory, size, 2)
    prefill = PrefillInputs(
        input_ids=np.array([7, 8, 9]), positions=np.array([0, 1, 5]),
        slot_mapping=np.array([10, 11, 12, 20, 21, 22]),
        cu_seqlens_q=np.array([0, 2, 3], np.int32), cu_seqlens_k=np.array([0, 2, 8], np.int32),
        table_rows=np.array([3, 1]), sample_table_rows=np.array([3, 1]),
        sampled_tokens=np.array([1, 2]),
    )  # fmt: skip
    arrays.fill(prefill, prefill.sampled_tokens, unused_row=15)
    assert arrays.input_ids.tolist() == [7, 8, 9, 0, 0, 0]
    assert arrays.slots.tolist() == [[10, 11, 12, -1, -1, -1], [20, 21, 22, -1, -1, -1]]
    assert arrays.table_rows.tolist() == [3, 1, 15, 15]
    assert arrays.needed.tolist() == [1, 2, 0, 0]
    assert arrays.q_ends.tolist() == [0, 2, 3, 3, 3]
    assert arrays.k_ends.tolist() == [0, 2, 8, 8, 8]


def test_models_without_attention_have_no_such_graphs(tmp_path: Path) -> None:
    with make_llm(make_model(tmp_path, family="Lfm2", layer_types=["conv", "conv"])) as llm:
        assert prefill_graphs(llm.model_runner.shard, 4) is None


@pytest.fixture(scope="module")
def on_gpu(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, device="cuda", dtype="float32", max_num_seqs=16) as llm:
        yield llm


@pytest.mark.cuda
def test_replays_equal_steps_without_graphs(on_gpu: LLM) -> None:
    shard = on_gpu.model_runner.shard
    graphs = shard.short_prefills
    assert isinstance(graphs, PrefillGraphs) and len(graphs.graphs) == len(graphs.sizes)
    replayed = token_ids(on_gpu)
    on_gpu.llm_engine.reset_prefix_cache()
    shard.short_prefills = None
    try:
        assert token_ids(on_gpu) == replayed
    finally:
        shard.short_prefills = graphs
