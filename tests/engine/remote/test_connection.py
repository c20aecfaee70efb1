"""EngineConnection, without an engine: many requests at once, and many ends at once."""

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import LIMIT

from nanovllm.engine.ranks.frames import HEAD, frame, receive
from nanovllm.engine.remote.connection import TOGETHER, EngineConnection
from nanovllm.engine.remote.messages import DropRequest, RequestEnd
from nanovllm.engine.remote.outbox import Outbox
from nanovllm.engine.requests.measures import RequestTimes


class Ends:
    """A connection, and the engine's end of its socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, self.its = socket.socketpair()
        self.process = SimpleNamespace(link=ours, failure=lambda: RuntimeError("it has ended"))
        monkeypatch.setattr(
            "nanovllm.engine.remote.connection.EngineProcess", lambda *_: self.process
        )
        self.events: list[Any] = []
        self.connection = EngineConnection("module", "m", {}, self.events.append, lambda _: None)

    def run(self, work: Any, kind: str = "asyncio") -> Any:
        """Run on a loop of this kind: each sends what is written at another time."""

        async def run_and_close() -> Any:
            try:
                return await work
            finally:
                self.connection.disconnect(RuntimeError("the test is over"))
                await asyncio.sleep(0.01)

        if kind == "asyncio":
            return asyncio.run(run_and_close())
        loop = pytest.importorskip("uvloop").new_event_loop()
        try:
            return loop.run_until_complete(run_and_close())
        finally:
            loop.close()

    def waiting(self) -> int:
        """The bytes that the engine could read now."""
        try:
            return len(self.its.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return 0


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    made = Ends(monkeypatch)
    yield made
    made.process.link.close()
    made.its.close()


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_the_engine_gets_the_first_of_many_requests_before_the_last_is_read(
    ends: Ends, kind: str
) -> None:
    """All of this happens in one turn of the event loop, as when 256 clients ask at once."""

    async def send_many() -> None:
        await ends.connection.open()
        for number in range(TOGETHER - 1):
            ends.connection.send(DropRequest(number))
        assert ends.waiting() == 0, "few commands are sent together"
        ends.connection.send(DropRequest(TOGETHER - 1))
        assert ends.waiting() == TOGETHER * len(frame(DropRequest(0)))
        ends.connection.send(DropRequest(TOGETHER))
        await asyncio.sleep(0.05)
        assert [receive(ends.its) for _ in range(TOGETHER + 1)] == [
            DropRequest(number) for number in range(TOGETHER + 1)
        ]

    ends.run(send_many(), kind)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_commands_keep_their_order_when_the_socket_is_full(ends: Ends, kind: str) -> None:
    number, text = 40 * TOGETHER, "x" * 4000
    sent: Any = [DropRequest((place, text)) for place in range(number)]  # type: ignore[arg-type]

    async def send_much() -> None:
        await ends.connection.open()
        for place, command in enumerate(sent):
            ends.connection.send(command)
            if place % 100 == 0:
                await asyncio.sleep(0)
        read = [await asyncio.to_thread(receive, ends.its) for _ in sent]
        assert read == sent

    ends.run(send_much(), kind)


def test_what_is_sent_last_before_the_end_reaches_no_closed_socket(ends: Ends) -> None:
    async def send_and_close() -> None:
        await ends.connection.open()
        ends.connection.send(DropRequest(0))
        ends.connection.disconnect(RuntimeError("closed"))
        await asyncio.sleep(0.01)

    ends.run(send_and_close())
    assert ends.waiting() == 0


def test_other_tasks_run_between_many_ends_of_one_step(ends: Ends) -> None:
    """So that the first answers leave before the last are made."""

    async def receive_many() -> list[int]:
        await ends.connection.open()
        ended = [RequestEnd(number, RequestTimes(), 0) for number in range(3 * TOGETHER + 1)]
        data = frame(ended)
        assert len(data) > HEAD.size
        ends.its.sendall(data)
        seen: list[int] = []
        while len(ends.events) < len(ended):
            await asyncio.sleep(0)
            if ends.events and len(ends.events) not in seen:
                seen.append(len(ends.events))
        return seen

    assert ends.run(receive_many()) == [TOGETHER, 2 * TOGETHER, 3 * TOGETHER, 3 * TOGETHER + 1]


def test_a_message_larger_than_a_socket_arrives_while_its_sender_does_other_things() -> None:
    """Messages behind it would wait for the sender, which computes steps of 0.1 s and more."""
    ours, its = socket.socketpair()
    its.settimeout(LIMIT)
    message = bytes(range(256)) * 8192
    sender = Outbox(ours)
    with ours, its:
        for sent in (message, "short", message):
            sender.send(sent)
        assert [receive(its) for _ in range(3)] == [message, "short", message]
        sender.wait(LIMIT)
        sender.send("at once")
        assert receive(its) == "at once"


def test_an_outbox_without_a_reader_raises() -> None:
    ours, its = socket.socketpair()
    sender = Outbox(ours)
    with ours:
        sender.send(bytes(1 << 22))
        its.close()
        sender.wait(LIMIT)
        with pytest.raises(OSError, match=r"pipe|reset"):
            sender.send("more")
