"""Startup: from options to an engine that can run. The one way in, for rank 0 and the others.

Settle the options, load this rank's part of the model, size the KV pool, warm up, capture graphs.
"""

import logging
import time
from pathlib import Path

import torch

from nanovllm.config import Config
from nanovllm.engine.draft import Source
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.guess.head_source import HeadSource
from nanovllm.engine.kv_pool import settle_length
from nanovllm.engine.model_runner import ModelRunner, close_ranks
from nanovllm.engine.placement import Placement, resolve_placement
from nanovllm.engine.prepare import prepare
from nanovllm.engine.shard import Shard
from nanovllm.engine.sizing import fit_kv_blocks
from nanovllm.engine.warm_up import compile_steps
from nanovllm.engine.workers import Workers, threads_of_rank
from nanovllm.layers.ranks import ALONE
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.formats import Formats
from nanovllm.models.held_bytes import held_bytes
from nanovllm.models.loader import errors_name, load_dummy, load_model, read_types
from nanovllm.models.windows import longest
from nanovllm.utils.heap import trim_heap
from nanovllm.utils.sizes import memory_text

logger = logging.getLogger("nanovllm")


def start_runner(
    config: Config, model_config: ModelConfig, path: Path, draft: Source | None = None
) -> ModelRunner:
    """Rank 0's runner, ready to run, and the workers that it drives."""
    if config.tensor_parallel_size == 1:
        placement = resolve_placement(config, model_config, ALONE)
        config = placement.settle(config)
        alone = load_shards(config, model_config, path, placement, threads_of_rank(1), draft)
        return ModelRunner(alone, start_shards(alone, config))
    workers = Workers(config.tensor_parallel_size, config.device)
    shards: list[Shard] = []
    try:
        with workers.together():
            placement = resolve_placement(config, model_config, workers.ranks)
            config = placement.settle(config)
            workers.start(config, model_config, path, draft)
            shards = load_shards(config, model_config, path, placement, workers.num_threads, draft)
            workers.connect()
            return ModelRunner(shards, start_shards(shards, config), workers)
    except BaseException:
        close_ranks(shards, workers)
        raise


def load_shards(
    config: Config,
    model_config: ModelConfig,
    path: Path,
    placement: Placement,
    num_threads: int | None = None,
    draft: Source | None = None,
) -> list[Shard]:
    """Load this rank's part of the model, and of the draft model or the head if there is one."""
    shards = [load_shard(config, model_config, path, placement, num_threads)]
    if isinstance(draft, HeadSource):
        shards[0].guess_with(draft.load(config, shards[0].model, placement))
    elif draft is not None:
        with draft.errors_name_it():
            shards.append(load_shard(*draft.placed(config, placement), num_threads))
    return shards


def load_shard(
    config: Config,
    model_config: ModelConfig,
    path: Path,
    placement: Placement,
    num_threads: int | None = None,
) -> Shard:
    """Load this rank's part of the model. `config` is settled by the placement."""
    start = time.perf_counter()
    with errors_name(path):
        formats = choose_formats(config, model_config, path)
        model = build_model(config, model_config, placement, formats)
    with torch.no_grad():
        if config.load_format == "dummy":
            with torch.device("meta"):
                whole = CausalLM(model_config, placement.max_positions, formats=formats)
            load_dummy(model, whole, config.seed)
        else:
            load_model(model, path, use_tqdm=placement.ranks.rank == 0)
        num_bytes = held_bytes(model)
        # Without graphs, launching few_rows takes the host longer than it saves the device.
        with errors_name(path):
            model.bind(placement.backend, few_rows=not config.enforce_eager)
    trim_heap()
    logger.info(
        "%s on %s in %s, %s loaded in %.1f s; quantized: %s; attention: %s, other kernels: %s",
        model_config.architecture, placement.device, str(placement.dtype).removeprefix("torch."),
        memory_text(num_bytes), time.perf_counter() - start,
        "; ".join(model_config.quantization.descriptions) or "no", placement.backend.attention.name,
        placement.backend.kernels.name,
    )  # fmt: skip
    return Shard(model.eval(), model_config, placement, num_threads)


def choose_formats(config: Config, model_config: ModelConfig, path: Path) -> Formats:
    """How the layers' weights are stored. Of quantized files it reads the names and types."""
    reads = model_config.quantization.files != "plain" and config.load_format != "dummy"
    return Formats(model_config.quantization, read_types(path) if reads else None)


def build_model(
    config: Config, model_config: ModelConfig, placement: Placement, formats: Formats
) -> CausalLM:
    """The model with parameters that are not filled yet, on the placement's device."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(placement.dtype)
    try:
        with placement.device, torch.inference_mode(False):
            return CausalLM(
                model_config, placement.max_positions, placement.ranks,
                config.enable_expert_parallel, formats,
            )  # fmt: skip
    except (MemoryError, RuntimeError) as error:
        # The type and the text by which the allocators of GPU and CPU are known.
        is_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_of_memory and "DefaultCPUAllocator" not in str(error):
            raise
        raise MemoryError(
            f"no memory on {placement.device} for a model with {model_config.sizes}, at"
            f" {placement.max_positions} positions (max_model_len)"
        ) from error
    finally:
        torch.set_default_dtype(previous)


def start_shards(shards: list[Shard], config: Config) -> EngineConfig:
    """Size the KV pools, compile and capture. All ranks do it at the same time.

    The first shard is the model's. The pools have the same blocks, by the same numbers.
    """
    shard = shards[0]
    with shard.computing():
        shard.ranks.connect_peers(shard.backend.kernels.peers)
        for one in shards:
            one.model.model.agree_on_few_rows()
            compile_steps(one, config)
        num_blocks = config.num_kvcache_blocks or fit_kv_blocks(shards, config)
        max_model_len = settle_length(
            config.max_model_len, shard.pool, num_blocks, shard.placement.max_positions,
            longest(one.longest_window for one in shards),
        )  # fmt: skip
        settled = EngineConfig.settle(config, num_blocks, max_model_len)
        prepare(shards, settled, config)
    return settled
