"""SharedKeysAndValues: the cache of a layer that reads the keys and values of another layer.

No PyTorch here: configs import it.
"""

from dataclasses import dataclass

from nanovllm.layers.cache_spec import KeysAndValues


@dataclass(frozen=True)
class SharedKeysAndValues(KeysAndValues):
    """Keys and values that an earlier layer keeps, with the same heads and window.

    The layer itself keeps nothing, so that no memory is counted for it.
    """

    num_tensors = 0

    def part(self, num_ranks: int) -> "SharedKeysAndValues":
        part = super().part(num_ranks)
        return SharedKeysAndValues(*part.heads, part.window)
