"""Roofline: the bytes and FLOPs of a workload, and the least time that a machine takes for them.

Plain arithmetic over a model's shape and the lengths of requests: it knows no tensors and measures
nothing. All requests run at once. It counts what no engine can avoid:

- prefill: each prompt token passes the decoder's linear layers and causal attention. In the last
  layer, tokens that are not sampled from only need the keys and values. Latent rows are read as
  they are stored: their attention counts as that of one key head with wide keys.
- decode: each step reads the weights once, and every running sequence's KV once. Of the experts, it
  reads those that some token uses: their average number if all experts are equally likely.

The head is counted only for sampled rows. Norms, activations, embedding rows, logits and the host
are not counted: they are small, or can be hidden.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanovllm.layers.cache_spec import KeysAndValues, State, TokenCache
from nanovllm.layers.shared_cache import SharedKeysAndValues
from nanovllm.models.config import ModelConfig
from nanovllm.models.model_size import (
    WeightBytes,
    decoder_params,
    head_params,
    layer_params,
    step_weight_bytes,
)

HeadBytes = Callable[[int], int]  # bytes of one head's key or value of a token, by head_dim


@dataclass(frozen=True)
class Machine:
    """The two rates that bound a model's speed."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Floor:
    """The least time of a workload on a machine, in three parts."""

    prefill_seconds: float
    decode_gemm_seconds: float
    decode_kv_seconds: float

    @property
    def seconds(self) -> float:
        """The sum: parts cannot overlap, because a layer's attention waits for its projections."""
        return self.prefill_seconds + self.decode_gemm_seconds + self.decode_kv_seconds


def _attentions(config: ModelConfig) -> list[TokenCache]:
    """The cache specs of the layers that keep rows for each token."""
    caches = [cache for layer in config.layers for cache in layer.cache.each]
    return [cache for cache in caches if isinstance(cache, TokenCache)]


def state_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of the states of one sequence, all layers together."""
    return sum(
        math.prod(shape) * (4 if in_float32 else itemsize)
        for layer in config.layers
        for cache in layer.cache.each
        if isinstance(cache, State)
        for shape, in_float32 in cache.tensors
    )


def kv_bytes_per_token(config: ModelConfig, head_bytes: HeadBytes) -> int:
    """Bytes of one token in the KV cache, all layers together."""
    return sum(_row_bytes(cache, head_bytes) for cache in _attentions(config))


def _row_bytes(cache: TokenCache, head_bytes: HeadBytes, reads: bool = False) -> int:
    """Bytes of one token in one layer's cache, or that the layer `reads`."""
    _, num_kv_heads, head_dim = cache.heads
    shares = reads and isinstance(cache, SharedKeysAndValues)
    num_tensors = KeysAndValues.num_tensors if shares else cache.num_tensors
    return num_tensors * num_kv_heads * head_bytes(head_dim)


def prefill_flops(config: ModelConfig, input_lens: Sequence[int]) -> float:
    """FLOPs of prefilling prompts of these lengths; only their last rows are sampled from."""
    not_sampled = sum(input_lens) - len(input_lens)
    linear = decoder_params(config) * sum(input_lens)
    attention = 0
    kept_by = [(index, cache) for index, layer in enumerate(config.layers)
               for cache in layer.cache.each if isinstance(cache, TokenCache)]  # fmt: skip
    for index, cache in kept_by:
        is_last, layer = index == len(config.layers) - 1, config.layers[index]
        pairs = sum(seen_keys(n - 1 if is_last else 0, 1 if is_last else n, cache.window)
                    for n in input_lens)  # fmt: skip
        num_heads, _, head_dim = cache.heads
        attention += 2 * num_heads * (head_dim + (cache.value_width or head_dim)) * pairs
        if is_last and cache is layer.cache:  # alone: what has a state, too, computes it for all
            kept = config.hidden_size * cache.num_tensors * cache.row_size
            linear -= (layer_params(layer) - kept) * not_sampled
    return attention + 2 * linear + 2 * head_params(config) * len(input_lens)


def decode_batches(output_lens: Sequence[int]) -> list[int]:
    """The number of sequences in each decode step; prefill generates their first tokens."""
    return [sum(n > step for n in output_lens) for step in range(1, max(output_lens))]


def seen_keys(before: int, num_queries: int, window: int | None) -> int:
    """Pairs of a query and a key that it attends to, for queries after `before` other tokens."""
    growing = num_queries if window is None else min(max(window - before, 0), num_queries)
    pairs = growing * before + growing * (growing + 1) // 2
    return pairs + (num_queries - growing) * (window or 0)


def decode_kv_bytes(
    config: ModelConfig,
    head_bytes: HeadBytes,
    input_lens: Sequence[int],
    output_lens: Sequence[int],
) -> int:
    """Bytes of KV that decode reads; prefill generates the first token of each request."""
    return sum(
        _row_bytes(cache, head_bytes, reads=True) * seen_keys(num_in, num_out - 1, cache.window)
        for cache in _attentions(config)
        for num_in, num_out in zip(input_lens, output_lens, strict=True)
    )


def floor(
    config: ModelConfig,
    sizes: WeightBytes,
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    machine: Machine,
    head_bytes: HeadBytes,
) -> Floor:
    """The least time for requests of these lengths."""
    weight_bytes = functools.cache(functools.partial(step_weight_bytes, config, sizes))

    def weight_seconds(rows: int) -> float:
        return weight_bytes(rows) / machine.bytes_per_second

    row_seconds = 2 * (decoder_params(config) + head_params(config)) / machine.flops_per_second
    kv_bytes = decode_kv_bytes(config, head_bytes, input_lens, output_lens)
    # Each token after the first reads a sequence's states and writes them.
    num_decoded = sum(output_lens) - len(output_lens)
    kv_bytes += 2 * state_bytes(config, sizes.itemsize) * num_decoded
    return Floor(
        prefill_seconds=max(
            weight_seconds(sum(input_lens)),
            prefill_flops(config, input_lens) / machine.flops_per_second,
        ),
        decode_gemm_seconds=sum(
            max(weight_seconds(rows), rows * row_seconds) for rows in decode_batches(output_lens)
        ),
        decode_kv_seconds=kv_bytes / machine.bytes_per_second,
    )
