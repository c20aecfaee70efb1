"""Prepare: what shards need before their first step, once the size of their KV pools is known."""

import logging
import time

from nanovllm.config import Config
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.shard import Shard
from nanovllm.engine.step_size import Size
from nanovllm.engine.step_times import time_graphs
from nanovllm.engine.warm_up import warm_up

logger = logging.getLogger("nanovllm")


def prepare(shards: list[Shard], settled: EngineConfig, config: Config) -> None:
    """Give each shard its table, its pool and its graphs. All ranks do it at the same time.

    If the model's steps may have drafts, their graphs are timed; costs.py decides by that.
    """
    for shard in shards:
        _complete(shard, settled, config)
    graphs = shards[0].graphs
    if graphs is not None and shards[0].placement.most_drafts:
        most = max(size.num_seqs for size in graphs.sizes if size.num_queries > 1)
        for shard in shards:
            shard.graph_seconds = time_graphs(shard, most)


def _complete(shard: Shard, settled: EngineConfig, config: Config) -> None:
    num_running = settled.max_num_running
    shard.make_table(num_running, settled.max_model_len)
    shard.pool.allocate(settled.num_kvcache_blocks)
    if shard.device.type == "cuda":
        warm_up(shard, config, num_running)  # compiles kernels; fails here, not in a step
    if shard.placement.uses_graphs:
        start = time.perf_counter()
        num_graphs = shard.capture_graphs(num_running)
        seconds = time.perf_counter() - start
        logger.info("%d decode graphs captured in %.1f s", num_graphs, seconds)
    elif shard.device.type == "cuda":
        shard.decode_graphs(num_running).run(Size(1))  # compiles what decode needs
