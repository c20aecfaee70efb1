"""Wire: the sending side of a connection, which ends clients that do not read."""

import asyncio
import contextlib
import select
from collections.abc import Callable

LINGER_SECONDS = 2.0  # how long the rest of a request is dropped after its answer
WATCH_SECONDS, MOST_WATCH_SECONDS = 0.1, 30.0  # between two looks at a client that sends no more


class Wire:
    """Writes to a client, and closes the connection in the ways that HTTP needs.

    The connection is aborted if the client reads nothing for `unread_seconds`.
    """

    def __init__(self, transport: asyncio.Transport, unread_seconds: float) -> None:
        self._transport, self._unread_seconds = transport, unread_seconds
        self._loop = asyncio.get_running_loop()
        self._writable = asyncio.Event()
        self._clock: asyncio.TimerHandle | None = None  # until a client must have read
        self._watch: asyncio.TimerHandle | None = None  # until the next look, or the end
        self.write = transport.write
        self.is_paused = False  # the client reads too slowly
        self.is_closing = False

    async def drain(self) -> None:
        """Wait until the client has read, or has gone."""
        await self._writable.wait()

    def pause(self) -> None:
        """Stop writing: the transport's buffer is full."""
        self.is_paused = True
        self._writable.clear()
        self._expect_reading()

    def resume(self) -> None:
        """Write again: the client has read."""
        self.is_paused = False
        self._writable.set()
        if self._clock is not None and not self.is_closing:
            self._clock.cancel()

    def close(self, lingers: bool = False) -> None:
        """Close the connection when the client has got all that was written.

        A system resets a connection that is closed before all was read, and the client may lose
        the answer. To avoid this, `lingers` drops what the client still sends, for some time.
        """
        self.is_closing = True
        if lingers and self._transport.can_write_eof():
            self._transport.write_eof()
            self._watch = self._loop.call_later(LINGER_SECONDS, self._transport.close)
        else:
            self._transport.close()
        self._expect_reading()

    def watch(self, probe: Callable[[], None], seconds: float = WATCH_SECONDS) -> None:
        """Find out whether a client that sends no more has left: `probe` writes to it if it can.

        The system of a client that has left then resets the connection. Nothing reads from the
        connection any more, so this looks, after longer and longer times.
        """
        probe()
        if _is_reset(self._transport):
            self._transport.abort()
        elif not self.is_closing:
            self._watch = self._loop.call_later(
                seconds, self.watch, probe, min(2 * seconds, MOST_WATCH_SECONDS)
            )

    def lose(self) -> None:
        """End all waiting: the connection has ended."""
        self.is_closing = True
        self.is_paused = False
        self._writable.set()
        for timer in (self._clock, self._watch):
            if timer is not None:
                timer.cancel()

    def _expect_reading(self) -> None:
        """Abort if the client has read nothing in `unread_seconds` from now."""
        if (size := self._transport.get_write_buffer_size()) > 0:
            if self._clock is not None:
                self._clock.cancel()
            self._clock = self._loop.call_later(self._unread_seconds, self._check_read, size)

    def _check_read(self, size: int) -> None:
        if self._transport.get_write_buffer_size() >= size:
            self._transport.abort()
        else:
            self._expect_reading()


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the other side has left, and said so."""
    found = select.poll()
    with contextlib.suppress(OSError, ValueError):  # it has just been closed
        found.register(transport.get_extra_info("socket").fileno(), 0)
        return bool(found.poll(0))
    return True
