"""Measure a server: make the requests, warm up, run with a progress bar."""

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.bench.serve.answer import AnswerError
from nanovllm.bench.serve.arrivals import arrival_times
from nanovllm.bench.serve.client import Address, Client
from nanovllm.bench.serve.options import NUM_PROMPTS, ServerLoad
from nanovllm.bench.serve.prompts import RandomPrompts
from nanovllm.bench.serve.run import Run, run_load, send
from nanovllm.bench.serve.server import Server
from nanovllm.utils.interrupts import make_bar
from nanovllm.utils.open_files import allow_open_files

INTERVAL = 0.25  # seconds between two drawings of the bar
SHORT = 16  # tokens of a prompt that warms up for a dataset; its prompts may all be short
SPARE_FILES = 64  # files that a process opens in addition to its connections


@dataclass(frozen=True)
class ServerBenchmark:
    """The server to measure, and the requests to send; they are random without a dataset."""

    address: Address
    api_key: str | None
    model: str | None
    load: ServerLoad
    dataset: Sequence[Mapping[str, Any]] | None
    extra_body: Mapping[str, Any]


def measure(job: ServerBenchmark) -> tuple[Run, str]:
    """Run the job; return what was measured, and the model's name.

    uvloop is used if it is installed: it takes half of asyncio's time for a chunk.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_measure(job))
    measured: tuple[Run, str] = uvloop.run(_measure(job))
    return measured


async def _measure(job: ServerBenchmark) -> tuple[Run, str]:
    load, client = job.load, Client(job.address, job.api_key)
    try:
        server = Server(client, load, job.extra_body)
        await server.choose_model(job.model)
        drawn = load if job.dataset is None else replace(load, input_len=SHORT)
        prompts = RandomPrompts(drawn, await server.vocabulary())
        dataset = job.dataset or [prompts.draw() for _ in range(load.num_prompts or NUM_PROMPTS)]
        requests = [server.request(fields) for fields in dataset]
        allow_connections(min(load.max_concurrency or len(requests), len(requests)))
        await _warm_up(server, [prompts.draw() for _ in range(load.num_warmups)], load)
        run, times = Run(), arrival_times(load, len(requests))
        gc.collect()
        gc.freeze()  # present objects are not searched for garbage during the measurement
        async with _bar(run, len(requests)):
            await run_load(client, requests, times, load.max_concurrency, load.timeout, run)
    finally:
        gc.unfreeze()
        client.close()
    return run, server.model


async def _warm_up(server: Server, dataset: Sequence[Mapping[str, Any]], load: ServerLoad) -> None:
    """Send requests that are not measured, as many at a time as later; raise if one fails."""
    slots = asyncio.Semaphore(load.max_concurrency or max(len(dataset), 1))

    async def send_one(fields: Mapping[str, Any]) -> None:
        async with slots:
            answer = await send(server.client, server.request(fields), load.timeout)
        if answer.error is not None:
            raise AnswerError(
                f"the first request to {server.client.address} failed: {answer.error}"
            )

    await asyncio.gather(*map(send_one, dataset))


def allow_connections(number: int) -> None:
    """Allow this process `number` open connections; a ValueError if the system forbids it."""
    needed = number + SPARE_FILES
    if (allowed := allow_open_files(needed)) < needed:
        raise ValueError(
            f"{number} requests in flight need {needed} open files, and this process may have"
            f" {allowed}: give --max-concurrency {max(allowed - SPARE_FILES, 1)} or less"
        )


@contextlib.asynccontextmanager
async def _bar(run: Run, total: int) -> AsyncIterator[None]:
    """Show the run's progress on stderr during the block, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with make_bar(total=total, desc="Requests", dynamic_ncols=True) as bar:

        def draw() -> None:
            ended = len(run.answers)
            failed = sum(answer.error is not None for answer in run.answers)
            notes = [f"{run.num_sent - ended} in flight"] + [f"{failed} failed"] * bool(failed)
            bar.n = ended
            bar.set_postfix_str(", ".join(notes))

        async def repeat() -> None:
            while True:
                draw()
                await asyncio.sleep(INTERVAL)

        task = asyncio.create_task(repeat())
        try:
            yield
        finally:
            task.cancel()
            draw()
