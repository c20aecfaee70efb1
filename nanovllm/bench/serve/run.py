"""Send the requests of a run, and measure their answers."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanovllm.bench.serve.answer import Answer
from nanovllm.bench.serve.client import Client


@dataclass
class Run:
    """The measurements of a run so far; times are those of the client's clock."""

    answers: list[Answer] = field(default_factory=list)  # ended answers, also with errors
    num_sent: int = 0
    start: float = 0.0
    end: float = 0.0
    cpu_seconds: float = 0.0  # of this process

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last answer."""
        return self.end - self.start


async def send(client: Client, request: bytes, timeout: float) -> Answer:
    """Send one request; a failure becomes the answer's error."""
    answer = Answer()
    answer.start = time.perf_counter()
    try:
        answer.check(await asyncio.wait_for(client.send(request, answer), timeout))
    except (asyncio.TimeoutError, TimeoutError):
        answer.error = f"no whole answer within {timeout:g} s"
    except Exception as error:
        answer.error = str(error) or type(error).__name__
    return answer


async def run_load(
    client: Client,
    requests: Sequence[bytes],
    times: Sequence[float],
    max_concurrency: int | None,
    timeout: float,
    run: Run,
) -> None:
    """Send each request at its time, or later if `max_concurrency` are in flight; fill `run`.

    An answer's time begins when its request is sent.
    """
    slots = asyncio.Semaphore(max_concurrency or len(requests))

    async def send_one(request: bytes) -> None:
        async with slots:
            run.num_sent += 1
            run.answers.append(await send(client, request, timeout))

    cpu = time.process_time()
    run.start = time.perf_counter()
    tasks = []
    for request, due in zip(requests, times, strict=True):
        delay = run.start + due - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(send_one(request)))
    await asyncio.gather(*tasks)
    run.end = time.perf_counter()
    run.cpu_seconds = time.process_time() - cpu
