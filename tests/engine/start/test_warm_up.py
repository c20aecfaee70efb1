"""What is compiled ahead of the warm-up; plain kernels stand for Triton's."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changed_kernels import changed
from conftest import make_model
from waiting import LIMIT

from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.engine.run.graphs import GraphStep
from nanovllm.engine.run.prefill import Prefills
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.run.step_inputs import StepInputs
from nanovllm.engine.schedule.batch import Size
from nanovllm.engine.start import warm_up
from nanovllm.formats.format import DenseMatrix
from nanovllm.kernels.table import PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 5  # of which the last three have a window


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS, use_sliding_window=True,
        sliding_window=8, max_window_layers=2,
    )  # fmt: skip


@pytest.fixture
def config(path: Path) -> Config:
    return Config(str(path), max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


@pytest.fixture
def shard(config: Config) -> Iterator[Shard]:
    options = dict(attention_backend="torch", dtype="float32", max_num_seqs=4)
    with LLM(config.model, device="cpu", num_kvcache_blocks=8, max_model_len=64, **options) as llm:
        shard = llm.model_runner.shard
        shard.backend = shard.backend._replace(kernels=changed(PLAIN, graph_safe=True))
        with shard.computing():
            yield shard


@pytest.mark.parametrize("uses_graphs", [True, False])
def test_all_sizes_are_compiled_with_two_layers_of_each_kind(
    uses_graphs: bool, shard: Shard, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, sizes, ran, prefills = shard.model.model.layers, [], [], set()
    places = {layer: index for index, layer in enumerate(layers)}
    shard.placement = dataclasses.replace(shard.placement, uses_graphs=uses_graphs)
    step, prefill_hidden = GraphStep.__call__, Prefills.hidden
    monkeypatch.setattr(warm_up, "SHORT", 8)

    def recorded(self: GraphStep, size: Size, out: torch.Tensor) -> object:
        sizes.append(size)
        return step(self, size, out)

    def recorded_prefill(self: Prefills, inputs: StepInputs, needed: Any = None) -> torch.Tensor:
        prefill = inputs.prefill
        assert prefill is not None
        queries, keys = np.diff(prefill.cu_seqlens_q), np.diff(prefill.cu_seqlens_k)
        prefills.add((int(queries.sum()), int(queries.max()), bool((keys > queries).all())))
        return prefill_hidden(self, inputs, needed)

    def compile_in_threads(call: object, device: torch.device) -> None:
        assert callable(call)
        ran.append(([places[layer] for layer in shard.model.model.layers], device))
        call()

    monkeypatch.setattr(GraphStep, "__call__", recorded)
    monkeypatch.setattr(Prefills, "hidden", recorded_prefill)
    monkeypatch.setattr(warm_up, "compile_in_threads", compile_in_threads)
    warm_up.compile_steps(shard, config)
    assert ran == [([0, 1, 2, 3], shard.device)]
    assert sizes == [*map(Size, [1, 2, 4] if uses_graphs else [1])]
    large = {(64, 8, False), (64, 7, True), (64, 64, False), (64, 63, True)}
    assert prefills == large | {(n, n, False) for n in (1, 2, 4, 8, 16, 32)}
    assert shard.model.model.layers is layers
    assert shard.caches.kv.cache.shape[1] == 0


@pytest.mark.parametrize("layer", [1, 4])
def test_layers_with_other_weights_are_compiled_too(
    layer: int, shard: Shard, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of GGUF mix types, and some leave their last layers unquantized. A capture that loads
    a kernel fails."""
    layers, ran = shard.model.model.layers, []
    places = {each: index for index, each in enumerate(layers)}
    layers[layer].mlp.down_proj.matrix = DenseMatrix(torch.zeros(3, 4))
    monkeypatch.setattr(
        warm_up,
        "compile_in_threads",
        lambda *_: ran.extend(places[each] for each in shard.model.model.layers),
    )
    warm_up.compile_steps(shard, config)
    assert sorted(ran) == ([0, 1, 2, 3] if layer == 1 else [0, 1, 2, 3, 4])


@pytest.mark.parametrize("num_running", [4, 3])
def test_sizes_that_the_dry_run_had_not_run_before_their_capture(
    num_running: int, shard: Shard, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of three blocks runs three sequences, and the dry run had sizes of 1, 2 and 4."""
    shard.placement = dataclasses.replace(shard.placement, uses_graphs=True)
    shard.are_loaded, loaded = True, []
    monkeypatch.setattr(warm_up, "warm_up", lambda *_: None)
    monkeypatch.setattr(Shard, "capture_graphs", lambda self, *_: loaded.append(self.are_loaded))
    warm_up.first_steps(shard, config, num_running)
    assert loaded == [num_running == 4]


def test_a_dry_run_without_memory_names_the_options(
    shard: Shard, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = shard.model.model.layers

    def compile_in_threads(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(warm_up, "compile_in_threads", compile_in_threads)
    with pytest.raises(MemoryError, match=r"max_num_batched_tokens=64 with max_num_seqs=4 does"):
        warm_up.compile_steps(shard, config)
    assert shard.model.model.layers is layers


START = """
import sys, threading, triton
from nanovllm import LLM
late = []
def listen(*, src, cache_hit, **_):
    if not cache_hit and threading.current_thread() is threading.main_thread():
        late.append(src.name)
triton.knobs.compilation.listener = listen
LLM(sys.argv[1], device="cuda", attention_backend="triton", dtype="bfloat16", max_num_seqs=64)
print(*late, threading.active_count())
"""


@pytest.mark.cuda
@pytest.mark.slow
def test_a_first_start_compiles_everything_ahead(path: Path, tmp_path: Path) -> None:
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", START, str(path)],
        env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.stdout.split() == ["1"]
