"""Measure how long decode graphs take, and how long a draft model takes to catch up.

An engine with drafts measures this when it starts.
"""

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from nanovllm.drafting.catch_up import warm_up_step
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.schedule.batch import Size
from nanovllm.engine.start.warm_up import warmup_inputs

MOST_LOOKUP = 32  # the most tokens of an n-gram
FEW_TOKENS = 8  # tokens of the step that measures catching up
ROUNDS = 4  # of all graphs: a disturbance seldom lasts for all rounds of a graph

logger = logging.getLogger("nanovllm")


class StepTimes(NamedTuple):
    """The seconds of each decode graph, and of a short step to catch up, if they were measured."""

    graphs: Mapping[Size, float] = {}
    catch_up: float = 0.0


def time_graphs(shard: Shard) -> dict[Size, float]:
    """Seconds of the graphs for batches that may have drafts: the least of several rounds.

    All ranks do it at the same time, before anything is cached. Tokens differ, as the time of a
    layer of experts depends on them. Contexts are short and repeat themselves, so that n-grams are
    found.
    """
    graphs = shard.graphs
    assert graphs is not None
    state, layout = shard.table.columns, shard.table.layout
    period, most_tokens = 1 + layout.most_drafts, layout.max_blocks * shard.block_size
    some = torch.arange(layout.num_rows * period, device=shard.device)
    length = max(0, min(period + MOST_LOOKUP, most_tokens - period))
    where = torch.arange(length + 1, device=shard.device) % period
    texts = (some * 7919 % shard.model_config.vocab_size).view(layout.num_rows, period)[:, where]
    state.tokens.copy_(texts[:, -1])
    state.drafts.history[:, : length + 1] = texts[:, : layout.longest]
    state.drafts.counts.fill_(1)
    state.drafts.limits.fill_(most_tokens)
    state.batch.copy_(some[: layout.num_rows])
    start = time.perf_counter()
    most = max(size.num_seqs for size in graphs.sizes if size.num_queries > 1)
    plain = (size for size in graphs.sizes if not size.is_marked)
    sizes = [s for s in plain if s.num_seqs <= most and s.num_queries <= most_tokens]
    rounds = [[_seconds(shard, size, length) for size in sizes] for _ in range(ROUNDS)]
    seconds = dict(zip(sizes, map(min, *rounds), strict=True))
    shard.table.clear()
    logger.info("%d decode graphs timed in %.1f s", len(seconds), time.perf_counter() - start)
    return seconds


def time_catch_up(shard: Shard, longest: int | None) -> float:
    """Seconds in which the draft model computes a few tokens; 0 without one.

    It computes the first `longest` tokens of sequences. All ranks do it at the same time.
    """
    if not longest:
        return 0.0
    inputs = warm_up_step(warmup_inputs(FEW_TOKENS, FEW_TOKENS), 0, longest)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        shard.catch_up(inputs)
        _wait(shard)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _seconds(shard: Shard, size: Size, length: int) -> float:
    """The seconds of a step in which each sequence has `length` tokens in the cache."""
    assert shard.graphs is not None
    shard.table.columns.lengths.fill_(length)
    _wait(shard)
    start = time.perf_counter()
    shard.graphs.replay(size)
    _wait(shard)
    return time.perf_counter() - start


def _wait(shard: Shard) -> None:
    wait = torch.cuda.synchronize if shard.device.type == "cuda" else torch.cpu.synchronize
    wait(shard.device)
