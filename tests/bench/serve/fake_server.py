"""A server with OpenAI's API on a plain socket, which answers as a test says.

An answer is a list of steps: bytes to send, seconds to wait, or what to wait for.
"""

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from waiting import LIMIT

Step = bytes | float | Callable[[], bool]
Answer = Callable[[dict[str, Any]], Sequence[Step]]
END = b"0\r\n\r\n"  # of a chunked body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()
    return b"data: %b\n\n" % data


def head(status: str = "200 OK", kind: str = "text/event-stream", *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def stream_head(*more: str) -> bytes:
    return head("200 OK", "text/event-stream; charset=utf-8", "Transfer-Encoding: chunked", *more)


def json_answer(value: Any, status: str = "200 OK") -> list[Step]:
    data = json.dumps(value).encode()
    return [head(status, "application/json", f"Content-Length: {len(data)}") + data]


def text_chunk(text: str | None, finish_reason: str | None = None, chat: bool = False) -> bytes:
    content = {"delta": {"content": text}} if chat else {"text": text}
    return event({"choices": [{"index": 0, **content, "finish_reason": finish_reason}]})


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event({"choices": [], "usage": counts})


def stream(
    *delays: float, prompt_tokens: int = 10, tokens_per_chunk: int = 1, chat: bool = False,
    counts: bool = True,
) -> list[Step]:  # fmt: skip
    """A stream with a chunk of text after each delay."""
    steps: list[Step] = [stream_head()]
    for i, delay in enumerate(delays):
        reason = "length" if i == len(delays) - 1 else None
        steps += [delay, chunk(text_chunk(f" w{i}", reason, chat))]
    if counts:
        steps.append(chunk(usage(prompt_tokens, tokens_per_chunk * len(delays))))
    return [*steps, chunk(event(b"[DONE]")) + END]


class FakeServer:
    """Runs in a thread during a `with` block. `bodies` are those of the requests for answers."""

    def __init__(self, answer: Answer | None = None, **paths: list[Step]) -> None:
        self.answer: Answer = answer or (lambda body: stream(0.0, 0.0))
        self.paths = {"/v1/models": json_answer({"data": [{"id": "fake"}]})} | {
            f"/{name}": steps for name, steps in paths.items()
        }
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_connections = self.num_in_flight = self.max_in_flight = 0
        self.drops_idle = False  # closes a connection when a second request arrives on it
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        assert self._started.wait(LIMIT)
        return self

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT)

    def _run(self) -> None:
        serving = asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1000)
        self._server = self._loop.run_until_complete(serving)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop.call_soon(self._started.set)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._server.close()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        number = 0
        try:
            while True:
                path, body = await self._read(reader)
                number += 1
                if self.drops_idle and number > 1:
                    return
                if not await self._send(writer, path, body):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
        text = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line[15:] for line in text.split("\r\n") if line.startswith("Content-Length")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b"{}"
        self.heads.append(text)
        return text.split()[1], json.loads(body)

    async def _send(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> bool:
        """Send the answer; whether the connection is kept."""
        if path.endswith("completions"):
            self.bodies.append(body)
            steps: Sequence[Step] = self.answer(body)
        else:
            steps = self.paths.get(path) or json_answer({"detail": "Not Found"}, "404 Not Found")
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
            elif callable(step):
                while not step():
                    await asyncio.sleep(0.001)
            elif step:
                await asyncio.sleep(step)
        self.num_in_flight -= 1
        return not (isinstance(steps[-1], float) and steps[-1] == 0)  # ends with 0.0: close


def pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    """The data, cut at these places."""
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(places):
        if end > start:
            yield data[start:end]
