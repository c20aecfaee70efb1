"""Cancel the work for a client that leaves."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from nanovllm.utils.tasks import Stop

T = TypeVar("T")


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, T], timeout: float | None
) -> T | None:
    """The result of `work`. If the client disconnects first, work is cancelled; returns None.

    The work runs in this task. A new task would begin after all other tasks that are ready: if many
    requests come at once, the engine would get the first one only after all have been read.
    """
    stop = Stop()
    gone = asyncio.ensure_future(_disconnected(receive))
    gone.add_done_callback(lambda _: stop.cancel("gone"))
    limit = timeout and asyncio.get_running_loop().call_later(timeout, stop.cancel, "late")
    try:
        return await work
    except asyncio.CancelledError:
        if not stop.is_ours():  # the program that runs the application has cancelled it
            raise
        if stop.reason == "late":
            raise asyncio.TimeoutError from None
        return None
    finally:
        stop.is_over = True
        gone.cancel()
        if limit:
            limit.cancel()


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
