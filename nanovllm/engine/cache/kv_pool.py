"""The KV pool: one tensor with what all layers keep of tokens, in blocks, or two with scales.

It knows the size of a block and which layers read it; `sizing` finds how many blocks fit.
"""

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from nanovllm.engine.cache.groups import CacheGroups
from nanovllm.engine.cache.windows import Window, longest_sequence, most_held
from nanovllm.kernels.operands.kv_layer import CODES, SCALES
from nanovllm.utils.sizes import memory_text

logger = logging.getLogger("nanovllm")

CACHE_LINE = 64


class KVPool:
    """`[slots, blocks, ...]`. All groups share the blocks; a layer's keys and values have slots.

    A quantized pool also has scales, in the same slots. Pools `beside` it have the same blocks.
    """

    def __init__(
        self, groups: CacheGroups, block_size: int, dtype: torch.dtype, device: torch.device,
        beside: "Sequence[KVPool]" = (),
    ) -> None:  # fmt: skip
        self.groups = groups
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.beside = beside
        self.source: Callable[[int], torch.Tensor] | None = None  # of zeroed memory on a GPU
        self._scales_size = self._heads_of_slot() if dtype == CODES else 0
        self.release()

    def _heads_of_slot(self) -> int:
        """How many scales a slot has for each token."""
        layers = [layer for group in self.groups.groups for layer in group.layers]
        shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
        if len(shapes) > 1:
            raise ValueError(
                "kv_cache_dtype='fp8' needs layers whose keys have one shape; this model's have"
                f" {sorted(shapes)} as numbers of heads and head_dim"
            )
        ((num_heads, _),) = shapes
        return num_heads

    @property
    def block_bytes(self) -> int:
        """The size of one block, all slots together, and those of the pools beside it."""
        of_token = self.groups.slot_size * self.dtype.itemsize + self._scales_size * SCALES.itemsize
        own = self.groups.num_slots * self.block_size * of_token
        return own + sum(other.block_bytes for other in self.beside)

    def allocate(self, num_blocks: int) -> None:
        """Make the tensors, zeroed (masked keys are multiplied by 0), and hand out their slots."""
        shape = (self.groups.num_slots, num_blocks)
        try:
            self.cache = self._zeros((*shape, self.block_size * self.groups.slot_size), self.dtype)
            self.tensors = [self.cache]
            if self._scales_size:
                of_slot = self.block_size * self._scales_size
                self.tensors.append(self._zeros((*shape, of_slot), SCALES))
        except (MemoryError, RuntimeError, TypeError, ValueError) as error:  # each for a size
            size = memory_text(num_blocks * self.block_bytes)
            raise MemoryError(
                f"a KV pool of {num_blocks} blocks takes {size}, more than {self.device} has free;"
                " lower num_kvcache_blocks, cpu_kvcache_gib or gpu_memory_utilization"
            ) from error
        for number, group in enumerate(self.groups.groups):
            for index, layer in enumerate(group.layers):
                of_token = (self.block_size, layer.num_kv_heads)
                count = len(group.layers)
                places = range(index, count * layer.cache.num_tensors, count)
                caches = [
                    self._part(self.cache, place, group.parts, (*of_token, layer.head_dim))
                    for place in places
                ]
                for scales in self.tensors[1:]:
                    caches += [self._part(scales, place, 1, of_token[::-1]) for place in places]
                layer.set_cache(number, *(caches if len(places) > 1 else caches * 2))
        for other in self.beside:
            other.allocate(num_blocks)

    def _part(
        self, tensor: torch.Tensor, place: int, parts: int, of_block: tuple[int, ...]
    ) -> torch.Tensor:
        """One of the tensors of a group, [blocks * parts, ...]; a slot has `parts` of them."""
        slot, index = divmod(place, parts)
        size = math.prod(of_block)
        return tensor[slot].flatten()[index * size :].view(-1, *of_block)

    def copy(self, source: int, target: int) -> None:
        """Copy one block to another, in all slots: `block_bytes` read and written."""
        for tensor in self.tensors:
            tensor[:, target] = tensor[:, source]
        for other in self.beside:
            other.copy(source, target)

    def release(self) -> None:
        """Free the memory: the layers have no blocks until the next `allocate`."""
        self.allocate(0)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return zeros_of(shape, dtype, self.device, self.source)


def zeros_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    source: Callable[[int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Zeroed memory, on a GPU from `source` if given.

    On the CPU the system provides pages when they are first written.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu":
        if source is not None and num_bytes:
            return source(num_bytes).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def settle_length(asked: int | None, pool: KVPool, num_blocks: int, max_positions: int) -> int:
    """The `max_model_len` in use, of which `num_blocks` hold any one sequence.

    `max_positions` is what the user `asked` for, or else the model's own length.
    """
    block_size, windows = pool.block_size, pool.groups.windows
    share = "cpu_kvcache_gib" if pool.device.type == "cpu" else "gpu_memory_utilization"
    way_out = f"raise num_kvcache_blocks if it is set, or {share}"
    longest = longest_sequence(num_blocks, block_size, windows)
    if longest < 1:
        raise ValueError(
            f"the KV pool has {num_blocks} block{'s' * (num_blocks != 1)}, too few for"
            f" {len(windows)} groups of layers: {way_out}"
        )
    capacity = _capacity(num_blocks, block_size, windows, max_positions)
    if asked is not None and asked > longest:
        hint = ""
        if None not in windows:
            # The option counts the blocks of each group.
            enough = -(-sum(most_held(window, block_size) for window in windows) // len(windows))
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


def _capacity(
    num_blocks: int, block_size: int, windows: tuple[Window, ...], max_positions: int
) -> int:
    """How many tokens the pool holds in sequences of `max_positions`, or as long as it allows."""
    if len(windows) <= 1:
        return num_blocks * block_size
    length = min(max_positions, longest_sequence(num_blocks, block_size, windows))
    of_sequence = -(-length // block_size)
    each = sum(min(of_sequence, most_held(window, block_size)) for window in windows)
    return num_blocks * length // each
