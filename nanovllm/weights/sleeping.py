"""The commands by which all ranks free memory for a while, and get it back."""

from typing import Literal, NamedTuple

import torch

from nanovllm.engine.run.shard import Shard
from nanovllm.utils.resources import trim_heap
from nanovllm.weights.live import live_weights
from nanovllm.weights.sleep_memory import memory_of

Memory = Literal["weights", "kv_cache"]
MEMORIES: tuple[Memory, ...] = ("weights", "kv_cache")


class Save(NamedTuple):
    """Copies to the host what `Sleep` must keep. Nothing is freed yet, because a rank may fail."""

    level: int

    def run(self, shard: Shard) -> None:
        if (memory := memory_of(shard)) is not None:
            memory.save(keeps_weights=self.level == 1)


class DropSaved(NamedTuple):
    """Frees the saved copies, if another rank could not save."""

    def run(self, shard: Shard) -> None:
        if (memory := memory_of(shard)) is not None:
            memory.drop_saved()


class Sleep(NamedTuple):
    """Frees the KV pool and the weights, except those that are on a CPU already at level 1."""

    level: int

    def run(self, shard: Shard) -> None:
        if self.level == 2:
            live_weights(shard).drop_staged()
        if (memory := memory_of(shard)) is not None:
            memory.release()
            torch.cuda.empty_cache()
            return
        shard.caches.sleep()
        if self.level == 2:
            live_weights(shard).drop()
        trim_heap()


class WakeUp(NamedTuple):
    """Gets memory back: weights have their values if they were saved."""

    memories: tuple[Memory, ...]

    def run(self, shard: Shard) -> None:
        if (memory := memory_of(shard)) is not None:
            memory.restore(self.memories)
            return
        if "kv_cache" in self.memories:
            shard.caches.wake_up()
        if "weights" in self.memories:
            live_weights(shard).regain()
