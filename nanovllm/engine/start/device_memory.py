"""Measures the memory of a GPU that the largest step leaves for the KV pool."""

import sys
from typing import NamedTuple

import torch

from nanovllm.config import Config
from nanovllm.engine.engine_config import most_running, most_tokens
from nanovllm.engine.run.shard import Shard
from nanovllm.engine.start.warm_up import warm_up
from nanovllm.kernels.kv_layer import CODES

SAMPLED = 8  # one in SAMPLED sizes of graphs is captured to measure their memory


def free_device_bytes(shard: Shard, config: Config) -> int:
    """Device memory for KV, its copies and states: what remains of the share that may be used.

    The largest prefill and the largest sampling batch are run, and some graphs are captured on a
    placeholder cache.
    """
    device, num_running = shard.device, most_running(config)
    activations = _activation_bytes(shard, config, num_running)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    graphs = _graph_bytes(shard, num_running, most_tokens(config))
    others = total - free
    return int(total * config.gpu_memory_utilization) - others - activations - graphs


def _activation_bytes(shard: Shard, config: Config, num_running: int) -> int:
    """The most memory that a step takes temporarily."""
    shard.make_table(num_running, shard.placement.max_positions)
    shard.caches.allocate(1, num_running)  # without blocks, steps use other kernels
    torch.cuda.reset_peak_memory_stats(shard.device)
    resident = torch.cuda.memory_allocated(shard.device)
    warm_up(shard, config, num_running)
    activations = torch.cuda.max_memory_allocated(shard.device) - resident
    shard.caches.release()
    return activations


def copies_of_cache(shard: Shard) -> float:
    """The memory of attention's copies of KV, as a multiple of the pool's size."""
    groups = shard.caches.groups.groups
    if not groups:
        return 0.0
    of_layer = max(group.layers[0].cache.num_tensors / group.parts for group in groups)  # in slots
    copied = of_layer * shard.backend.attention.copied_layers / shard.caches.groups.num_slots
    if shard.placement.kv_dtype == CODES:  # the copies: codes, then values before and after scaling
        copied *= 1 + 2 * shard.placement.dtype.itemsize
    return copied


def _graph_bytes(shard: Shard, num_running: int, num_tokens: int) -> int:
    """The memory of all graphs, of which only some are captured, on a placeholder cache.

    Graphs share memory for their results: the largest graphs take nearly all of it, and what the
    other sampled ones add is counted twice. The memory of their launches grows with each graph.
    """
    if not shard.placement.uses_graphs:
        return 0
    shard.caches.allocate(1, num_running)
    free, reserved = _memory(shard)
    taken = []
    for one_in in (sys.maxsize, SAMPLED):
        shard.capture_graphs(num_running, num_tokens, one_in)
        torch.cuda.empty_cache()  # of steps that ran before their capture
        left, results = _memory(shard)
        number, number_of_all = _numbers(shard)
        taken.append(Graphs(number, free - left, results - reserved))
        shard.drop_graphs()  # nothing may refer to them: their buffers would be measured again
    shard.caches.release()
    torch.cuda.empty_cache()
    largest, sampled = taken
    return bytes_of_all(largest, sampled, number_of_all)


class Graphs(NamedTuple):
    """The memory of captured graphs: all of it, and what their results take."""

    number: int
    num_bytes: int
    results: int


def bytes_of_all(largest: Graphs, sampled: Graphs, number: int) -> int:
    """The memory of `number` graphs, of which the sampled ones were captured."""
    results = max(0, sampled.results - largest.results)
    launches = max(0, sampled.num_bytes - largest.num_bytes - results)
    others = (number - sampled.number) / max(1, sampled.number - largest.number)
    return sampled.num_bytes + results + int(launches * others)


def _numbers(shard: Shard) -> tuple[int, int]:
    """How many graphs are captured, and how many sizes there are."""
    kinds = [graphs for graphs in (shard.graphs, shard.short_prefills) if graphs is not None]
    return sum(len(each.graphs) for each in kinds), sum(len(each.sizes) for each in kinds)


def _memory(shard: Shard) -> tuple[int, int]:
    """The device's free memory, and what PyTorch has of it."""
    free, _ = torch.cuda.mem_get_info(shard.device)
    return free, torch.cuda.memory_reserved(shard.device)
