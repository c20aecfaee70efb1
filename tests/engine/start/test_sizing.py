"""How much device memory the KV cache gets; a CPU stands for the device."""

import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import make_model
from thread_ranks import on_ranks

from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.engine.cache.pools import CacheBytes
from nanovllm.engine.run.graphs import DecodeGraphs
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.schedule.batch import Size
from nanovllm.engine.start import device_memory, sizing
from nanovllm.engine.start.device_memory import Graphs, bytes_of_all
from nanovllm.layers.ranks import Ranks
from nanovllm.utils.resources import MIB

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, TOTAL, OTHERS = 5, 1 << 30, 1 << 28


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "copies"),
    [("auto", 1), ("fp8", 1 + 2 * 4)],  # of a layer, by the bytes that the cache has for it
)
@pytest.mark.parametrize(("backend", "copied_layers"), [("torch", 2), ("cpu", 0)])
def test_memory_is_left_for_the_copies_of_the_cache(
    kv_cache_dtype: str, copies: int, backend: str, copied_layers: int, path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Plain PyTorch gathers what it attends to: codes too, and their values twice, in float32."""
    for name in ("reset_peak_memory_stats", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (TOTAL - OTHERS, TOTAL))
    config = Config(str(path), max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
    options: dict[str, Any] = dict(
        kv_cache_dtype=kv_cache_dtype, attention_backend=backend, dtype="float32"
    )
    with LLM(path, device="cpu", num_kvcache_blocks=4, max_model_len=64, **options) as llm:
        shard, device = llm.model_runner.shard, SimpleNamespace(type="cuda")
        of_block = shard.caches.kv.block_bytes
        # A block's share of checkpoints, and the states of running sequences, are not copied.
        sizes = CacheBytes(of_block + 1000, before=5 * MIB)
        monkeypatch.setattr(shard.caches, "num_bytes", lambda num_running: sizes)
        with shard.computing():
            left = device_memory.free_device_bytes(shard, config) - sizes.before
            monkeypatch.setattr(shard, "device", device)
            monkeypatch.setattr(device_memory, "free_device_bytes", lambda *_: left + sizes.before)
            found = sizing.fit_kv_blocks(shard, config)
            monkeypatch.undo()
    assert left == int(TOTAL * config.gpu_memory_utilization) - OTHERS - sizes.before
    of_copies = of_block * copied_layers * copies / LAYERS
    assert found == int(left / (of_block + 1000 + of_copies))


def test_all_ranks_have_the_blocks_of_the_smallest_pool() -> None:
    """The ranks share the host's memory. Blocks of 16 and 8 MiB in 512 MiB each: 32 and 64 fit."""
    config = Config("m", cpu_kvcache_gib=1, max_num_seqs=4, max_num_batched_tokens=64)

    def fit(ranks: Ranks) -> int:
        size = CacheBytes(16 * MIB >> ranks.rank, before=0)
        groups = SimpleNamespace(groups=[None])
        caches = SimpleNamespace(num_bytes=lambda num_running: size, groups=groups)
        shard: Any = SimpleNamespace(caches=caches, device=torch.device("cpu"), ranks=ranks)
        return sizing.fit_kv_blocks(shard, config)

    assert on_ranks(2, fit) == [32, 32]


def test_no_sequence_may_be_longer_than_the_pool(path: Path) -> None:
    """It could never end."""
    with LLM(path, device="cpu", num_kvcache_blocks=4, kvcache_block_size=16) as llm:
        assert llm.config.max_model_len == 64


def test_the_measured_step_stores_into_a_block(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As later steps do: without blocks it would compile kernels of its own, which store nothing.

    The block is free again when the memory is read.
    """
    blocks: list[int] = []

    def note(shard: Shard, *_: Any) -> None:
        blocks.append(shard.caches.kv.cache.shape[1])

    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(device_memory, "warm_up", note)
    config = Config(str(path), max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)
    with LLM(path, device="cpu", num_kvcache_blocks=4, max_model_len=64) as llm:
        shard = llm.model_runner.shard

        def mem_get_info(_: torch.device) -> tuple[int, int]:
            note(shard)
            return TOTAL - OTHERS, TOTAL

        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        with shard.computing():
            device_memory.free_device_bytes(shard, config)
    assert blocks == [1, 0]


def test_graphs_that_are_not_captured_are_counted() -> None:
    """The sampled ones took 9 MiB of results beyond the largest, and 2 each for launches."""
    largest = Graphs(2, 130 * MIB, results=100 * MIB)
    sampled = Graphs(5, 145 * MIB, results=109 * MIB)
    assert bytes_of_all(largest, sampled, 65) == (145 + 9 + 60 * 2) * MIB
    assert bytes_of_all(largest, largest, 3) == largest.num_bytes


def test_the_buffers_of_measured_graphs_are_freed_before_others_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the logits of all rows are measured twice."""
    made: list[weakref.ref[DecodeGraphs]] = []
    shard = mock.Mock(short_prefills=None)

    def capture(num_running: int, num_tokens: int, one_in: int) -> None:
        assert not any(each() for each in made)
        step: Any = lambda size, out: size  # noqa: E731
        shard.graphs = DecodeGraphs(step, [*map(Size, range(1, 18))], torch.empty(17, 1))
        made.append(weakref.ref(shard.graphs))
        shard.graphs.capture(lambda run: (mock.Mock(), run()), one_in)

    def drop() -> None:
        shard.graphs = None

    shard.capture_graphs, shard.drop_graphs = capture, drop
    memory = iter([(100, 0), (90, 4), (76, 4)])
    monkeypatch.setattr(device_memory, "_memory", lambda _: next(memory))
    # Two more graphs took 14, so the 14 others take 98.
    assert device_memory._graph_bytes(shard, 17, 64) == 24 + 98
    assert len(made) == 2


def test_one_in_some_sizes_is_captured_from_the_largest_one_on() -> None:
    sizes = [Size(rows) for rows in (1, 2, 4, 8, 12)]
    step: Any = lambda size, out: size  # noqa: E731
    capture: Any = lambda run: (None, run())  # noqa: E731
    graphs = DecodeGraphs(step, sizes, torch.empty(12, 1))
    for one_in, captured in ((1, [12, 8, 4, 2, 1]), (2, [12, 4, 1]), (sys.maxsize, [12])):
        graphs.capture(capture, one_in)
        assert [size.num_seqs for size in graphs.graphs] == captured
        graphs.graphs.clear()
