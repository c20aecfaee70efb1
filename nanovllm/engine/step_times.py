"""How long decode graphs take, measured when an engine that speculates starts."""

import logging
import time

import torch

from nanovllm.engine.shard import Shard
from nanovllm.engine.step_size import Size

ROUNDS = 4  # of all graphs: what disturbs one of them seldom lasts for all its rounds

logger = logging.getLogger("nanovllm")


def time_graphs(shard: Shard, most_seqs: int) -> dict[Size, float]:
    """Seconds of the graphs for up to `most_seqs` sequences, each the least of several.

    All ranks do it at the same time, before anything is cached. Tokens differ, as the time of a
    layer of experts depends on them, and contexts are short.
    """
    graphs = shard.graphs
    assert graphs is not None
    state, layout = shard.table.state, shard.table.layout
    some = torch.arange(layout.num_rows * (1 + layout.most_drafts), device=shard.device)
    tokens = (some * 7919 % shard.vocab_size).view(layout.num_rows, -1)
    state.tokens.copy_(tokens[:, 0])
    state.drafts.tokens.copy_(tokens[:, 1:])
    state.drafts.are_given.fill_(1)
    state.drafts.limits.fill_(layout.max_blocks * shard.block_size)
    state.batch.copy_(some[: layout.num_rows])
    start = time.perf_counter()
    sizes = [
        size
        for size in graphs.sizes
        if size.num_seqs <= most_seqs and size.num_queries <= layout.max_blocks * shard.block_size
    ]
    rounds = [[_seconds(shard, size) for size in sizes] for _ in range(ROUNDS)]
    seconds = dict(zip(sizes, map(min, *rounds), strict=True))
    shard.table.clear()
    logger.info("%d decode graphs timed in %.1f s", len(seconds), time.perf_counter() - start)
    return seconds


def _seconds(shard: Shard, size: Size) -> float:
    assert shard.graphs is not None
    wait = torch.cuda.synchronize if shard.device.type == "cuda" else torch.cpu.synchronize
    shard.table.state.lengths.zero_()
    wait(shard.device)
    start = time.perf_counter()
    shard.graphs.replay(size)
    wait(shard.device)
    return time.perf_counter() - start
