"""The KV pool: one tensor with the keys and values of all layers, in blocks, or two with scales.

It knows the size of a block and which layers read it; `sizing` finds how many blocks fit.
"""

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from nanovllm.engine.block_manager import longest_sequence, most_held
from nanovllm.kernels.kv_layer import CODES, SCALES, head_bytes
from nanovllm.layers.attention.layer import Attention
from nanovllm.utils.sizes import memory_text

logger = logging.getLogger("nanovllm")

CACHE_LINE = 64


class KVPool:
    """`[2, layers, blocks, block_size, kv_heads, head_dim]`; each attention layer has its slice.

    A quantized one also has scales, `[2, layers, blocks, kv_heads, block_size]`.
    """

    def __init__(
        self,
        layers: list[Attention],
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.block_size = block_size
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        self.beside: Sequence[KVPool] = ()  # pools that have the same blocks
        self.source: Callable[[int], torch.Tensor] | None = None  # of zeroed memory on a GPU
        self._asleep_blocks = 0
        self.release()

    @property
    def block_bytes(self) -> int:
        """The size of one block, all layers together, and those of the pools beside it."""
        num_heads = 2 * len(self.layers) * self.block_size * self.layers[0].num_kv_heads
        others = sum(other.block_bytes for other in self.beside)
        return num_heads * head_bytes(self.head_dim, self.dtype) + others

    def allocate(self, num_blocks: int) -> None:
        """Make the tensors, zeroed (masked keys are multiplied by 0), and hand out their slices."""
        shape = (2, len(self.layers), num_blocks)
        of_block = (self.block_size, self.layers[0].num_kv_heads)
        try:
            self.cache = self._zeros((*shape, *of_block, self.head_dim), self.dtype)
            self.tensors = [self.cache]
            if self.dtype == CODES:
                self.tensors.append(self._zeros((*shape, *reversed(of_block)), SCALES))
        except (MemoryError, RuntimeError, TypeError, ValueError) as error:  # each for a size
            size = memory_text(num_blocks * self.block_bytes)
            raise MemoryError(
                f"a KV pool of {num_blocks} blocks takes {size}, more than {self.device} has free;"
                " lower num_kvcache_blocks, cpu_kvcache_gib or gpu_memory_utilization"
            ) from error
        for index, layer in enumerate(self.layers):
            layer.set_cache(*(part[index] for both in self.tensors for part in both))
        for other in self.beside:
            other.allocate(num_blocks)

    def copy(self, source: int, target: int) -> None:
        """Copy one block to another, in all layers: `block_bytes` read and written."""
        for tensor in self.tensors:
            tensor[:, :, target] = tensor[:, :, source]
        for other in self.beside:
            other.copy(source, target)

    def release(self) -> None:
        """Free the memory: the layers have no blocks until the next `allocate`."""
        self.allocate(0)

    def sleep(self) -> None:
        """Free the memory until `wake_up`."""
        self._asleep_blocks = self.cache.shape[2]
        self.release()

    def wake_up(self) -> None:
        """Have as many blocks as before `sleep`; nothing happens if that has not run."""
        if self._asleep_blocks:
            self.allocate(self._asleep_blocks)
        self._asleep_blocks = 0

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory; on the CPU the system provides pages when they are first written."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.device.type != "cpu":
            if self.source is not None and num_bytes:
                return self.source(num_bytes).view(dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=self.device)
        memory = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
        start = -memory.ctypes.data % CACHE_LINE
        return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def settle_length(
    asked: int | None, pool: KVPool, num_blocks: int, max_positions: int, window: int | None
) -> int:
    """The `max_model_len` in use, of which `num_blocks` hold any one sequence.

    `max_positions` is what the user `asked` for, or else the model's own length.
    """
    block_size = pool.block_size
    share = "cpu_kvcache_gib" if pool.device.type == "cpu" else "gpu_memory_utilization"
    way_out = f"raise num_kvcache_blocks if it is set, or {share}"
    capacity = num_blocks * block_size
    longest = longest_sequence(num_blocks, block_size, window)
    if asked is not None and asked > longest:
        hint = (
            f"; {most_held(window, block_size)} blocks are enough for any length" if window else ""
        )
        raise ValueError(
            f"max_model_len={asked} does not fit: the KV pool holds {capacity} tokens ({num_blocks}"
            f" blocks of {block_size}); lower max_model_len to {longest}, or {way_out}{hint}"
        )
    if capacity < 2:
        raise ValueError("the KV pool holds 1 token; a request needs 2: raise num_kvcache_blocks")
    if longest < max_positions:
        logger.warning(
            "max_model_len is %d, which the KV pool can hold; the model's limit is %d; for more,"
            " %s", longest, max_positions, way_out,
        )  # fmt: skip
    logger.info(
        "KV cache in %s: %d tokens in %d blocks of %d, %s", str(pool.dtype).removeprefix("torch."),
        capacity, num_blocks, block_size, memory_text(num_blocks * pool.block_bytes),
    )  # fmt: skip
    return min(max_positions, longest)
