"""Startup: from options to an engine that can run. Rank 0 and the other ranks start here.

Settle the options, load this rank's part of the model, size the KV pool, warm up, capture graphs.
"""

from pathlib import Path

from nanovllm.config import Config
from nanovllm.engine.cache.groups import are_alike, single_group
from nanovllm.engine.cache.pools import CachePools, KVPool
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.run.device_drafting import DeviceDrafting
from nanovllm.engine.run.model_runner import ModelRunner, close_ranks
from nanovllm.engine.run.other_ranks import OtherRanks
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.start.load import load_part
from nanovllm.engine.start.parts import NO_PARTS, ShardParts
from nanovllm.engine.start.placement import Placement, resolve_placement
from nanovllm.engine.start.sizing import fit_kv_blocks, settle_length
from nanovllm.layers.cache_spec import State
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM


def start_runner(
    config: Config, model_config: ModelConfig, path: Path, parts: ShardParts = NO_PARTS
) -> ModelRunner:
    """Start rank 0's runner, with the workers that it drives."""
    workers = other_ranks(config)
    shard: Shard | None = None
    try:
        with workers.together():
            placement = resolve_placement(config, model_config, workers.ranks)
            config = placement.settle(config)
            workers.start(config, model_config, path, parts)
            shard = load_shard(config, model_config, path, placement, workers.num_threads, parts)
            workers.connect()
            return ModelRunner(shard, start_shard(shard, config), workers)
    except BaseException:
        close_ranks(shard, workers)
        raise


def other_ranks(config: Config) -> OtherRanks:
    """The ranks that rank 0 drives: none, or processes that this starts."""
    if config.tensor_parallel_size == 1:
        return OtherRanks()
    from nanovllm.engine.ranks.workers import Workers

    return Workers(config.tensor_parallel_size, config.device, config.batch_invariant)


def load_shard(
    config: Config,
    model_config: ModelConfig,
    path: Path,
    placement: Placement,
    num_threads: int | None = None,
    parts: ShardParts = NO_PARTS,
) -> Shard:
    """Load this rank's part of the model, and make the parts that features add."""
    model = load_part(config, model_config, path, placement)
    drafting = DeviceDrafting()
    if parts.drafting is not None:
        drafting = parts.drafting.load(config, model, placement)
    steps = [make(config, model, placement) for make in parts.step_parts]
    memory = parts.memory(placement.device) if parts.memory else None
    caches = cache_pools(model, placement, drafting)
    return Shard(
        model, model_config, placement, caches, num_threads, drafting, steps, memory, parts.redraws
    )


def cache_pools(model: CausalLM, placement: Placement, drafting: DeviceDrafting) -> CachePools:
    """Make the pools of this rank's layers, and of draft models' layers. They are empty."""
    if are_alike(model.attentions):
        groups = single_group(model.attentions)
    else:
        from nanovllm.engine.cache.divide import divide

        groups = divide(model.attentions, placement.max_positions, drafting.longest_window)
    drafting.check(groups)
    device, block_size = placement.device, placement.block_size
    kv = KVPool(groups, block_size, placement.kv_dtype, device, drafting.pools)
    if not any(isinstance(mixer.cache, State) for mixer in model.mixers):
        return CachePools(kv)
    from nanovllm.engine.cache.pools_with_states import PoolsWithStates

    slots_each, caches_prefixes = 1 + placement.most_rejected, placement.caches_prefixes
    return PoolsWithStates(kv, model.mixers, placement.dtype, slots_each, caches_prefixes)


def start_shard(shard: Shard, config: Config) -> EngineConfig:
    """Size the KV pool, make it, compile and capture. All ranks do it at the same time."""
    with shard.computing():
        if shard.memory is not None:
            shard.memory.take_over(shard.models)
        shard.ranks.connect_peers(shard.backend.kernels.peers)
        if shard.ranks.size > 1:
            from nanovllm.layers.few_rows import agreed_few_rows

            for decoder in (model.model for _, model in shard.models):
                decoder.few_rows = agreed_few_rows(decoder.few_rows, decoder.norm, shard.ranks)
        if shard.backend.kernels.graph_safe:  # Triton's
            from nanovllm.engine.start.warm_up import compile_steps

            compile_steps(shard, config)
        num_blocks = (config.num_kvcache_blocks or 0) * max(1, len(shard.caches.groups.groups))
        num_blocks = num_blocks or fit_kv_blocks(shard, config)
        max_model_len = settle_length(
            config.max_model_len, shard.caches.kv, num_blocks, shard.placement.max_positions
        )
        settled = EngineConfig.settle(
            config, num_blocks, max_model_len, has_kv=bool(shard.caches.groups.groups)
        )
        shard.make_table(settled.max_num_running, max_model_len)
        new_memory = shard.memory.pool if shard.memory is not None else None
        shard.caches.allocate(num_blocks, settled.max_num_running, new_memory)
        shard.caches.log()
        if shard.device.type == "cuda":
            from nanovllm.engine.start.warm_up import first_steps

            first_steps(shard, config, settled.max_num_running)
        return settled
