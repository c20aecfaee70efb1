"""Work for a client that may leave, or that may last too long."""

import asyncio
from typing import Any

import pytest

from nanovllm.server.gone import unless_gone


class Client:
    """A client that leaves when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.left.wait()
        return {"type": "http.disconnect"}


def num_cancels() -> int:
    """How often the current task is asked to end; Python 3.10 does not count."""
    task = asyncio.current_task()
    return task.cancelling() if hasattr(task, "cancelling") else 0  # type: ignore[union-attr]


async def forever(ends: list[str]) -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        ends.append("cancelled")
        raise


def test_work_begins_before_other_tasks_that_are_ready() -> None:
    async def begin() -> list[str]:
        order: list[str] = []

        async def work(name: str) -> None:
            order.append(name)

        async def answer(name: str) -> None:
            order.append(f"{name} is read")
            await unless_gone(Client().receive, work(name), None)

        await asyncio.gather(answer("a"), answer("b"))
        return order

    assert asyncio.run(begin()) == ["a is read", "a", "b is read", "b"]


@pytest.mark.parametrize(("timeout", "leaves"), [(None, True), (30, True), (0.01, False)])
def test_work_is_cancelled_when_its_client_leaves_or_time_is_up(
    timeout: float | None, leaves: bool
) -> None:
    async def leave() -> None:
        client, ends = Client(), list[str]()
        if leaves:
            asyncio.get_running_loop().call_later(0.01, client.left.set)
            assert await unless_gone(client.receive, forever(ends), timeout) is None
        else:
            with pytest.raises(asyncio.TimeoutError):
                await unless_gone(client.receive, forever(ends), timeout)
        assert ends == ["cancelled"]
        await asyncio.sleep(0.01)  # which is not cancelled, too
        assert num_cancels() == 0
        with pytest.raises(asyncio.TimeoutError):  # other limits still hold
            await asyncio.wait_for(asyncio.sleep(60), 0.01)

    asyncio.run(leave())


def test_what_runs_the_application_may_cancel_it() -> None:
    async def cancel() -> None:
        ends: list[str] = []
        task = asyncio.ensure_future(unless_gone(Client().receive, forever(ends), 30))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends == ["cancelled"]

    asyncio.run(cancel())


def test_a_client_that_leaves_with_its_answer_cancels_nothing_later() -> None:
    """In each order of the two within a turn of the loop."""

    async def answer(order: tuple[Any, ...]) -> Any:
        client, done = Client(), asyncio.Event()
        loop = asyncio.get_running_loop()
        calls = {"leave": client.left.set, "end": done.set}

        async def work() -> str:
            await done.wait()
            return "answer"

        for name in order:
            loop.call_later(0.01, calls[name])
        try:
            return await unless_gone(client.receive, work(), None)
        finally:
            await asyncio.sleep(0.01)

    for order in (("leave", "end"), ("end", "leave")):
        assert asyncio.run(answer(order)) in ("answer", None)
