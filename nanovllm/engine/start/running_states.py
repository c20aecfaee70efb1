"""How many sequences run at once by default, in models that keep states for each of them."""

import logging
import math

import torch

from nanovllm.config import Config
from nanovllm.layers.cache_spec import State
from nanovllm.models.config import ModelConfig
from nanovllm.utils.resources import GIB, memory_text

logger = logging.getLogger("nanovllm")

# The most that states of running sequences take by default: of `cpu_kvcache_gib`, or of the GPU's
# memory, which has the weights too.
SHARES = {"cpu": 1 / 2, "cuda": 1 / 4}


def num_sequences(
    most: int, slots_each: int, config: Config, model_config: ModelConfig, num_ranks: int,
    device: torch.device, dtype: torch.dtype,
) -> int:  # fmt: skip
    """`most`, or fewer sequences if the states of so many would take too much memory.

    A sequence has `slots_each` states.
    """
    caches = [cache for layer in model_config.layers for cache in layer.cache.each]
    of_sequence = slots_each * sum(_num_bytes(c, dtype) for c in caches if isinstance(c, State))
    if device.type == "cpu":
        memory = config.cpu_kvcache_gib * GIB
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        memory = total * config.gpu_memory_utilization * num_ranks
    fitting = fitting_sequences(most, of_sequence, SHARES[device.type] * memory)
    if fitting < most:
        logger.info(
            "max_num_seqs is %d in place of %d: the states of a sequence take %s",
            fitting, most, memory_text(of_sequence),
        )  # fmt: skip
    return fitting


def fitting_sequences(most: int, of_sequence: int, memory: float) -> int:
    """`most`, or as many sequences as have their states in this memory; at least one."""
    return max(1, min(most, int(memory / max(1, of_sequence))))


def _num_bytes(state: State, dtype: torch.dtype) -> int:
    """The bytes of a state on all ranks together."""
    sizes = {True: torch.float32.itemsize, False: dtype.itemsize}
    return sum(math.prod(shape) * sizes[in_float32] for shape, in_float32 in state.tensors)
