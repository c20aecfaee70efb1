"""Prepare: what a shard needs before its first step, once the size of its KV pool is known."""

import logging
import time

from nanovllm.config import Config
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.schedule.step_size import Size
from nanovllm.engine.start.warm_up import warm_up

logger = logging.getLogger("nanovllm")


def prepare(shard: Shard, settled: EngineConfig, config: Config) -> None:
    """Give the shard its table, its pool and its graphs. All ranks do it at the same time."""
    num_running = settled.max_num_running
    shard.make_table(num_running, settled.max_model_len)
    if shard.memory is not None:
        shard.caches.take_memory_from(shard.memory.pool)
    shard.caches.allocate(settled.num_kvcache_blocks, num_running)
    shard.caches.log_states()
    if shard.device.type == "cuda":
        warm_up(shard, config, num_running)  # compiles kernels; fails here, not in a step
    if shard.placement.uses_graphs:
        start = time.perf_counter()
        num_graphs = shard.capture_graphs(num_running)
        seconds = time.perf_counter() - start
        logger.info("%d decode graphs captured in %.1f s", num_graphs, seconds)
        shard.drafting.measure(shard)
    elif shard.device.type == "cuda":
        shard.decode_graphs(num_running).run(Size(1))  # compiles what decode needs
