"""Sizing: how many KV blocks fit in memory, and how long sequences may be with them."""

import logging
import sys
from collections.abc import Sequence

from nanovllm.config import Config
from nanovllm.engine.cache.caches import block_manager_for
from nanovllm.engine.cache.pools import KVPool
from nanovllm.engine.engine_config import most_running
from nanovllm.engine.run.shard import Shard
from nanovllm.utils.resources import GIB, MIB, memory_text

logger = logging.getLogger("nanovllm")

MAX_GIB = 1 << 30  # more than any machine has: an infinite option becomes a finite integer


def fit_kv_blocks(shard: Shard, config: Config) -> int:
    """How many blocks fit in the memory that is left, on the rank with the least."""
    block_bytes, own_bytes = shard.caches.num_bytes(most_running(config))
    of_copies = 0.0
    if shard.device.type == "cpu":
        budget = int(min(config.cpu_kvcache_gib, MAX_GIB) * GIB) // shard.ranks.size
        option, hint = f"cpu_kvcache_gib={config.cpu_kvcache_gib}", "raise it"
    else:
        from nanovllm.engine.start import device_memory

        budget = device_memory.free_device_bytes(shard, config)
        option = f"gpu_memory_utilization={config.gpu_memory_utilization}"
        hint = "raise it, or lower max_num_batched_tokens"
        of_copies = device_memory.copies_of_cache(shard) * shard.caches.kv.block_bytes
    if own_bytes > budget:
        raise ValueError(
            f"{option} leaves {max(budget, 0) / MIB:.3f} MiB for the states of sequences, those of"
            f" {most_running(config)} take {own_bytes / MIB:.3f} MiB; {hint}, or lower max_num_seqs"
        )
    left = budget - own_bytes
    if not shard.caches.groups.groups:  # here blocks only count tokens for checkpoints, if any
        return shard.ranks.minimum(max(1, left // block_bytes if block_bytes else 1))
    num_blocks = shard.ranks.minimum(int(left / (block_bytes + of_copies)))
    if num_blocks < 1:
        raise ValueError(
            f"{option} leaves {max(left, 0) / MIB:.3f} MiB for the KV cache, one block takes"
            f" {block_bytes / MIB:.3f} MiB; {hint}"
        )
    return num_blocks


def settle_length(asked: int | None, pool: KVPool, num_blocks: int, max_positions: int) -> int:
    """The `max_model_len` in use: a sequence of that length fits in `num_blocks`.

    `max_positions` is the length that the user `asked` for, or else the model's own.
    """
    block_size, windows = pool.block_size, pool.groups.windows
    share = "cpu_kvcache_gib" if pool.device.type == "cpu" else "gpu_memory_utilization"
    way_out = f"raise num_kvcache_blocks if it is set, or {share}"
    manager = block_manager_for(windows)
    limits = [manager.most_held(window, block_size) for window in windows]
    longest = longest_sequence(num_blocks, block_size, limits)
    if longest < 1:
        raise ValueError(
            f"the KV pool has {num_blocks} block{'s' * (num_blocks != 1)}, too few for"
            f" {len(windows)} groups of layers: {way_out}"
        )
    capacity = _capacity(num_blocks, block_size, limits, max_positions)
    if asked is not None and asked > longest:
        hint = ""
        if None not in windows:
            # The option counts the blocks of each group.
            enough = -(-sum(limits) // len(limits))
            hint = f"; {enough} blocks are enough for any length"
        raise ValueError(
            f"max_model_len={asked} does not fit: the KV pool holds {capacity} tokens ({num_blocks}"
            f" blocks of {block_size}); lower max_model_len to {longest}, or {way_out}{hint}"
        )
    if longest < 2:
        raise ValueError(
            f"the KV pool holds {longest} token{'s' * (longest != 1)}; a request needs 2: raise"
            " num_kvcache_blocks"
        )
    if longest < max_positions:
        logger.warning(
            "max_model_len is %d, which the KV pool can hold; the model's limit is %d; for more,"
            " %s", longest, max_positions, way_out,
        )  # fmt: skip
    if windows:
        logger.info(
            "KV cache in %s: %d tokens in %d blocks of %d%s, %s",
            str(pool.dtype).removeprefix("torch."), capacity, num_blocks, block_size,
            f" for {len(windows)} groups of layers" if len(windows) > 1 else "",
            memory_text(num_blocks * pool.block_bytes),
        )  # fmt: skip
    return min(max_positions, longest)


def longest_sequence(num_blocks: int, block_size: int, limits: Sequence[int]) -> int:
    """How many tokens a sequence may have if it has the whole pool.

    `limits` has the most blocks of a sequence in each group. A group with a window takes at most
    the blocks of its window, and groups without a window share the rest. Unlimited if all groups
    have windows.
    """
    ordered = sorted(limits)
    for index, limit in enumerate(ordered):
        num_each = num_blocks // (len(ordered) - index)
        if limit > num_each:
            return num_each * block_size
        num_blocks -= limit
    return sys.maxsize


def _capacity(num_blocks: int, block_size: int, limits: Sequence[int], max_positions: int) -> int:
    """How many tokens the pool holds in sequences of `max_positions`, or as long as it allows."""
    if len(limits) <= 1:
        return num_blocks * block_size
    length = min(max_positions, longest_sequence(num_blocks, block_size, limits))
    of_sequence = -(-length // block_size)
    each = sum(min(of_sequence, limit) for limit in limits)
    return num_blocks * length // each
