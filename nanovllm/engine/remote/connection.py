"""EngineConnection: an event loop's link to an engine's process. It knows no requests or text."""

import asyncio
import contextlib
import itertools
import pickle
import socket
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.engine.errors import EngineEndedError, RankError
from nanovllm.engine.ranks.frames import HEAD, by_value, frame
from nanovllm.engine.remote.messages import (
    Ask,
    Command,
    EngineAnswer,
    EngineFailed,
    EngineReady,
    Event,
    Question,
    RequestEnd,
)
from nanovllm.engine.remote.process import EngineProcess

# Send at most this many commands, or handle this many ended requests, before other tasks run: the
# engine computes the first requests while later ones are read. Smaller values are not faster: the
# prefill of a few prompts takes as long as the prefill of many.
TOGETHER = 32


class EngineConnection:
    """Sends commands to an engine's process and passes on its events, until either side closes.

    When the process has ended, `failure` is the reason: a RankError or an EngineEndedError. It is
    passed to `on_end`, and later calls of `send` and `ask` raise it. A connection belongs to the
    event loop of the first `open`. `module` has the process's `main`.
    """

    def __init__(
        self,
        module: str,
        model: str,
        options: Mapping[str, Any],
        on_event: Callable[[Event], None],
        on_end: Callable[[BaseException], None],
    ) -> None:
        self.process = EngineProcess(module, model, options)
        self.failure: BaseException | None = None
        self._on_event, self._on_end = on_event, on_end
        self._ended = asyncio.Event()
        self._numbers = itertools.count()
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._ping: asyncio.Task[Any] | None = None
        self._ping_time = 0.0  # when the last ping was sent
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._unsent, self._num_unsent = b"", 0  # commands

    def wait_until_ready(self) -> EngineReady:
        """Wait for the model to be loaded; raises what the process raised."""
        return self.process.wait_until_ready()

    async def open(self) -> None:
        """Listen to the process, if this is the first call; commands may be sent from now on."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._listening = loop.create_task(self._listen())
        elif self._loop is not loop:
            raise RuntimeError("an AsyncLLM serves one event loop, that of its first call")
        while self._writer is None and self.failure is None:
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        """Raise if the process has ended, or the connection was closed."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # many callers may raise the same one

    def send(self, command: Command) -> None:
        """Send a command. Call `open` first."""
        self.check()
        assert self._loop is not None
        self._unsent += frame(command)
        self._num_unsent += 1
        if self._num_unsent == TOGETHER:
            self._flush()
        elif self._num_unsent == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send the collected commands: now, as far as the socket accepts, then by the writer."""
        data = memoryview(self._unsent)  # slices are no copies: weights are large
        self._unsent, self._num_unsent = b"", 0
        if not data or self.failure is not None:
            return
        assert self._writer is not None
        if self._writer.transport.get_write_buffer_size() == 0:
            with contextlib.suppress(OSError):  # the socket is full or closed: the writer notices
                data = data[self.process.link.send(data, socket.MSG_DONTWAIT) :]
        if data:
            self._writer.write(data)

    def send_question(self, question: Question) -> None:
        """Ask a question after all earlier ones, and do not wait for the answer."""
        if self.failure is None and self._writer is not None:
            self.send(Ask(next(self._numbers), question))

    async def ask(
        self, question: Question, *args: Any, between_steps: bool = True, **options: Any
    ) -> Any:
        """The engine's answer; raises what the engine raises.

        The engine answers between two of its steps, or else in a thread, while steps go on.
        """
        arguments = by_value((args, options))
        await self.open()
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(Ask(number, question, arguments, between_steps))
            return await answer
        finally:
            del self._questions[number]

    async def ping(self, seconds: float) -> None:
        """Raise an asyncio.TimeoutError if the process does not answer a question for this long.

        Callers at the same time share one question.
        """
        loop = asyncio.get_running_loop()
        if self._ping is None or self._ping.done():
            self._ping, self._ping_time = loop.create_task(self.ask("stats")), loop.time()
            self._ping.add_done_callback(lambda done: done.cancelled() or done.exception())
        left = self._ping_time + seconds - loop.time()
        await asyncio.wait_for(asyncio.shield(self._ping), max(0.0, left))

    async def wait_for_end(self) -> BaseException:
        """Wait until the process has ended; returns why."""
        await self._ended.wait()
        assert self.failure is not None
        return self.failure

    def disconnect(self, reason: BaseException) -> None:
        """Stop listening; `reason` becomes the failure, unless there was one before."""
        self._end(reason)
        if self._listening is not None and self._loop is not None and not self._loop.is_closed():
            self._listening.cancel()
            if self._writer is not None:
                self._writer.transport.abort()

    async def _listen(self) -> None:
        """Take the engine's messages until it ends."""
        try:
            # A duplicate: asyncio closes the socket that it gets, and `link` stays open until the
            # process has ended.
            link = self.process.link.dup()
            reader, self._writer = await asyncio.open_connection(sock=link)
            while True:
                (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                message = pickle.loads(await reader.readexactly(length))
                if isinstance(message, EngineFailed):
                    self._end(message.error)
                    return
                ends = 0
                for event in message:
                    self._take(event)
                    if isinstance(event, RequestEnd) and (ends := ends + 1) % TOGETHER == 0:
                        await asyncio.sleep(0)
        except (EOFError, OSError):
            self._end(await asyncio.to_thread(self.process.failure))
        except Exception as error:
            self._end(error)

    def _take(self, event: Event | EngineAnswer) -> None:
        """Answer a question, or hand the event on."""
        if not isinstance(event, EngineAnswer):
            self._on_event(event)
        elif (answer := self._questions.get(event.number)) is not None and not answer.done():
            error, value = event.error, None
            if error is None:
                try:
                    value = pickle.loads(event.value)
                except Exception as failed:  # this process may lack the error's class
                    error = TypeError(f"a result cannot be read: {type(failed).__name__}: {failed}")
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)

    def _end(self, failure: BaseException) -> None:
        """Record why the process sends no more messages, and end all calls that wait for some."""
        if self.failure is None:
            self.failure = failure
            if not isinstance(failure, RankError | EngineEndedError):
                self.failure = EngineEndedError(f"{type(failure).__name__}: {failure}")
                self.failure.__cause__ = failure
        if self._loop is not None and self._loop.is_closed():  # no caller waits any more
            return
        self._ended.set()
        self._on_end(self.failure)
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(self.failure)
