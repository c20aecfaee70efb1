"""AsyncWeights: reads, replaces and frees the weights of an engine in another process."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from nanovllm.engine.remote.connection import EngineConnection
from nanovllm.weights.update import pairs, sendable_weight
from nanovllm.weights.weights import NamedTensors, Running

TENSORS_SENT = 8  # tensors in a message, which are copied for it


class AsyncWeights:
    """The calls of `Weights` and `SleepMode`, each answered by the engine between two steps."""

    def __init__(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._updating = asyncio.Lock()

    async def update_weights(self, weights: NamedTensors, *, running: Running = "refuse") -> None:
        """Replace weights: see `AsyncLLM.update_weights`."""
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

    async def sleep(self, level: int = 1, *, running: Running = "refuse") -> None:
        """Free the device's memory until `wake_up`, as `LLM.sleep`."""
        await self._connection.ask("sleep", level, running=running)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Get the memory back that `sleep` freed."""
        await self._connection.ask("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """Whether memory is freed that `wake_up` restores."""
        sleeps: bool = await self._connection.ask("is_sleeping")
        return sleeps
