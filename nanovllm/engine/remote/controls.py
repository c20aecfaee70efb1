"""Controls: what callers ask of an engine in another process, beside requests."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nanovllm.engine.remote.connection import Connection
from nanovllm.metrics import Metric
from nanovllm.outputs import EngineStats
from nanovllm.weights.update import pairs, sendable_weight
from nanovllm.weights.weights import NamedTensors, Running

TENSORS_SENT = 8  # in a message, as they are copied for it


class Controls:
    """Statistics, weights, sleep and profiles, each by the engine's method of that name.

    The engine answers between two steps.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._updating = asyncio.Lock()

    async def stats(self) -> EngineStats:
        """Counts of what the engine has done and is doing."""
        stats: EngineStats = await self._connection.ask("stats")
        return stats

    async def get_metrics(self) -> list[Metric]:
        """The metrics of `LLM.get_metrics`."""
        metrics: list[Metric] = await self._connection.ask("get_metrics")
        return metrics

    async def update_weights(self, weights: NamedTensors, *, running: Running = "refuse") -> None:
        """Replace weights, as `LLM.update_weights`.

        CUDA tensors are opened by the engine's process; others are sent to it, a few at a time.
        What is wrong with a tensor is found when it is loaded, also in a list. Another call waits
        for the end of this one. A task that is cancelled gives its update up.
        """
        items = iter(pairs(weights))
        async with self._updating:
            try:
                await self._connection.ask("begin_update", running)
                while part := list(itertools.islice(items, TENSORS_SENT)):
                    sent = [sendable_weight(one) for one in part]
                    await self._connection.ask("load_weights", sent)
                await self._connection.ask("end_update")
            except BaseException:
                self._connection.send_question("cancel_update")
                raise

    async def reload_weights(self, *, running: Running = "refuse") -> None:
        """Load all weights of the checkpoint again."""
        await self._connection.ask("reload_weights", running=running)

    async def get_weights(self, names: str | Iterable[str] | None = None) -> dict[str, Any]:
        """Copies of weights on the host, as `LLM.get_weights`."""
        listed = names if names is None or isinstance(names, str) else list(names)
        weights: dict[str, Any] = await self._connection.ask("get_weights", listed)
        return weights

    async def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with every rank's model, as `LLM.apply_model`."""
        results: list[Any] = await self._connection.ask("apply_model", function)
        return results

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache."""
        done: bool = await self._connection.ask("reset_prefix_cache")
        return done

    async def sleep(self, level: int = 1, *, running: Running = "refuse") -> None:
        """Free the device's memory until `wake_up`, as `LLM.sleep`."""
        await self._connection.ask("sleep", level, running=running)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Get the memory back that `sleep` freed."""
        await self._connection.ask("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """Whether memory is freed that `wake_up` gets back."""
        sleeps: bool = await self._connection.ask("is_sleeping")
        return sleeps

    async def start_profile(self) -> None:
        """Begin to record what the engine does, as `LLM.start_profile`."""
        await self._connection.ask("start_profile")

    async def stop_profile(self) -> list[Path]:
        """End the recording; returns the traces."""
        paths: list[Path] = await self._connection.ask("stop_profile")
        return paths

    async def ping(self, seconds: float) -> None:
        """Raise an asyncio.TimeoutError if the engine's process has not answered for this long."""
        await self._connection.ping(seconds)
